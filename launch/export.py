"""`export_model`: all stages of one head, from checkpoints or from a live run, become a directory that transformers or
peft loads.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.arguments import EXIT_DONE, LaunchParser, count, existing_path, output_directory, peer_address, positive_seconds
from launch.options import ImportOptions, ModelOptions, OutputOptions, add_import_option, add_model_option, add_output_options
from launch.processes.logs import Announcer
from launch.processes.reports import NO_REPORTS, Reports
from launch.processes.runner import main_of
from launch.processes.state_directory import is_state_directory
from launch.run.model_card import write_card
from launch.run.models import TOKENIZER_DIRECTORY, copy_tokenizer, noted_place, tokenizer_in, weights_for
from launch.run.older_model import OlderModel
from launch.run.stage_tensors import StageTensors
from models.presets import PRETRAINED
from swarm.base.config import RunConfig, parse_config_bytes
from swarm.base.errors import ConfigError
from swarm.base.ids import Address

if TYPE_CHECKING:
    import torch

    from swarm.wire.messages import CommitRecord

PROGRAM = "export_model"


@dataclass(frozen=True, kw_only=True)
class ExportOptions(ModelOptions, ImportOptions, OutputOptions):
    """What `export_model` was told. Either `checkpoints` or `join` is given."""

    checkpoints: list[Path] | None
    join: Address | None
    join_timeout: float
    out: Path
    dtype: str | None
    step: int | None
    best: bool
    tokenizer: Path | None


def parse(argv: Sequence[str]) -> ExportOptions:
    """Read the command line, or end with one line about what is wrong with it."""
    parser = LaunchParser(
        PROGRAM,
        "Write a run's model to a directory that AutoModelForCausalLM.from_pretrained of "
        "transformers loads; of a LoRA run, the adapter that peft loads.",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--checkpoints",
        metavar="DIR",
        nargs="+",
        type=existing_path,
        help="state directory of a local run, or those of peers that cover all stages",
    )
    source.add_argument(
        "--join",
        metavar="HOST:PORT",
        type=peer_address,
        help="a peer of a run that is going on: its newest head, which training goes on from meanwhile",
    )
    parser.add_argument(
        "--join-timeout",
        metavar="SECONDS",
        type=positive_seconds,
        default=60.0,
        help="give up if the stages do not offer one head within this time, in seconds",
    )
    parser.add_argument(
        "--out", metavar="DIR", type=output_directory, required=True, help="directory to write; an older model there is replaced"
    )
    parser.add_argument(
        "--step",
        metavar="N",
        type=count,
        default=None,
        help="the checkpoint after this many steps (default: the newest that covers all stages)",
    )
    parser.add_argument(
        "--best", action="store_true", help="the checkpoint with the lowest evaluation loss, rather than the newest"
    )
    parser.add_argument(
        "--tokenizer",
        metavar="DIR",
        type=existing_path,
        default=None,
        help="put the run's tokenizer beside the model (default: that of --model, or of a local run)",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16", "float64"),
        default=None,
        help="of the values (default: as the model that the run began with has them; float32 of one from random values, and "
        "of an adapter)",
    )
    add_model_option(parser)
    add_import_option(parser)
    add_output_options(parser)
    return parser.parse(argv, ExportOptions)


def serve(options: ExportOptions, argv: list[str], reports: Reports) -> int:
    """Write the model."""
    if is_state_directory(options.out):
        raise ConfigError(f"--out {options.out} is a state directory: name another, such as {options.out / 'exported'}")
    if options.join is not None:
        found = asyncio.run(_from_peers(options, options.join))
    else:
        found = _from_checkpoints(options)
    config, record = found.config, found.record
    base, older = _base(options), OlderModel(options.out)
    _save(options, found, base)
    tokenizer = _tokenizer(options)
    if tokenizer is not None:
        copy_tokenizer(tokenizer, config, options.out)
    write_card(options.out, config, record, base=base, evaluation=found.evaluation)
    removed = older.remove()
    what, step = "adapter" if config.lora is not None else "model", record.step + 1
    Announcer(PROGRAM, options.log_format, quiet=options.quiet).say(
        f"wrote the {what} of step {step} to {options.out}{'' if tokenizer is None else ', with its tokenizer'}"
        + (f"; removed of an older model there: {', '.join(removed)}" if removed else ""),
        step=step,
        version_id=record.version_id,
        out=str(options.out),
    )
    return EXIT_DONE


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What is exported: the tensors, one part of the model in memory at a time, and the run that they are of."""

    config: RunConfig
    factory: Any
    tensors: Mapping[str, torch.Tensor]
    record: CommitRecord
    #: Loss of the evaluation at it, where a peer marked it as its best.
    evaluation: float | None = None


def _from_checkpoints(options: ExportOptions) -> Exported:
    from swarm.stage.saved.checkpoint import StageCheckpoint
    from swarm.stage.saved.whole_checkpoint import find_complete, use_complete

    assert options.checkpoints is not None
    first = find_complete(options.checkpoints, step=options.step, best=options.best)[0]
    config = parse_config_bytes(first.config_bytes)
    factory = _factory(options, config)

    def read(checkpoint: StageCheckpoint) -> Mapping[str, torch.Tensor]:
        return _whole(checkpoint.parameters(), factory, config, [checkpoint.stage])

    # Each is read twice, to hold one at a time: whether all are intact is known before anything is written.
    found = use_complete(
        options.checkpoints, lambda x: _checked(read(x), x.record.step + 1), step=options.step, best=options.best
    )
    record = found[0][0].record
    tensors = StageTensors([(names, partial(read, checkpoint)) for checkpoint, names in found])
    return Exported(config=config, factory=factory, tensors=tensors, record=record, evaluation=found[0][0].best_loss)


