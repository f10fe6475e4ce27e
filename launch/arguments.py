"""The command line: parsers, value types, and the options that several launchers share.

Owns spelling and defaults. Must not know what the values are for, nor import torch: a mistake answers at once.
"""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin

from pydantic.fields import FieldInfo

from swarm.base.config import TIMING_PRESETS, RunConfig
from swarm.base.dotted import is_dotted
from swarm.base.errors import ConfigError
from swarm.base.ids import MAX_TICKETS, Address, parse_address

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2

#: Of one kind, for each stage or in all.
MAX_PROCESSES = 1024
MAX_THREADS = 1024

#: Computed from the data, so never given on a command line.
_COMPUTED_FIELDS = frozenset({"data_digest", "tokenizer_digest", "weights", "weights_source"})
#: Shorter names that DESIGN fixes for fields of `RunConfig`.
_FIELD_ALIASES = {"num_stages": "--stages", "total_steps": "--steps"}
_CONFIG_PREFIX = "config."
_HOST = re.compile(r"(?=.{1,253}\.?\Z)\w([\w-]{0,61}\w)?(\.\w([\w-]{0,61}\w)?)*\.?")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?b?)", re.IGNORECASE)
_SIZE_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Appends `(default: X)` where there is a default worth showing."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=110)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False, [], argparse.SUPPRESS):
            return action.help
        return super()._get_help_string(action)


class LaunchParser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, without abbreviations; `--a_b` is read as `--a-b`."""

    def __init__(self, program: str, description: str) -> None:
        super().__init__(prog=program, description=description, allow_abbrev=False, formatter_class=_Formatter)

    def parse(self, argv: Sequence[str] | None) -> argparse.Namespace:
        return self.parse_args(_with_values([_dashed(word) for word in (sys.argv[1:] if argv is None else argv)]))

    def error(self, message: str) -> NoReturn:
        message = message.replace("argument ", "", 1) if message.startswith("argument ") else message
        message = message.replace("unrecognized arguments:", "unknown option:")
        self.exit(EXIT_USAGE, f"{self.prog}: {' '.join(message.split())} (see {self.prog} --help)\n")


def _with_values(words: Sequence[str]) -> list[str]:
    """A value such as -1GiB is no option: it joins the option before it, whose type then says what is wrong with it."""
    joined: list[str] = []
    for word in words:
        if re.match(r"-\d", word) and joined and re.fullmatch(r"--[a-z-]+", joined[-1]):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def _dashed(word: str) -> str:
    if not word.startswith("--"):
        return word
    name, separator, value = word.partition("=")
    return name.replace("_", "-") + separator + value


# ------------------------------------------------------------------------------------------------ value types


def size_bytes(text: str) -> int:
    """`4GiB`, `500MB` or plain bytes as a number of bytes."""
    match = _SIZE.fullmatch(text.strip())
    size = int(float(match.group(1)) * _SIZE_UNITS.get(match.group(2).lower().removesuffix("b"), 0)) if match else 0
    if not size:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 4GiB or 500MB")
    return size


def peer_address(text: str) -> Address:
    try:
        address = parse_address(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not address.port:
        raise argparse.ArgumentTypeError(f"{text!r} has port 0, which nobody can be reached at")
    return address


def host_name(text: str) -> str:
    """A host's name or address, without a port."""
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(text.removeprefix("[").removesuffix("]")))
    host, _, port = text.rpartition(":")
    if host and port.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} names a port too: give {host} here, and --public-port {port}")
    if not _HOST.fullmatch(text) or text.rstrip(".").rpartition(".")[2].isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is neither the name of a host nor an address")
    return text


def port_number(text: str) -> int:
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port in 0..65535")
    return int(text)


