"""The options that several launchers share: what each is called, and the type that its command hands on.

Each group is a frozen dataclass, and the function beside it adds the group to a parser. A command's own options inherit the
groups that it has; `LaunchParser.parse` fills them, so that no `Namespace` goes further. Must not know what the values are
for, nor import torch: a mistake answers at once.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from launch.arguments import (
    dashed,
    data_source,
    existing_path,
    host_name,
    local_path,
    non_empty,
    peer_address,
    port_number,
    positive_seconds,
)
from swarm.base.config import TIMING_PRESETS, RunConfig
from swarm.base.errors import ConfigError
from swarm.base.ids import Address

#: Computed from the data, so never given on a command line.
_COMPUTED_FIELDS = frozenset({"data_digest", "tokenizer_digest", "weights", "weights_source"})
#: Shorter names that the command line has for fields of `RunConfig`.
_FIELD_ALIASES = {"num_stages": "--stages", "total_steps": "--steps"}


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """How a command speaks. Every command has these."""

    log_format: str
    log_level: str
    quiet: bool


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """How the command speaks."""
    group = parser.add_argument_group("output")
    group.add_argument("--log-format", choices=("text", "json"), default="text", help="lines for people or JSON objects")
    group.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="least level that is logged; debug also shows tracebacks",
    )
    group.add_argument("--quiet", action="store_true", help="print errors only")


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Where the run comes from. Either `run` or `join` is given."""

    run: Path | None
    join: Address | None
    join_timeout: float


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


@dataclass(frozen=True, kw_only=True)
class NetworkOptions:
    """Where a peer listens, how others reach it, and where it keeps its state."""

    host: str
    port: int
    public_host: str | None
    public_port: int
    state_dir: Path | None


def add_network_options(parser: argparse.ArgumentParser) -> None:
    """Where the peer listens, how others reach it, and where it keeps its state."""
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


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Where this machine has the run's data: a path, a pattern, a data set on the hub, or the dotted path of a factory."""

    data: str | None
    eval_data: str | None
    tokenizer: str | None


def add_data_options(parser: argparse._ActionsContainer) -> None:
    """Where this machine has the run's data."""
    parser.add_argument(
        "--data",
        metavar="PATH|hub:OWNER/NAME",
        type=data_source,
        default=None,
        help="training data: a .json, .jsonl, .csv, .parquet, .txt or .md file, compressed or not, a directory or a pattern "
        "of those, one that datasets saved, hub:owner/name@revision#split, or package.module:factory (default: the run "
        "file's, or the built-in text)",
    )
    parser.add_argument(
        "--eval-data",
        metavar="PATH|hub:OWNER/NAME",
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


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Where this machine has the run's model: a directory or a hub id."""

    model: str | None


def add_model_option(parser: argparse._ActionsContainer) -> None:
    """Where this machine has the run's model."""
    parser.add_argument(
        "--model",
        metavar="DIR|HUB_ID",
        type=non_empty,
        default=None,
        help="where this machine has the run's model: a directory with config.json, weights and tokenizer, "
        "or a Hugging Face hub id (default: the run file's; a stage takes the weights from its peers)",
    )


@dataclass(frozen=True, kw_only=True)
class PeerOptions(RunOptions, NetworkOptions, ModelOptions, OutputOptions):
    """What every peer of a run is told, whatever it does there."""

    #: The run that an earlier life of this process served: it may be found through anyone whom that life knew.
    again: str | None = None


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """Whether code that a run's configuration names may be imported."""

    allow_import: bool


def add_import_option(parser: argparse._ActionsContainer) -> None:
    """For commands that read a run from this machine's disk, whose configuration may name its owner's code."""
    parser.add_argument(
        "--allow-import",
        action="store_true",
        help="import the run's own model, optimizer and compressor if it names them as package.module:name",
    )


class _IntoFields(argparse.Action):
    """Notes the value of an option under the field of `RunConfig` that is its `const`."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: Any = None) -> None:
        setattr(namespace, self.dest, {**getattr(namespace, self.dest), self.const: values})


@dataclass(frozen=True, kw_only=True)
class ConfigOptions:
    """Fields of `RunConfig` that the command line gives."""

    #: As typed, by field.
    fields: dict[str, str]
    #: Words of `--set`.
    nested: list[str]

    def overrides(self) -> dict[str, Any]:
        """The given fields, unvalidated.

        Raises:
            ConfigError: `--set` or a JSON value is malformed.
        """
        given: dict[str, Any] = dict(self.fields)
        if "model_options" in given:
            try:
                given["model_options"] = json.loads(given["model_options"])
            except ValueError:
                raise ConfigError(f"--model-options: {given['model_options']!r} is not JSON") from None
        for text in self.nested:
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


def add_config_options(parser: argparse.ArgumentParser) -> None:
    """One option for each field of `RunConfig`."""
    group = parser.add_argument_group("configuration of the run (each overrides --run)")
    parser.set_defaults(fields={})
    for name, field in RunConfig.model_fields.items():
        if name in _COMPUTED_FIELDS:
            continue
        group.add_argument(
            *_options_of(name),
            action=_IntoFields,
            dest="fields",
            const=name,
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
    typed = {dashed(word).partition("=")[0] for word in argv}
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
        default = field.get_default(call_default_factory=True, validated_data={})
    text = f"{field.description} (default: {json.dumps(default) if isinstance(default, dict) else default})"
    return text.replace("%", "%%")


def _literal(text: str) -> Any:
    """JSON where it is JSON, else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text
