"""What the run is: a TOML file and the command line become one `RunConfig`, and its verbatim bytes.

Owns precedence (command line over file over defaults) and the local paths, which never enter the configuration.
"""

from __future__ import annotations

import json
import logging
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from launch.arguments import MAX_PROCESSES
from launch.options import DataOptions, ModelOptions
from launch.run.averaging_notes import follow_compressor, taken_defaults, warnings
from launch.run.left_open import LeftOpen
from launch.run.models import TOKENIZER_DIRECTORY, described, fields_of, place_of, stated_vocab_size, tokenizer_in, vocab_size_of
from launch.run.token_cache import token_cache
from models.packing import why_apart
from models.presets import PRETRAINED
from swarm.base.config import NEW_NO_DECAY, RunConfig, first_problem, parse_config, parse_config_bytes
from swarm.base.dotted import is_dotted
from swarm.base.errors import ConfigError
from swarm.feed.files import HUB_PREFIX, is_there
from swarm.feed.sources import BUILTIN
from swarm.feed.tokenizers import ByteTokenizer

_log = logging.getLogger(__name__)

#: Keys of a run file that are this machine's business and are not part of the run.
PATH_KEYS = ("data", "eval_data", "tokenizer")
#: Keys of the run file's `[local]` table, for `launch_local`.
LOCAL_KEYS = ("peers_per_stage", "trainers")
#: Filled from the data, and the option that names what is digested; tokens depend on the tokenizer, so it comes first.
DIGEST_KEYS = {
    "tokenizer_digest": "tokenizer with --tokenizer",
    "data_digest": "data with --data",
    "weights": "model with --model",
    "weights_source": "model with --model",
}


@dataclass(frozen=True, kw_only=True)
class DataPaths:
    """Where this machine finds the run's data (whatever `--data` takes); `None` is the built-in one.

    `model` is a directory or hub id whose weights the run begins with.
    """

    data: str | None = None
    eval_data: str | None = None
    tokenizer: str | None = None
    model: str | None = None

    def overridden_by(self, options: DataOptions | ModelOptions) -> DataPaths:
        """These paths, except where the command line names others."""
        given: dict[str, str | None] = {}
        if isinstance(options, DataOptions):
            given |= {"data": options.data, "eval_data": options.eval_data, "tokenizer": options.tokenizer}
        if isinstance(options, ModelOptions):
            given["model"] = options.model
        return replace(self, **{key: path for key, path in given.items() if path is not None})

    def with_tokenizer(self) -> DataPaths:
        """A model brings its tokenizer.

        Raises:
            ConfigError: it does not, and none is named.
        """
        if self.model is None or self.tokenizer is not None or is_dotted(self.data or ""):
            return self
        return replace(self, tokenizer=tokenizer_in(self.model))

    def arguments(self) -> list[str]:
        """The same paths as command-line words."""
        words = []
        for key in PATH_KEYS:
            if (source := getattr(self, key)) is not None:
                words += [f"--{key.replace('_', '-')}", source]
        return words


@dataclass(frozen=True, kw_only=True)
class RunFile:
    """A run file as read: fields of `RunConfig` (unvalidated), local paths, and the `[local]` table."""

    path: Path
    fields: Mapping[str, Any]
    paths: DataPaths = DataPaths()
    local: Mapping[str, Any] = field(default_factory=dict)
    epochs: float | None = None
    #: The verbatim bytes, if the file is a run's own configuration (`run.json`) rather than TOML.
    config_bytes: bytes | None = None


