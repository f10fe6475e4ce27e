"""A data set on the Hugging Face hub: `owner/name@revision#split`. Owns the calls to `huggingface_hub` for data.

Its files are fetched into the cache of `huggingface_hub` and read as those of a directory are. Which are of a split is told by
the data set's card where that lists them (`configs`), else by their names. `#config/split` names one of several configurations.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from swarm.base.errors import ConfigError
from swarm.feed.files import TRAIN, DataFile, data_file, is_data, of_split, tell_left_out

logger = logging.getLogger(__name__)

_NAME = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?(#((?P<config>[^/#]+)/)?(?P<split>[\w.-]+))?")


def hub_files(name: str) -> list[DataFile]:
    """The files of one split, the training split if none is named, fetched where they are not here yet.

    Where the hub cannot be asked, what is in the cache is taken.

    Raises:
        ConfigError: there is no such data set or split, or nobody can be asked and it is not here.
    """
    found = _NAME.fullmatch(name)
    where = f"hub:{name}"
    if found is None:
        raise ConfigError(f"data {where}: a data set on the hub is hub:owner/name, with @revision and #split if wanted")
    repository, revision, split = found["repository"], found["revision"], found["split"] or TRAIN
    commit, names, configs = _names_at_commit(repository, revision, where)
    data = sorted(filter(is_data, names))
    if patterns := _patterns(configs, found["config"], where):
        chosen = _of_patterns(data, patterns, split, where)
    else:
        if found["config"]:
            raise ConfigError(f"data {where}: its card lists no configuration")
        chosen = of_split(data, split, where)
    tell_left_out(where, data, chosen)
    if revision != commit:
        logger.info("data %s: commit %s; hub:%s@%s names the same for ever", where, commit[:12], repository, commit)
    return [data_file(_fetched(repository, file, commit, where)) for file in chosen]


def _names_at_commit(repository: str, revision: str | None, where: str) -> tuple[str, list[str], list[Any]]:
    """The commit, the names of its files, and the configurations that its card lists."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    try:
        info: Any = HfApi().dataset_info(repository, revision=revision)
    except Exception as error:  # of several families, some of them the HTTP library's own
        has_spoken = isinstance(error, HfHubHTTPError) and error.response is not None and error.response.status_code < 500
        told = " ".join(str(error).split())[:200] or type(error).__name__
        if has_spoken:
            raise ConfigError(f"data {where}: from the hub: {told}") from None
        try:
            cached = Path(snapshot_download(repository, repo_type="dataset", revision=revision, local_files_only=True))
        except Exception:  # as above
            raise ConfigError(f"data {where}: the hub cannot be asked ({told}), and it is not in the cache") from None
        logger.warning("data %s: the hub cannot be asked (%s); taking commit %s from the cache", where, told[:80], cached.name)
        names = [str(path.relative_to(cached)) for path in cached.rglob("*") if path.is_file()]
        return cached.name, names, _configs_of_card(cached / "README.md")
    card = info.card_data.to_dict() if info.card_data is not None else {}
    return info.sha, [file.rfilename for file in info.siblings or []], card.get("configs") or []


def _configs_of_card(card: Path) -> list[Any]:
    from huggingface_hub import DatasetCard

    try:
        return DatasetCard.load(card).data.to_dict().get("configs") or []
    except Exception:  # no card, or one that is no YAML
        return []


def _patterns(configs: Iterable[Any], config: str | None, where: str) -> list[tuple[str, str]]:
    """Pairs of a split and a pattern of names, of the configuration that is named, or the only or default one."""
    known = {str(c["config_name"]): c for c in configs if isinstance(c, Mapping) and c.get("data_files") and c.get("config_name")}
    if not known:
        return []
    default = next((name for name, c in known.items() if c.get("default")), "default" if "default" in known else None)
    name = config or (next(iter(known)) if len(known) == 1 else default)
    if name not in known:
        raise ConfigError(f"data {where}: its configurations are {', '.join(known)}; name one: #CONFIG/SPLIT")
    entries = known[name]["data_files"]
    pairs = []
    for entry in entries if isinstance(entries, list) else [entries]:
        split, paths = (str(entry.get("split", TRAIN)), entry.get("path")) if isinstance(entry, Mapping) else (TRAIN, entry)
        pairs += [(split, str(path)) for path in (paths if isinstance(paths, list) else [paths])]
    return pairs


def _of_patterns(names: list[str], patterns: list[tuple[str, str]], split: str, where: str) -> list[str]:
    chosen = [name for name in names if any(of == split and fnmatch(name, pattern) for of, pattern in patterns)]
    if not chosen:
        splits = ", ".join(sorted({of for of, _ in patterns}))
        raise ConfigError(f"data {where}: holds no file of the split {split!r}; its card lists {splits}: name one with #SPLIT")
    return chosen


def _fetched(repository: str, file: str, commit: str, where: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(repository, file, repo_type="dataset", revision=commit))
    except Exception as error:  # as above
        raise ConfigError(f"data {where}: {file}: {' '.join(str(error).split())[:200]}") from None
