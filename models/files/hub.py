"""A model on the Hugging Face hub: files are fetched when they are asked for. Owns the calls to `huggingface_hub`.

Every file is that of one commit, so a run that names id and commit names the same bytes for ever; the hub tells the
SHA-256 of its large files, so a run's creator need not fetch them to state their digests.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from swarm.base.errors import ConfigError

_log = logging.getLogger(__name__)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(@[\w.-]+)?")


def is_hub_id(text: str) -> bool:
    """Whether `text` has the form `owner/name` or `owner/name@revision`."""
    return _HUB_ID.fullmatch(text) is not None and len(text) <= 200


class Hub:
    """The files of one model at one commit.

    Args:
        hub_id: `owner/name`, optionally with `@revision` (a branch, tag or commit).

    Where the hub cannot be asked, the commit of that name which is in this machine's cache is taken, as far as it is there.

    Raises:
        ConfigError: there is no such model, or the hub cannot be reached and the cache does not have it.
    """

    def __init__(self, hub_id: str) -> None:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()
        self._repository, _, revision = hub_id.partition("@")
        #: By name; None for one that is only known to be in the cache.
        self._files: dict[str, Any] = {}
        #: The directory of the commit in the cache of `huggingface_hub`, where the hub itself cannot be asked.
        self._cached: Path | None = None
        try:
            info: Any = HfApi().model_info(self._repository, revision=revision or None, files_metadata=True)
        except Exception as error:  # of several families, some of them the HTTP library's own
            # Whatever it says of the model, it has spoken; unless it is out of order.
            has_spoken = isinstance(error, HfHubHTTPError) and error.response is not None and error.response.status_code < 500
            self._cached = None if has_spoken else _in_cache(self._repository, revision or None)
            if self._cached is None:
                also = "" if has_spoken else ", and it is not in the cache"
                raise ConfigError(f"model {hub_id}: no such directory here, and from the hub: {_one_line(error)}{also}") from None
            self._commit = self._cached.name
            self._files = {str(path.relative_to(self._cached)): None for path in self._cached.rglob("*") if path.is_file()}
            why = _one_line(error)[:80]
            _log.warning("model %s: the hub cannot be asked (%s); taking commit %s from the cache", hub_id, why, self._commit)
        else:
            self._commit = info.sha
            self._files = {file.rfilename: file for file in info.siblings or []}
        #: Names the same bytes for ever.
        self.name = f"{self._repository}@{self._commit}"

    def path(self, file: str) -> Path | None:
        """The local path of a file, which is fetched if it is not here yet."""
        from huggingface_hub import hf_hub_download

        if file not in self._files:
            return None
        if self._cached is not None:
            return self._cached / file
        try:
            return Path(hf_hub_download(self._repository, file, revision=self._commit))
        except Exception as error:
            raise ConfigError(f"model {self.name}: {file}: {_one_line(error)}") from None

    def extra_shards(self, known: Iterable[str]) -> list[str]:
        """None: a hub may hold the model in several forms."""
        return []

    def file_digest(self, file: str) -> str | None:
        """SHA-256 of a large file as the hub states it, without fetching it."""
        lfs = getattr(self._files.get(file), "lfs", None)
        return None if lfs is None else str(lfs.sha256)

    def fetch(self, files: Iterable[str]) -> Path | None:
        """Fetch those of `files` that there are, into one directory."""
        found = [path for file in files if (path := self.path(file)) is not None]
        return found[0].parent if found else None


def _in_cache(repository: str, revision: str | None) -> Path | None:
    """The directory of `revision` in the cache, whose name is the commit's; None if it is not there.

    A cache that knows no branches, since only commits were fetched by name, has one that is meant if it has no other.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.file_download import repo_folder_name

    try:
        return Path(snapshot_download(repository, revision=revision, local_files_only=True))
    except Exception:  # as above
        commits = [*(Path(HF_HUB_CACHE) / repo_folder_name(repo_id=repository, repo_type="model")).glob("snapshots/*")]
        return commits[0] if revision is None and len(commits) == 1 else None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