def read_run_file(path: Path) -> RunFile:
    """Read a TOML run file, or the `run.json` that a run keeps of itself, and its tokenizer beside it.

    Raises:
        ConfigError: unreadable, malformed, an unknown key, or a data path that does not exist.
    """
    if path.is_dir() or path.is_char_device():
        raise ConfigError(f"{path}: is a {'directory' if path.is_dir() else 'device'}, not a run file")
    try:
        content = path.read_bytes()
        if path.suffix == ".json":
            kept = path.parent / TOKENIZER_DIRECTORY
            return RunFile(
                path=path,
                fields=parse_config_bytes(content).model_dump(mode="json"),
                config_bytes=content,
                paths=DataPaths(tokenizer=str(kept) if kept.is_dir() else None),
            )
        table = tomllib.loads(content.decode())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    known = set(RunConfig.model_fields) | set(PATH_KEYS) | {"local", "epochs"}
    for key in table:
        if key not in known:
            raise ConfigError(f"{path}: unknown key {key!r}")
    table, place = with_model(table, relative_to=path.parent)
    paths = DataPaths(model=place, **{key: _data_path(path, key, table.pop(key)) for key in PATH_KEYS if key in table})
    local, epochs = _local_table(path, table.pop("local", {})), table.pop("epochs", None)
    is_number = isinstance(epochs, int | float) and not isinstance(epochs, bool) and 0 < epochs < float("inf")
    if epochs is not None and not is_number:
        raise ConfigError(f"{path}: epochs: {epochs!r} is no number above 0")
    return RunFile(path=path, fields=table, local=local, paths=paths, epochs=epochs)


def _data_path(run_file: Path, key: str, value: Any) -> str:
    """A path or pattern of a run file, relative to the file's own directory; other sources stay as they are."""
    if not isinstance(value, str):
        raise ConfigError(f"{run_file}: {key}: a path is a string")
    if is_dotted(value) or value.startswith(HUB_PREFIX):
        return value
    path = run_file.parent / Path(value).expanduser()
    if not is_there(str(path)):
        raise ConfigError(f"{run_file}: {key}: {path}: no such file or directory")
    return str(path)


def _local_table(run_file: Path, table: Any) -> dict[str, int]:
    if not isinstance(table, dict):
        raise ConfigError(f"{run_file}: local: must be a table")
    for key, value in table.items():
        if key not in LOCAL_KEYS:
            raise ConfigError(f"{run_file}: unknown key 'local.{key}'")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{run_file}: local.{key}: {value!r} is not a whole number of at least 1")
        if value > MAX_PROCESSES:
            raise ConfigError(f"{run_file}: local.{key}: {value} is more than {MAX_PROCESSES}, the most on one machine")
    return dict(table)


def with_model(fields: Mapping[str, Any], *, relative_to: Path | None = None) -> tuple[dict[str, Any], str | None]:
    """If `model` names a directory or hub id: its configuration in place of it, and where it is.

    Raises:
        ConfigError: it holds no model.
    """
    place = place_of(fields.get("model"), relative_to=relative_to)
    if place is None:
        return dict(fields), None
    options = fields.get("model_options", {})
    return {**fields, **fields_of(place, options if isinstance(options, Mapping) else {})}, place


def build_config(run_file: RunFile | None, overrides: Mapping[str, Any]) -> RunConfig:
    """Merge and validate; the digests of the data are still those of the file, or empty.

    Raises:
        ConfigError: one line naming where the value came from, the field, and what is wrong.
    """
    is_saved = run_file is not None and run_file.config_bytes is not None
    merged = dict(run_file.fields) if run_file else {}
    if is_saved:
        merged = follow_compressor(merged, overrides)
    for key, value in overrides.items():
        base = merged.get(key)
        if key == "timing" and isinstance(base, str):
            base = {"preset": base}
        merged[key] = {**base, **value} if isinstance(base, dict) and isinstance(value, dict) else value
    sources = [str(run_file.path)] if run_file else []
    if overrides or not sources:
        sources.append("command line")
    return parse_config(merged, where=" with ".join(sources), given=overrides if is_saved else None)


