"""The model card beside an exported model: what it was made from, and how. Owns the file; must not know tensors."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from models.files.hub import is_hub_id
from models.presets import PRETRAINED
from swarm.base.config import RunConfig
from swarm.base.errors import StorageError

if TYPE_CHECKING:
    from swarm.wire.messages import CommitRecord

CARD_FILE = "README.md"
_MARK = "written by export_model of swarm-train"


def write_card(
    directory: Path, config: RunConfig, record: CommitRecord, *, base: str | None, evaluation: float | None = None
) -> None:
    """Write the card, unless somebody wrote one of their own there.

    Args:
        base: directory or hub id of the model that the run began with.
        evaluation: mean loss on held-out samples, where it is known of this version.

    Raises:
        StorageError: the disk refuses.
    """
    path = directory / CARD_FILE
    try:
        if not path.exists() or _MARK in path.read_text(errors="replace"):
            path.write_text(_text(config, record, base, evaluation))
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror}") from None


def _text(config: RunConfig, record: CommitRecord, base: str | None, evaluation: float | None) -> str:
    hub_id = config.weights_source.partition("@")[0] or (base if base and is_hub_id(base) and not Path(base).is_dir() else None)
    head = [f"library_name: {'transformers' if config.lora is None else 'peft'}"]
    if hub_id:
        head.append(f"base_model: {hub_id.partition('@')[0]}")
    named = config.weights_source or base or "a model whose place the run does not know"
    rows = [
        ("base", f"`{named}`" if config.model == PRETRAINED else f"none: {config.model}, from random values"),
        ("data", f"{config.dataset}, digest `{config.data_digest}`"),
        ("steps", f"{record.step + 1} of {config.total_steps}, {config.target_batch_size} samples each"),
        ("training loss of the last step", "none: it was skipped" if record.loss is None else f"{record.loss:.4f}"),
        ("loss on held-out samples", None if evaluation is None else f"{evaluation:.4f}"),
        ("sequence length", f"{config.sequence_length:,} tokens"),
        ("trained", _trained(config)),
        ("optimizer", f"{config.optimizer}, learning rate {config.learning_rate:g}, {config.lr_schedule}"),
        ("version", f"`{record.version_id}` of run `{record.run}`"),
    ]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows if value is not None)
    return (
        "---\n" + "\n".join(head) + f"\n---\n\n# {config.name}\n\n| | |\n|---|---|\n{table}\n\n"
        f"Trained by a swarm of peers, each of which served one of {config.num_stages} stages; {_MARK}.\n"
    )


def _trained(config: RunConfig) -> str:
    if config.lora is not None:
        bits = "" if config.lora.bits is None else f", the base in {config.lora.bits} bits"
        return f"LoRA adapters of rank {config.lora.r}, alpha {config.lora.alpha:g}{bits}"
    return f"all but {', '.join(config.frozen)}" if config.frozen else "all parameters"