def positive_int(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def process_count(text: str) -> int:
    if positive_int(text) > MAX_PROCESSES:
        raise argparse.ArgumentTypeError(f"{text} is more than {MAX_PROCESSES}, the most that is started on one machine")
    return int(text)


def thread_count(text: str) -> int:
    if positive_int(text) > MAX_THREADS:
        raise argparse.ArgumentTypeError(f"{text} is more than {MAX_THREADS}, the most that one process computes with")
    return int(text)


def count(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def positive_seconds(text: str) -> float:
    return _positive(text, "number of seconds")


def positive_number(text: str) -> float:
    return _positive(text, "number")


def _positive(text: str, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a {what} above 0")
    return value


def auto_or_count(text: str) -> int | None:
    return None if text == "auto" else count(text)


def auto_or_micro_batches(text: str) -> int | None:
    number = None if text == "auto" else positive_int(text)
    if number is not None and number > MAX_TICKETS:
        raise argparse.ArgumentTypeError(f"{number} micro-batches are more than a step has at most, {MAX_TICKETS}")
    return number


def device_name(text: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is none of auto, cpu, cuda:N")
    return "cuda:0" if text == "cuda" else text


def existing_path(text: str) -> Path:
    path = local_path(text)
    if not path.exists():
        raise argparse.ArgumentTypeError(f"{text}: no such file or directory")
    return path


def data_source(text: str) -> str:
    """A path that exists, or the dotted path of a factory: whatever `swarm.feed` reads."""
    return text if is_dotted(text) else str(existing_path(text))


def output_directory(text: str) -> Path:
    path = local_path(text)
    if path.exists() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is no directory: name one, or a new one")
    return path


def non_empty(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError(f"{text!r} names nothing")
    return text


def local_path(text: str) -> Path:
    if not text:  # `Path` takes it for the current directory
        raise argparse.ArgumentTypeError("'' is no path; the current directory is .")
    return Path(text).expanduser()


# ------------------------------------------------------------------------------------------------ shared options


def add_logging_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument("--log-format", choices=("text", "json"), default="text", help="lines for people or JSON objects")
    group.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="least level that is logged; debug also shows tracebacks",
    )
    group.add_argument("--quiet", action="store_true", help="print errors only")


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Where the run comes from: created from a file, or fetched from a peer."""
    group = parser.add_argument_group("run")
    source = group.add_mutually_exclusive_group(required=True)
    source.add_argument("--run", metavar="RUN.TOML", type=existing_path, help="create the run that this file describes")
    source.add_argument("--join", metavar="HOST:PORT", type=peer_address, help="join the run of the peer listening there")
    group.add_argument(
        "--join-timeout",
        metavar="SECONDS",
        type=positive_seconds,
        default=20.0,
        help="wait this long for that peer, or one known from before, to answer, in seconds; then go on with the "
        "run that the --state-dir keeps, if it does",
    )


def add_network_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("network and disk")
    group.add_argument("--host", metavar="ADDRESS", type=non_empty, default="0.0.0.0", help="address to listen at; :: is IPv6")
    group.add_argument(
        "--port",
        metavar="PORT",
        type=port_number,
        default=0,
        help="port for both TCP and UDP; 0 takes the one that it had before with this --state-dir, or a free one",
    )
    group.add_argument(
        "--public-host",
        metavar="ADDRESS",
        type=host_name,
        default=None,
        help="address that others reach this peer at (default: the one it listens at, or the one that the joined peer sees)",
    )
    group.add_argument(
        "--public-port",
        metavar="PORT",
        type=port_number,
        default=0,
        help="port that others reach this peer at, for both TCP and UDP, where a router or container maps it to "
        "--port (default: the same as --port)",
    )
    group.add_argument(
        "--state-dir",
        metavar="DIR",
        type=local_path,
        default=None,
        help="keep identity, known addresses and, at a stage, checkpoints here (default: nothing is kept)",
    )


def add_data_options(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--data",
        metavar="PATH",
        type=data_source,
        default=None,
        help="training data: a .txt, .md, .jsonl or .parquet file, a directory of those or one that "
        "datasets saved, or package.module:factory (default: the run file's, or the built-in text)",
    )
    parser.add_argument(
        "--eval-data",
        metavar="PATH",
        type=data_source,
        default=None,
        help="evaluation data (default: the run file's, or a held-out part of the data)",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="DIR",
        type=data_source,
        default=None,
        help="tokenizer directory (default: the run file's, or one token for each byte)",
    )


def add_model_option(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--model",
        metavar="DIR|HUB_ID",
        type=non_empty,
        default=None,
        help="where this machine has the run's model: a directory with config.json, weights and tokenizer, "
        "or a Hugging Face hub id (default: the run file's; a stage takes the weights from its peers)",
    )


def add_import_option(parser: argparse._ActionsContainer) -> None:
    """For commands that read a run from this machine's disk, whose configuration may name its owner's code."""
    parser.add_argument(
        "--allow-import",
        action="store_true",
        help="import the run's own model, optimizer and compressor if it names them as package.module:name",
    )


# ------------------------------------------------------------------------------------------------ RunConfig fields


def add_config_options(parser: argparse.ArgumentParser) -> None:
    """One option for each field of `RunConfig`; `config_overrides` reads back those that were given."""
    group = parser.add_argument_group("configuration of the run (each overrides --run, which overrides --preset)")
    group.add_argument("--preset", choices=("tiny",), default="tiny", help="where fields that nothing else sets come from")
    for name, field in RunConfig.model_fields.items():
        if name in _COMPUTED_FIELDS:
            continue
        group.add_argument(
            *_options_of(name),
            dest=_CONFIG_PREFIX + name,
            default=argparse.SUPPRESS,
            metavar=_metavar(name, field),
            help=_field_help(name, field),
        )
    group.add_argument(
        "--set",
        metavar="FIELD.KEY=VALUE",
        action="append",
        default=[],
        dest="nested",
        help="one key of a nested field, such as timing.stall_s=5 or model_options.dropout=0.1",
    )


def _options_of(field: str) -> list[str]:
    """How a field of `RunConfig` may be spelt, the preferred way first."""
    return [*([_FIELD_ALIASES[field]] if field in _FIELD_ALIASES else []), f"--{field.replace('_', '-')}"]


def as_typed(text: str, argv: Sequence[str]) -> str:
    """`text` with the options of `argv` in the place of fields of `RunConfig`, where their names are no common words."""
    typed = {_dashed(word).partition("=")[0] for word in argv}
    for field in RunConfig.model_fields:
        option = next((option for option in _options_of(field) if option in typed), None)
        if option is not None and "_" in field:
            text = re.sub(rf"\b{field}\b", option, text)
    return text


def _metavar(name: str, field: FieldInfo) -> str:
    if name == "timing":
        return "|".join(TIMING_PRESETS)
    if get_origin(field.annotation) is Literal:
        return "|".join(map(str, get_args(field.annotation)))
    if field.examples:
        return "|".join(field.examples)
    if get_origin(field.annotation) is dict:
        return "JSON"
    kinds: dict[Any, str] = {int: "N", float: "X", bool: "true|false"}
    return kinds.get(field.annotation, "TEXT")


def _field_help(name: str, field: FieldInfo) -> str:
    if name == "timing":
        default: Any = "local"
    else:
        default = field.get_default(call_default_factory=True)
    text = f"{field.description} (default: {json.dumps(default) if isinstance(default, dict) else default})"
    return text.replace("%", "%%")


def config_overrides(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of `RunConfig` that the command line gave, unvalidated.

    Raises:
        ConfigError: `--set` or a JSON value is malformed.
    """
    given = {key.removeprefix(_CONFIG_PREFIX): value for key, value in vars(options).items() if key.startswith(_CONFIG_PREFIX)}
    if "model_options" in given:
        try:
            given["model_options"] = json.loads(given["model_options"])
        except ValueError:
            raise ConfigError(f"--model-options: {given['model_options']!r} is not JSON") from None
    for text in options.nested:
        name, equals, value = text.partition("=")
        field, dot, key = name.partition(".")
        if not equals or not field or (dot and not key):
            raise ConfigError(f"--set: {text!r} is not FIELD.KEY=VALUE")
        if not dot:
            given[field] = _literal(value)
            continue
        table = given.get(field, {})
        given[field] = {**({"preset": table} if isinstance(table, str) else table), key: _literal(value)}
    return given


def _literal(text: str) -> Any:
    """JSON where it is JSON, else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text