def create_run(config: RunConfig, paths: DataPaths, *, today: date | None = None, left_open: LeftOpen | None = None) -> RunConfig:
    """`config` with the digests of this machine's data and tokenizer, and with the tokenizer's vocabulary if it has none.

    Reads the data; may take seconds. `today` (by default that of UTC) is what a chat template is told that asks for it.
    What was `left_open` follows from the number of samples.

    Raises:
        ConfigError: the data is unusable, is not the data whose digest the configuration states, or makes too many steps.
    """
    from swarm.feed.feed import describe_data

    if config.data_digest and config.dataset != BUILTIN and paths.data is None:
        raise ConfigError(f"the run's data is {config.dataset}: name it with --data")
    paths = paths.with_tokenizer()
    gets_vocabulary = (
        paths.tokenizer is not None
        and config.model != PRETRAINED
        and not is_dotted(config.model)
        and stated_vocab_size(config) is None
    )
    describe = partial(
        describe_data,
        data=paths.data,
        eval_data=paths.eval_data,
        tokenizer=paths.tokenizer,
        vocab_size=None if gets_vocabulary else vocab_size_of(config),
        today=today or datetime.now(UTC).date(),
        cache=token_cache(),
    )
    found = describe(config)
    if "no_decay" not in config.model_fields_set:
        found["no_decay"] = NEW_NO_DECAY
    if paths.model is not None:
        found |= described(paths.model)
    for key, named in DIGEST_KEYS.items():
        stated = getattr(config, key)
        if stated and key in found and stated != found[key]:
            here = f"the run states {str(stated)[:12]}.., what is here has {str(found[key])[:12]}.."
            raise ConfigError(f"{key}: {here}: name the run's {named}")
    vocab_size, cost_apart, facts = (found.pop(key) for key in ("vocab_size", "cost_apart", "facts"))
    if taken := taken_defaults(config):
        _log.info("%s", taken)
    for line in warnings(config):
        _log.warning("%s", line)
    if config.packing and cost_apart is not None:
        found["packing"] = _share_samples(config, cost_apart)
        if not found["packing"]:  # there are more samples then
            facts = describe(config.model_copy(update={"packing": False}))["facts"]
    found |= (left_open or LeftOpen()).settled(config, facts.samples)
    fields = {**config.model_dump(), **found}
    if gets_vocabulary:
        fields["model_options"] = {**config.model_options, "vocab_size": vocab_size}
    try:
        return RunConfig(**fields)
    except ValidationError as error:
        raise ConfigError(f"with this data: {first_problem(error)}") from None


def _share_samples(config: RunConfig, cost_apart: str) -> bool:
    """Whether examples share samples: where the model lets them see each other they do not, which is told.

    Raises:
        ConfigError: they cannot, and somebody asked for it. A model of one's own is taken at its owner's word.
    """
    why = why_apart(config)
    if not why or (is_dotted(config.model) and "packing" in config.model_fields_set):
        return True
    if "packing" in config.model_fields_set:
        raise ConfigError(
            f"packing: examples that share a sample would see each other: {why}. Leave packing out, or say false "
            "(recut_run, for a run that has begun)"
        )
    _log.warning("no examples share a sample: %s. %s", why, cost_apart)
    return False


def require_same(stored: bytes, config: RunConfig, where: Path) -> None:
    """A state directory belongs to one run.

    Raises:
        ConfigError: naming the first field in which `config` differs from the run stored in `where`.
    """
    if stored == config.to_bytes():
        return
    old = parse_config_bytes(stored)
    differing = [name for name in RunConfig.model_fields if getattr(old, name) != getattr(config, name)]
    if not differing and set(json.loads(stored)) == set(json.loads(config.to_bytes())):
        raise ConfigError(f"{where}: the run's configuration there was changed by hand: put the file back as it was")
    what = f"another run ({', '.join(differing[:3])} differ)" if differing else "a run of another version"
    raise ConfigError(
        f"{where} holds {what}: give the options that it has or none to go on with it, or choose another "
        "--state-dir; recut_run begins a new run from it with other options"
    )


def still_needed(config: RunConfig, state_dir: Path) -> list[str]:
    """Options that name what `state_dir` does not keep of the run, for a command line to go on with it."""
    words = []
    if config.model == PRETRAINED and (config.lora is not None or config.frozen):
        words += ["--model", "DIR"]
    if config.dataset != BUILTIN:
        words += ["--data", "PATH"]
    if config.tokenizer_digest not in ("", ByteTokenizer.digest) and not (state_dir / TOKENIZER_DIRECTORY).is_dir():
        words += ["--tokenizer", "DIR"]
    return words
