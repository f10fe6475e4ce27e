"""`export_model`: the checkpoints of all stages of one head become a directory that transformers loads."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

from launch.arguments import EXIT_DONE, LaunchParser, add_logging_options, count, existing_path, local_path
from launch.logs import Announcer
from launch.reports import NO_REPORTS, Reports
from launch.runner import main_of
from swarm.base.errors import ConfigError

PROGRAM = "export_model"


def parse(argv: Sequence[str]) -> Namespace:
    parser = LaunchParser(PROGRAM, "Write the model of a run's checkpoints to a directory that "
                                   "transformers.AutoModelForCausalLM.from_pretrained loads.")
    parser.add_argument("--checkpoints", metavar="DIR", nargs="+", type=existing_path, required=True,
                        help="state directory of a local run, or those of peers that cover all stages")
    parser.add_argument("--out", metavar="DIR", type=local_path, required=True,
                        help="directory to write; an older model there is replaced")
    parser.add_argument("--step", metavar="N", type=count, default=None,
                        help="the checkpoint after this many steps (default: the newest that covers all stages)")
    parser.add_argument("--best", action="store_true",
                        help="the checkpoint with the lowest evaluation loss, rather than the newest")
    parser.add_argument("--allow-import", action="store_true",
                        help="import the run's own model if it names one as package.module:factory")
    add_logging_options(parser)
    return parser.parse(argv)


def serve(options: Namespace, argv: list[str], reports: Reports) -> int:
    from models.registry import factory_of
    from swarm.base.config import parse_config_bytes
    from swarm.stage.checkpoint import find_complete

    found = find_complete(options.checkpoints, step=options.step, best=options.best)
    factory = factory_of(parse_config_bytes(found[0].config_bytes), may_import=options.allow_import)
    save_pretrained = getattr(factory, "save_pretrained", None)
    if save_pretrained is None:
        raise ConfigError(f"model {type(factory).__name__} has no save_pretrained: it cannot be exported")
    parameters = {name: value for checkpoint in found for name, value in checkpoint.parameters().items()}
    save_pretrained(parameters, options.out)
    step = found[0].record.step + 1
    Announcer(PROGRAM, options.log_format, quiet=options.quiet).say(
        f"wrote the model of step {step} to {options.out}", step=step, head=found[0].record.head, out=str(options.out)
    )
    return EXIT_DONE


def main(argv: Sequence[str] | None = None, reports: Reports = NO_REPORTS) -> int:
    return main_of(PROGRAM, parse, serve, argv, reports)


if __name__ == "__main__":
    raise SystemExit(main())
