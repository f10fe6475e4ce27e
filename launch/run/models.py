"""Where a model's files are on this machine: a directory or a hub id becomes the run's fields and a source of weights.

Owns the difference between a place, which is this machine's business, and the digests and configuration that are the
run's. Imports no torch.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.files.hub import Hub, is_hub_id
from models.files.shards import Directory, Shards, read_config
from models.files.stored_codes import require_full_precision, without_method
from models.presets import PRESET_OPTIONS, PRETRAINED
from swarm.base.config import RunConfig
from swarm.base.dotted import is_dotted
from swarm.base.errors import ConfigError
from swarm.feed.tokenizers import TOKENIZER_FILES, DirectoryTokenizer

if TYPE_CHECKING:
    from models.files.shards import Source

_log = logging.getLogger(__name__)

#: Where a local run keeps its tokenizer, in its state directory.
TOKENIZER_DIRECTORY = "tokenizer"
#: Where a local run notes, in its state directory, where this machine has the model that it began with.
_PLACE_FILE = "model.txt"


def place_of(model: Any, *, relative_to: Path | None = None) -> str | None:
    """The directory or hub id that `model` names, or None: a preset, a dotted path, or what is refused later.

    Raises:
        ConfigError: it is neither a directory nor anything else that a model may be.
    """
    from models.presets import PRESETS

    if not isinstance(model, str) or model in PRESETS or model == PRETRAINED or is_dotted(model):
        return None
    path = (relative_to or Path()) / Path(model).expanduser()
    if path.is_dir():
        return str(path)
    return model if is_hub_id(model) else None


def source_of(place: str) -> Source:
    """The files there.

    Raises:
        ConfigError: there is no such directory, or the hub does not know it.
    """
    return Directory(place) if Path(place).is_dir() or not is_hub_id(place) else Hub(place)


def fields_of(place: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """What the run says of its model: its `config.json`, with `options` over it.

    Raises:
        ConfigError: there is none, or it is malformed.
    """
    return {"model": PRETRAINED, "model_options": {**without_method(read_config(source_of(place))), **options}}


def vocab_size_of(config: RunConfig) -> int | None:
    """Tokens that the run's model knows, as far as it can be told without building it."""
    stated = stated_vocab_size(config)
    return _vocab_size_in(PRESET_OPTIONS.get(config.model, {})) if stated is None else stated


def stated_vocab_size(config: RunConfig) -> int | None:
    """As `vocab_size_of`, but None where a preset says it: its model takes another one as well."""
    return _vocab_size_in(config.model_options)


def _vocab_size_in(options: Mapping[str, Any]) -> int | None:
    size = options.get("vocab_size", (options.get("text_config") or {}).get("vocab_size"))
    return size if isinstance(size, int) else None


def described(place: str) -> dict[str, Any]:
    """Digests of the weights, and their public name. Reads a directory's bytes; may take seconds.

    Raises:
        ConfigError: one line naming the file and what is wrong with it.
    """
    source = source_of(place)
    _require_values(source)
    return {"weights": Shards(source).stated_digests(), "weights_source": source.name if isinstance(source, Hub) else ""}


def require_whole(place: str) -> None:
    """See that a directory's weights, where it has any, are as long as their headers say; a hub's are not fetched for it.

    Raises:
        ConfigError: one line naming the file and what is wrong with it.
    """
    if Path(place).is_dir() and any(Path(place).glob("*.safetensors")):
        _require_values(source_of(place))


def _require_values(source: Source) -> None:
    """Refuse a quantized checkpoint. Of a directory every header is read; of a hub's files only the names are known."""
    shards = Shards(source)
    types = {name: shards.entry(name).dtype if isinstance(source, Directory) else None for name in shards.names}
    require_full_precision(source.name, read_config(source), types, tell=True)


def tokenizer_in(place: str) -> str:
    """The directory with the model's tokenizer.

    Raises:
        ConfigError: the model brings none.
    """
    source = source_of(place)
    directory = source.fetch(TOKENIZER_FILES) if isinstance(source, Hub) else Path(place)
    if directory is None or not any((directory / file).is_file() for file in TOKENIZER_FILES):
        raise ConfigError(f"model {place}: brings no tokenizer such as tokenizer.json; name one with --tokenizer DIR")
    return str(directory)


def copy_tokenizer(source: Path, config: RunConfig | None, target: Path) -> None:
    """Put a tokenizer's files into `target`; with `config`, only if it is the run's.

    Raises:
        ConfigError: it is another one, or the files cannot be written.
    """
    if config is not None:
        found = DirectoryTokenizer(str(source)).digest
        if found != config.tokenizer_digest:
            raise ConfigError(
                f"tokenizer {source} is not the run's: its digest is {found[:12]}, the run has {config.tokenizer_digest[:12]}"
            )
    try:
        target.mkdir(parents=True, exist_ok=True)
        for file in TOKENIZER_FILES if not source.samefile(target) else ():
            if (source / file).is_file():
                shutil.copyfile(source / file, target / file)
    except OSError as error:
        raise ConfigError(f"{target}: {error.strerror}") from None


def note_place(state_dir: Path, place: str) -> None:
    """Note for an export where this machine has the model that the run began with."""
    (state_dir / _PLACE_FILE).write_text((str(Path(place).resolve()) if Path(place).is_dir() else place) + "\n")


def noted_place(state_dir: Path) -> str | None:
    """What `note_place` noted there."""
    try:
        return (state_dir / _PLACE_FILE).read_text().strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def weights_for(config: RunConfig, place: str | None) -> Source | None:
    """Where this machine finds the weights of a run: `place`, else the hub that the run names, else nowhere.

    Raises:
        ConfigError: `place` is no model.
    """
    if config.model != PRETRAINED:
        if place is not None:
            raise ConfigError(f"--model {place}: the run's model is {config.model}, which needs no weights")
        return None
    if place is not None:
        return source_of(place)
    if config.weights_source:
        try:
            return Hub(config.weights_source)
        except ConfigError as error:
            _log.warning("%s; taking the weights from other peers of the stage", error)
    return None
