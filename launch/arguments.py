"""The command line's parser and the types of its values.

It owns how a mistake is told and what a value may look like. The options themselves are in `launch/options.py` and in each
command. It must not import torch: a mistake answers at once.
"""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

from swarm.base.dotted import is_dotted
from swarm.base.ids import MAX_TICKETS, Address, parse_address
from swarm.feed.files import HUB_PREFIX, is_pattern

#: A frozen dataclass.
Options = TypeVar("Options")

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2

#: Of one kind, for each stage or in all.
MAX_PROCESSES = 1024
MAX_THREADS = 1024
#: As `LEAST_IN_FLIGHT_BYTES` of `swarm/stage/memory_plan.py`, which imports torch.
LEAST_MEMORY_BYTES = 2**24

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

    def parse(self, argv: Sequence[str], options: type[Options]) -> Options:
        """Read the words of a command line into `options`, whose fields are the names of this parser's options."""
        return options(**vars(self.parse_args(_with_values([dashed(word) for word in argv]))))

    def error(self, message: str) -> NoReturn:
        """Print `message` as one line and exit with `EXIT_USAGE`."""
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


def dashed(word: str) -> str:
    """An option as it is spelt: `--a_b` becomes `--a-b`. What is no option stays as it is."""
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


def memory_size(text: str) -> int:
    """A size that leaves room for the micro-batches of the smallest stage."""
    size = size_bytes(text)
    if size < LEAST_MEMORY_BYTES:
        raise argparse.ArgumentTypeError(f"{text!r} is too little for any stage: micro-batches alone need 16MiB")
    return size


def peer_address(text: str) -> Address:
    """`HOST:PORT` of a peer."""
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
    """A port; 0 lets the system choose."""
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port in 0..65535")
    return int(text)


def positive_int(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def process_count(text: str) -> int:
    """A number of processes, at most `MAX_PROCESSES`."""
    if positive_int(text) > MAX_PROCESSES:
        raise argparse.ArgumentTypeError(f"{text} is more than {MAX_PROCESSES}, the most that is started on one machine")
    return int(text)


def thread_count(text: str) -> int:
    """A number of threads, at most `MAX_THREADS`."""
    if positive_int(text) > MAX_THREADS:
        raise argparse.ArgumentTypeError(f"{text} is more than {MAX_THREADS}, the most that one process computes with")
    return int(text)


def count(text: str) -> int:
    """A whole number of at least 0."""
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def positive_seconds(text: str) -> float:
    """A time above 0, in seconds."""
    return _positive(text, "number of seconds")


def positive_number(text: str) -> float:
    """A number above 0."""
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
    """A whole number, or None for `auto`."""
    return None if text == "auto" else count(text)


def auto_or_micro_batches(text: str) -> int | None:
    """A number of micro-batches under way, or None for `auto`."""
    number = None if text == "auto" else positive_int(text)
    if number is not None and number > MAX_TICKETS:
        raise argparse.ArgumentTypeError(f"{number} micro-batches are more than a step has at most, {MAX_TICKETS}")
    return number


def device_name(text: str) -> str:
    """`auto`, `cpu` or `cuda:N`; `cuda` is the first one."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is none of auto, cpu, cuda:N")
    return "cuda:0" if text == "cuda" else text


def existing_path(text: str) -> Path:
    """The path of something that exists."""
    path = local_path(text)
    if not path.exists():
        raise argparse.ArgumentTypeError(f"{text}: no such file or directory")
    return path


def data_source(text: str) -> str:
    """A path that exists, a pattern, a data set on the hub, or the dotted path of a factory: whatever `swarm.feed` reads."""
    if is_dotted(text) or text.startswith(HUB_PREFIX):
        return text
    path = str(local_path(text))
    return path if is_pattern(path) else str(existing_path(text))


def output_directory(text: str) -> Path:
    """The path of a directory, which need not exist."""
    path = local_path(text)
    if path.exists() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is no directory: name one, or a new one")
    return path


def non_empty(text: str) -> str:
    """Text that is not empty."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"{text!r} names nothing")
    return text


def local_path(text: str) -> Path:
    """A path; `~` is the user's home."""
    if not text:  # `Path` takes it for the current directory
        raise argparse.ArgumentTypeError("'' is no path; the current directory is .")
    return Path(text).expanduser()