async def _from_peers(options: ExportOptions, address: Address) -> Exported:
    from swarm.net.visitor import visiting
    from swarm.peer.joining import fetch_run
    from swarm.peer.stage.live_state import fetch_parameters

    if options.step is not None or options.best:
        raise ConfigError("--step and --best choose among checkpoints: a live run has its newest head only")
    async with visiting() as transport:
        info = await fetch_run(transport, address, deadline_s=options.join_timeout)
        config = parse_config_bytes(info.config.encode())
        factory = _factory(options, config)
        record, parameters = await fetch_parameters(
            transport,
            info,
            config,
            factory,
            deadline_s=options.join_timeout,
            rng=random.Random(),
            directory=next(path for path in options.out.absolute().parents if path.is_dir()),  # on the disk that it goes to
        )
    tensors = _whole(parameters, factory, config, range(config.num_stages))
    _checked(tensors, record.step + 1)
    return Exported(config=config, factory=factory, tensors=tensors, record=record)


def _save(options: ExportOptions, found: Exported, base: str | None) -> None:
    """Write the tensors in the form that was asked for, or in the base's; a model of one's own has its own."""
    import torch

    from models.causal_lm import CausalLMFactory
    from models.files.export import Form
    from models.files.pretrained import PretrainedFactory
    from models.lora import LoraFactory

    factory, dtype = found.factory, None if options.dtype is None else getattr(torch, options.dtype)
    if isinstance(factory, LoraFactory):
        directory = str(Path(base).resolve()) if base is not None and Path(base).is_dir() else None
        factory.save_pretrained(found.tensors, options.out, base=directory, dtype=dtype or torch.float32)
    elif isinstance(factory, PretrainedFactory):
        factory.save_pretrained(found.tensors, options.out, factory.form(dtype))
    elif isinstance(factory, CausalLMFactory):
        factory.save_pretrained(found.tensors, options.out, form=None if dtype is None else Form(dtype=dtype))
    elif dtype is not None:
        raise ConfigError(f"--dtype {options.dtype}: a {type(factory).__name__} writes its values in a type of its own")
    else:
        factory.save_pretrained(dict(found.tensors), options.out)


def _base(options: ExportOptions) -> str | None:
    """Where the model is that the run began with: named, or noted by a local run."""
    return options.model or next(filter(None, map(noted_place, options.checkpoints or [])), None)


def _factory(options: ExportOptions, config: RunConfig) -> Any:
    """What knows the model; with the base's own files, as far as they are here."""
    from models.registry import factory_of

    source, place = weights_for(config, options.model) if options.model is not None else None, _base(options)
    if source is None and config.model == PRETRAINED and place is not None and Path(place).is_dir():
        with contextlib.suppress(ConfigError):  # another model is there now: nobody asked for that one
            return factory_of(config, may_import=options.allow_import, source=weights_for(config, place))
    factory = factory_of(config, may_import=options.allow_import, source=source)
    if getattr(factory, "save_pretrained", None) is None:
        raise ConfigError(f"model {type(factory).__name__} has no save_pretrained: it cannot be exported")
    return factory


def _whole(
    tensors: Mapping[str, torch.Tensor], factory: Any, config: RunConfig, stages: Iterable[int]
) -> Mapping[str, torch.Tensor]:
    """What `stages` consist of, from what was trained of them.

    What a run with `frozen` parameters does not checkpoint comes from where it came from at first. Buffers that training
    changed get the types that they have in the model: whole numbers are kept as others.
    """
    from swarm.stage.module import Outlined, saved_buffers

    adds_frozen, has_buffers = bool(config.frozen) and config.lora is None, not isinstance(factory, Outlined)
    if adds_frozen and not getattr(factory, "has_values", True):
        raise ConfigError(f"the run does not train {', '.join(config.frozen)}: name its model with --model")
    found = dict(tensors)
    for stage in stages if adds_frozen or has_buffers else ():
        module = factory.build(stage)
        if adds_frozen:
            for name, value in module.named_parameters():
                found.setdefault(name, value.detach())
        for name, buffer in saved_buffers(module).items() if has_buffers else ():
            if name in found:
                found[name] = found[name].to(buffer.dtype)
    return found


def _checked(parameters: Mapping[str, torch.Tensor], step: int) -> frozenset[str]:
    """The names of parameters, all of whose values are numbers."""
    from swarm.wire.compression import all_finite

    spoilt = [name for name, value in parameters.items() if not all_finite(value)]
    if spoilt:
        which = f"{spoilt[0]} and {len(spoilt) - 1} more hold" if spoilt[1:] else f"{spoilt[0]} holds"
        raise ConfigError(
            f"the model of step {step} is of no use: {which} "
            "numbers that are not finite (NaN or infinity); export an earlier checkpoint with --step"
        )
    return frozenset(parameters)


def _tokenizer(options: ExportOptions) -> Path | None:
    """Where the run's tokenizer is: named, kept by a local run, or the model's."""
    if options.tokenizer is not None:
        return options.tokenizer
    kept = [root / TOKENIZER_DIRECTORY for root in options.checkpoints or []]
    for directory in kept:
        if directory.is_dir():
            return directory
    return None if options.model is None else Path(tokenizer_in(options.model))


def main(argv: Sequence[str] | None = None, reports: Reports = NO_REPORTS) -> int:
    """Read the command line, work, and return the exit code."""
    return main_of(PROGRAM, parse, serve, argv, reports)


if __name__ == "__main__":
    raise SystemExit(main())
