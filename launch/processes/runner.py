"""From a launcher's `main` to its exit code: signals, errors as one line, one event loop. Knows no kind of peer.

Exit codes: 0 done, 1 failed, 2 usage or configuration, 130 interrupted (Ctrl-C), 143 terminated before it was done.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import os
import select
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from launch.arguments import EXIT_DONE, EXIT_FAILED, EXIT_USAGE
from launch.options import OutputOptions, as_typed
from launch.processes.logs import configure_logging
from launch.processes.reports import NO_REPORTS, Reports
from launch.processes.signals import heeded_signals
from swarm.base.errors import ConfigError, SwarmError

#: A peer that was told to stop gets this long, in seconds, before its remaining tasks are dropped: more than it waits for
#: what is in flight, since then it says what goes with it.
CLOSE_TIMEOUT_S = 15.0
#: Signals that come within so many seconds are one.
ONE_SIGNAL_S = 1.0
Options = TypeVar("Options", bound=OutputOptions)
_log = logging.getLogger(__name__)


class RunsUntilStopped(Protocol):
    """What every role of a peer offers to its launcher."""

    async def start(self) -> None:
        """Begin to serve."""

    async def run(self) -> None:
        """Return once the work is done, or `stop` was called."""

    async def close(self) -> None:
        """Stop serving, and give back what is held."""

    def stop(self) -> None:
        """Have `run` return soon; called on a signal."""


def main_of(
    program: str,
    parse: Callable[[Sequence[str]], Options],
    work: Callable[[Options, list[str], Reports], int],
    argv: Sequence[str] | None,
    reports: Reports = NO_REPORTS,
) -> int:
    """Body of a launcher's `main`: `work(options, argv, reports)`; every error becomes one line and an exit code.

    Who has stopped reading what is printed (`| version_id`) has seen enough: that is no error.
    """
    try:
        return _answer(program, parse, work, list(sys.argv[1:] if argv is None else argv), reports)
    finally:
        _has_reader()  # else Python looks for one as it ends, and complains


def _answer(
    program: str,
    parse: Callable[[Sequence[str]], Options],
    work: Callable[[Options, list[str], Reports], int],
    words: list[str],
    reports: Reports,
) -> int:
    options = parse(words)
    configure_logging(options.log_format, options.log_level, quiet=options.quiet)
    try:
        return work(options, words, reports)
    except ConfigError as error:
        code, text = EXIT_USAGE, str(error)
    except SwarmError as error:
        code, text = EXIT_FAILED, str(error)
    except KeyboardInterrupt:
        code, text = 128 + signal.SIGINT, "interrupted"
    except OSError as error:
        if isinstance(error, BrokenPipeError) and not _has_reader():
            return EXIT_DONE
        is_refused = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS) and error.filename is not None
        code, text = (EXIT_USAGE, f"{error.filename}: {error.strerror}") if is_refused else (EXIT_FAILED, _unexpected(error))
    except Exception as error:
        code, text = EXIT_FAILED, _unexpected(error)
    line = as_typed(" ".join(text.split()), words)
    _log.debug("failed", exc_info=True)
    print(f"{program}: {line}", file=sys.stderr, flush=True)
    reports.failed(line)
    return code


def _has_reader() -> bool:
    """Whether somebody can read stdout; if not, what is left of it and what follows goes nowhere."""
    try:
        out = select.poll()
        out.register(sys.stdout.fileno(), 0)
        if not any(event & select.POLLERR for _, event in out.poll(0)):
            return True
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
    except (OSError, ValueError, AttributeError):  # it is closed, or no file, or there is none
        return True
    return False


def _unexpected(error: Exception) -> str:
    return f"{type(error).__name__}: {error} (--log-level debug shows where)"


class Stopper:
    """Turns the first stop signal into a call of `on_stop`, and the second into an immediate exit.

    Those that come within `ONE_SIGNAL_S` are one: who ends a group of processes tells a worker and its supervisor, which
    hands it on.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._received_at = 0.0
        self.on_stop: Callable[[], object] = lambda: None

    @contextlib.contextmanager
    def installed(self) -> Any:
        """Handle the stop signals inside the block."""
        loop = asyncio.get_running_loop()
        heeded = heeded_signals()
        for number in heeded:
            loop.add_signal_handler(number, self._handle, number)
        try:
            yield self
        finally:
            for number in heeded:
                loop.remove_signal_handler(number)

    def _handle(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if self.received is not None and now - self._received_at < ONE_SIGNAL_S:
            return
        if self.received is not None:
            os._exit(128 + number)
        self.received, self._received_at = number, now
        self.on_stop()

    def exit_code(self, *, serves_until_stopped: bool) -> int:
        """0 without a signal, and for a server that was asked to end; else 128 + signal."""
        if self.received is None or (serves_until_stopped and self.received == signal.SIGTERM):
            return EXIT_DONE
        return 128 + self.received


def run_peer(build: Callable[[], Awaitable[tuple[RunsUntilStopped, Callable[[], None]]]], *, serves_until_stopped: bool) -> int:
    """Run a peer until it is done or a signal stops it, and close it. Returns the exit code.

    `build` gives the peer and what to call once it serves. Role modules that are slow to import are imported there.
    """

    async def work(stopper: Stopper) -> None:
        peer, on_ready = await build()
        try:
            await peer.start()
            gc.freeze()  # of some 400,000 objects that the imports made none goes: looking at them takes 0.2 s each time
            on_ready()
            stopper.on_stop = peer.stop
            await peer.run()
        finally:
            await _close(peer)

    return run_until_done(work, serves_until_stopped=serves_until_stopped)


async def _close(peer: RunsUntilStopped) -> None:
    """Close `peer` within the time that it gets, and the time that a checkpoint takes: that grows with the model."""
    closing = asyncio.ensure_future(peer.close())
    try:
        while not (await asyncio.wait({closing}, timeout=CLOSE_TIMEOUT_S))[0]:
            if not getattr(peer, "is_saving", False):
                _log.warning("closing took over %.0f s; what was left is dropped", CLOSE_TIMEOUT_S)
                return
        closing.result()
    finally:
        if not closing.done():
            closing.cancel()
            await asyncio.gather(closing, return_exceptions=True)


def run_until_done(work: Callable[[Stopper], Coroutine[Any, Any, None]], *, serves_until_stopped: bool) -> int:
    """Run `work` on a fresh loop. Until it sets `on_stop` itself, a signal cancels it. Returns the exit code."""

    async def main() -> int:
        stopper = Stopper()
        with stopper.installed():
            task = asyncio.ensure_future(work(stopper))
            stopper.on_stop = task.cancel
            try:
                await task
            except asyncio.CancelledError:
                if stopper.received is None:
                    raise
            return stopper.exit_code(serves_until_stopped=serves_until_stopped)

    return asyncio.run(main())
