"""`export_model`: all stages of one head, from checkpoints or from a live run, become a directory that transformers or
peft loads.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.arguments import EXIT_DONE, LaunchParser, count, existing_path, output_directory, peer_address, positive_seconds
from launch.options import ImportOptions, ModelOptions, OutputOptions, add_import_option, add_model_option, add_output_options
from launch.processes.logs import Announcer
from launch.processes.reports import NO_REPORTS, Reports
from launch.processes.runner import main_of
from launch.processes.state_directory import is_state_directory
from launch.run.models import TOKENIZER_DIRECTORY, copy_tokenizer, tokenizer_in, weights_for
from swarm.base.config import RunConfig, parse_config_bytes
from swarm.base.errors import ConfigError
from swarm.base.ids import Address

if TYPE_CHECKING:
    import torch

PROGRAM = "export_model"


@dataclass(frozen=True, kw_only=True)
class ExportOptions(ModelOptions, ImportOptions, OutputOptions):
    """What `export_model` was told. Either `checkpoints` or `join` is given."""

    checkpoints: list[Path] | None
    join: Address | None
    join_timeout: float
    out: Path
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
    add_model_option(parser)
    add_import_option(parser)
    add_output_options(parser)
    return parser.parse(argv, ExportOptions)


def serve(options: ExportOptions, argv: list[str], reports: Reports) -> int:
    """Write the model."""
    if is_state_directory(options.out):
        raise ConfigError(f"--out {options.out} is a state directory: name another, such as {options.out / 'exported'}")
    if options.join is not None:
        config, parameters, step, version_id = asyncio.run(_from_peers(options, options.join))
    else:
        config, parameters, step, version_id = _from_checkpoints(options)
    factory = _factory(options, config)
    _add_untrained(parameters, factory, config)
    _give_types(parameters, factory, config)
    _require_finite(parameters, step)
    factory.save_pretrained(parameters, options.out)
    tokenizer = _tokenizer(options)
    if tokenizer is not None:
        copy_tokenizer(tokenizer, config, options.out)
    what = "adapter" if config.lora is not None else "model"
    Announcer(PROGRAM, options.log_format, quiet=options.quiet).say(
        f"wrote the {what} of step {step} to {options.out}{'' if tokenizer is None else ', with its tokenizer'}",
        step=step,
        version_id=version_id,
        out=str(options.out),
    )
    return EXIT_DONE


Exported = tuple[RunConfig, "dict[str, torch.Tensor]", int, str]


def _from_checkpoints(options: ExportOptions) -> Exported:
    from swarm.stage.saved.checkpoint import StageCheckpoint
    from swarm.stage.saved.whole_checkpoint import use_complete

    assert options.checkpoints is not None
    found = use_complete(options.checkpoints, StageCheckpoint.parameters, step=options.step, best=options.best)
    config = parse_config_bytes(found[0][0].config_bytes)
    parameters = {name: value for _, tensors in found for name, value in tensors.items()}
    record = found[0][0].record
    return config, parameters, record.step + 1, record.version_id


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
            transport, info, config, factory, deadline_s=options.join_timeout, rng=random.Random()
        )
    return config, parameters, record.step + 1, record.version_id


def _factory(options: ExportOptions, config: RunConfig) -> Any:
    from models.registry import factory_of

    source = weights_for(config, options.model) if options.model is not None else None
    factory = factory_of(config, may_import=options.allow_import, source=source)
    if getattr(factory, "save_pretrained", None) is None:
        raise ConfigError(f"model {type(factory).__name__} has no save_pretrained: it cannot be exported")
    return factory


def _add_untrained(parameters: dict[str, torch.Tensor], factory: Any, config: RunConfig) -> None:
    """What a run with `frozen` parameters does not checkpoint comes from where it came from at first."""
    if not config.frozen or config.lora is not None:
        return
    if not getattr(factory, "has_values", True):
        raise ConfigError(f"the run does not train {', '.join(config.frozen)}: name its model with --model")
    for stage in range(config.num_stages):
        for name, value in factory.build(stage).named_parameters():
            parameters.setdefault(name, value.detach())


def _give_types(parameters: dict[str, torch.Tensor], factory: Any, config: RunConfig) -> None:
    """Buffers that training changed get the types that they have in the model: whole numbers are kept as others."""
    from swarm.stage.module import Outlined, saved_buffers

    if isinstance(factory, Outlined):  # none of its buffers change
        return
    for stage in range(config.num_stages):
        for name, buffer in saved_buffers(factory.build(stage)).items():
            if name in parameters:
                parameters[name] = parameters[name].to(buffer.dtype)


def _require_finite(parameters: dict[str, torch.Tensor], step: int) -> None:
    from swarm.wire.compression import all_finite

    spoilt = [name for name, value in parameters.items() if not all_finite(value)]
    if spoilt:
        which = f"{spoilt[0]} and {len(spoilt) - 1} more hold" if spoilt[1:] else f"{spoilt[0]} holds"
        raise ConfigError(
            f"the model of step {step} is of no use: {which} "
            "numbers that are not finite (NaN or infinity); export an earlier checkpoint with --step"
        )


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
