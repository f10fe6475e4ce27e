"""`replay_ticket`: one ticket of a run again on this machine in one process, beside what the swarm recorded of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.arguments import (
    EXIT_DONE,
    EXIT_FAILED,
    LaunchParser,
    count,
    device_name,
    existing_path,
    positive_int,
    positive_number,
)
from launch.options import (
    DataOptions,
    ImportOptions,
    ModelOptions,
    OutputOptions,
    add_data_options,
    add_import_option,
    add_model_option,
    add_output_options,
)
from launch.processes.logs import Announcer
from launch.processes.reports import NO_REPORTS, Reports
from launch.processes.runner import main_of
from launch.replay_devices import TOLERANCES, StageDevice, kinds_text, places, tolerance_between
from launch.run.models import TOKENIZER_DIRECTORY, vocab_size_of, weights_for
from launch.run.ticket_files import RecordedTicket, recorded
from launch.run.token_cache import token_cache
from swarm.base.config import RunConfig, parse_config_bytes, run_id_of
from swarm.base.errors import ConfigError
from swarm.base.ids import ZERO_BALLOT, Ticket

if TYPE_CHECKING:
    from swarm.stage.compute import StageCompute
    from swarm.stage.replay import Replayed
    from swarm.stage.saved.checkpoint import StageCheckpoint
    from swarm.stage.versions import Version

PROGRAM = "replay_ticket"
#: By stage.
Checkpoints = dict[int, "StageCheckpoint"]


@dataclass(frozen=True, kw_only=True)
class ReplayOptions(DataOptions, ModelOptions, ImportOptions, OutputOptions):
    """What `replay_ticket` was told."""

    checkpoints: list[Path]
    step: int
    index: int | None
    device: str
    tolerance: float | None


def parse(argv: Sequence[str]) -> ReplayOptions:
    """Read the command line, or end with one line about what is wrong with it."""
    parser = LaunchParser(
        PROGRAM,
        "Compute one ticket (micro-batch) of a run again, here in one process, and say from which "
        "stage on the swarm computed something else. Trainers with a --state-dir record the "
        "tickets of steps that begin where the run's configuration has a checkpoint "
        "written (checkpoint_every), or at the initial values.",
    )
    parser.add_argument(
        "--checkpoints",
        metavar="DIR",
        nargs="+",
        type=existing_path,
        required=True,
        help="state directory of a local run, or those of peers that cover all stages and of a trainer",
    )
    parser.add_argument(
        "--step", metavar="N", type=positive_int, required=True, help="step of the ticket, counted from 1 as in the metrics"
    )
    parser.add_argument(
        "--index",
        metavar="I",
        type=count,
        default=None,
        help="of the ticket within the step (default: the first that is recorded)",
    )
    parser.add_argument(
        "--device",
        metavar="auto|cpu|cuda:N",
        type=device_name,
        default="auto",
        help="where to compute; auto takes for each stage the kind of device that computed it in the swarm, "
        "if this machine has one",
    )
    parser.add_argument(
        "--tolerance",
        metavar="X",
        type=positive_number,
        default=None,
        help="relative difference of norms that counts as none (default, by precision: "
        + ", ".join(f"{name} {value:g}" for name, value in TOLERANCES.items())
        + "; more between kinds of devices, as the wire's code makes it)",
    )
    add_data_options(parser.add_argument_group("data"))
    add_model_option(parser)
    add_import_option(parser)
    add_output_options(parser)
    return parser.parse(argv, ReplayOptions)


def serve(options: ReplayOptions, argv: list[str], reports: Reports) -> int:
    """Compute the ticket again, and print where it differs."""
    from launch.processes.devices import before_importing_torch

    before_importing_torch()
    from swarm.stage.replay import first_parting

    config_bytes = _config_bytes(options)
    config = parse_config_bytes(config_bytes)
    if config.mode != "sync":
        raise ConfigError(f"the run's mode is {config.mode}: its tickets used peers' own copies, which nobody keeps")
    found = recorded(options.checkpoints, config_bytes, step=options.step, index=options.index)
    checkpoints = _checkpoints(options, config)
    ticket = _with_those_parameters(found, checkpoints)
    where = _places(options, ticket)
    kinds = [place.kind for place in where]
    here = _replayed(options, config, config_bytes, checkpoints, ticket, where)
    tolerance = options.tolerance
    if tolerance is None:
        tolerance = tolerance_between(ticket.kinds, kinds, precision=config.precision, compression=config.compression)
    losses = (ticket.loss_sum / max(1, ticket.tokens), here.entry.loss_sum / max(1, here.entry.tokens))
    parting = first_parting(ticket.norms, here.norms, losses, tolerance=tolerance)
    announcer = Announcer(PROGRAM, options.log_format, quiet=options.quiet)
    for line in _lines(ticket, here, kinds, losses):
        announcer.line(_text(line), **line)
    what = f"ticket {ticket.index} of step {ticket.step}"
    if parting is None:
        said = f"the swarm computed the same, within {tolerance:g} ({kinds_text(ticket.kinds, kinds)})"
        announcer.say(f"{what}: {said}", parted=False, tolerance=tolerance)
        return EXIT_DONE
    peer = ticket.peers[parting.stage]
    announcer.say(
        f"{what}: swarm and this machine part at stage {parting.stage} ({_NAMES[parting.name]}), which peer {peer[:8]} computed, "
        f"by more than {tolerance:g} ({kinds_text(ticket.kinds, kinds)})",
        parted=True,
        stage=parting.stage,
        peer=peer,
        at=parting.name,
        tolerance=tolerance,
    )
    return EXIT_FAILED


def _config_bytes(options: ReplayOptions) -> bytes:
    """Of the run, verbatim: any checkpoint has them."""
    from swarm.stage.saved.checkpoint import scan
    from swarm.stage.saved.whole_checkpoint import require_one_run

    found = scan(options.checkpoints, damaged=[])
    if not found:
        raise ConfigError(f"{', '.join(map(str, options.checkpoints))}: no checkpoint is there")
    require_one_run(found)
    return found[0].config_bytes


def _places(options: ReplayOptions, ticket: RecordedTicket) -> list[StageDevice]:
    """Where each stage is computed here."""
    from launch.processes.devices import resolve_device

    best = resolve_device(options.device)
    devices = {best.partition(":")[0]: best, "cpu": "cpu"}
    return places(ticket.kinds, devices, wanted=None if options.device == "auto" else best)


def _replayed(
    options: ReplayOptions,
    config: RunConfig,
    config_bytes: bytes,
    checkpoints: Checkpoints,
    ticket: RecordedTicket,
    where: Sequence[StageDevice],
) -> Replayed:
    import torch

    from swarm.feed.feed import open_feed
    from swarm.stage.replay import replay
    from swarm.wire.compression import CODECS

    kept = [str(root / TOKENIZER_DIRECTORY) for root in options.checkpoints if (root / TOKENIZER_DIRECTORY).is_dir()]
    tokenizer = options.tokenizer or next(iter(kept), None)
    feed = open_feed(config, options.data, options.eval_data, tokenizer, vocab_size=vocab_size_of(config), cache=token_cache())
    step = Ticket(ticket.step - 1, ticket.index)
    batch = feed.batch(step)
    inputs, labels = ({name: torch.from_numpy(array) for name, array in part.items()} for part in (batch.inputs, batch.labels))
    make = _stages(options, config, config_bytes, checkpoints, where)
    return replay(make, config.num_stages, step, inputs, labels, codec=CODECS[config.compression])


def _stages(
    options: ReplayOptions, config: RunConfig, config_bytes: bytes, checkpoints: Checkpoints, where: Sequence[StageDevice]
) -> Callable[[int], tuple[StageCompute, Version]]:
    """What makes a stage with the parameters that the ticket used."""
    from models.registry import factory_of
    from swarm.lifecycle.commit_record import genesis_record
    from swarm.stage.compute import StageCompute
    from swarm.stage.device import compute_as
    from swarm.stage.versions import make_version

    source = weights_for(config, options.model) if options.model is not None else None
    factory = factory_of(config, may_import=options.allow_import, source=source)

    def make(stage: int) -> tuple[StageCompute, Version]:
        device = where[stage].device
        compute_as(where[stage].kind)
        compute = StageCompute(factory, stage, precision=config.precision, seed=config.seed, device=device, frozen=config.frozen)
        if not compute.has_frozen or (not checkpoints and not compute.has_values):
            raise ConfigError("what the run does not train, or began with, lies in its model's files: name them with --model")
        if checkpoints:
            record, masters = checkpoints[stage].record, checkpoints[stage].masters(compute.layout, device=device)
        else:
            record = genesis_record(config, run_id_of(config_bytes), ZERO_BALLOT, ((),) * config.num_stages)
            masters = compute.initial_masters()
        return compute, make_version(record, compute.layout, masters, compute.dtype)

    return make


def _checkpoints(options: ReplayOptions, config: RunConfig) -> Checkpoints:
    """Of the parameters that the tickets of `--step` used; empty if they are the initial ones.

    Raises:
        ConfigError: there is none.
    """
    from swarm.stage.saved.checkpoint import StageCheckpoint
    from swarm.stage.saved.whole_checkpoint import use_complete

    base = config.base_step(options.step - 1)
    if not base:
        return {}
    try:
        found = [checkpoint for checkpoint, _ in use_complete(options.checkpoints, StageCheckpoint.check, step=base)]
    except ConfigError as error:
        raise ConfigError(f"step {options.step} begins with the parameters after step {base}: {error}") from None
    return {checkpoint.stage: checkpoint for checkpoint in found}


def _with_those_parameters(found: list[RecordedTicket], checkpoints: Checkpoints) -> RecordedTicket:
    """The newest of the times that a ticket was computed from these checkpoints.

    Raises:
        ConfigError: each time it was computed from others.
    """
    if not checkpoints:
        return found[-1]
    version_id = checkpoints[0].record.version_id
    fitting = [ticket for ticket in found if ticket.version_id == version_id]
    if not fitting:
        step, base = found[-1].step, checkpoints[0].record.step + 1
        raise ConfigError(
            f"step {step} began at version {found[-1].version_id[:12]}, the checkpoint of step {base} is of version "
            f"{version_id[:12]}: the run was set back since"
        )
    return fitting[-1]


# ------------------------------------------------------------------------------------------------ for people

_NAMES = {"output": "output", "loss": "loss", "gradient": "input gradient", "parameters": "parameter gradient"}


def _lines(ticket: RecordedTicket, here: Replayed, kinds: Sequence[str], losses: tuple[float, float]) -> list[dict[str, Any]]:
    """Both computations side by side."""
    lines: list[dict[str, Any]] = []
    for stage, (peer, swarm, own) in enumerate(zip(ticket.peers, ticket.norms, here.norms, strict=True)):
        pairs = {name: (swarm.get(name), own.get(name)) for name in ("output", "parameters", "gradient")}
        if stage == len(ticket.peers) - 1:
            pairs["output"] = losses
        on = {"computed_on": ticket.kinds[stage], "computed_on_here": kinds[stage]}
        lines.append(
            {
                "stage": stage,
                "peer": peer,
                **on,
                **{f"{name}{of}": value for name, pair in pairs.items() for of, value in zip(("", "_here"), pair, strict=True)},
            }
        )
    lines[-1] = {key.replace("output", "loss"): value for key, value in lines[-1].items()}
    return lines


def _text(line: dict[str, Any]) -> str:
    parts = [
        f"{text} {_number(line[name])} here {_number(line[f'{name}_here'])}"
        for name, text in _NAMES.items()
        if line.get(name) is not None or line.get(f"{name}_here") is not None
    ]
    return f"stage {line['stage']} peer {line['peer'][:8]}: " + "; ".join(parts)


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.6g}"


def main(argv: Sequence[str] | None = None, reports: Reports = NO_REPORTS) -> int:
    """Read the command line, work, and return the exit code."""
    return main_of(PROGRAM, parse, serve, argv, reports)


if __name__ == "__main__":
    raise SystemExit(main())
