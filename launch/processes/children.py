"""The creator's side of the fork server: start children, signal them, learn how they end. Knows no kind of peer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swarm.base.errors import ConfigError, InternalError, SwarmError

#: `(child's name, report)`; reports are what the child passed to `Reports.send`, with its `event`.
OnReport = Callable[[str, dict[str, Any]], None]

#: A child that writes, and is told to end, gets so long, in seconds, while what it writes does not grow: for a busy disk.
WRITING_S = 60.0
_LOOK_EVERY_S = 0.25


@dataclass(kw_only=True, eq=False)
class Child:
    """One child process. `ended` resolves to its exit code, negative if a signal killed it."""

    name: str
    log: Path
    started: asyncio.Future[int]
    ended: asyncio.Future[int]
    pid: int = 0
    _send: Callable[[dict[str, Any]], None] = field(repr=False)

    @property
    def alive(self) -> bool:
        """Whether it has not ended yet."""
        return not self.ended.done()

    def signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.alive:
            self._send({"signal": self.name, "number": number})

    def last_words(self, *, num_lines: int = 5) -> list[str]:
        """The last non-empty lines of its log."""
        with contextlib.suppress(OSError):
            lines = self.log.read_text(errors="replace").splitlines()
            return [line for line in lines if line.strip()][-num_lines:]
        return []


class Children:
    """Starts a fork server and keeps its children. Used from one event loop."""

    def __init__(
        self,
        log_dir: Path,
        on_report: OnReport,
        *,
        preload: str = "launch.processes.preload:everything",
        argument: str = "",
        name: str = "fork_server",
    ) -> None:
        self._argument = argument
        self._name = name
        self._log_dir = log_dir
        self._on_report = on_report
        self._preload = preload
        self._children: dict[str, Child] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._ready: asyncio.Future[int] | None = None
        self._has_ended = False
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def _log(self) -> Path:
        return self._log_dir / f"{self._name}.log"

    async def start(self) -> None:
        """Start the server's process; it goes on importing after this returns."""
        loop = asyncio.get_running_loop()
        ours, report_r = self._start_process()
        self._ready = loop.create_future()
        self._ready.add_done_callback(lambda future: future.exception())  # it may fail with nobody waiting yet
        replies, self._writer = await asyncio.open_connection(sock=ours)
        self._send({"preload": self._preload, "argument": self._argument})
        reports = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reports), os.fdopen(report_r, "rb"))
        self._tasks = [asyncio.create_task(self._read_replies(replies)), asyncio.create_task(self._read_reports(reports))]

    def _start_process(self) -> tuple[socket.socket, int]:
        """Our end of the control socket, and the read end of the report pipe."""
        ours, theirs = socket.socketpair()
        report_r, report_w = os.pipe()
        with theirs, open(self._log, "ab") as log:
            code = (
                f"import sys; sys.path[:] = {sys.path!r}\n"
                "from launch.processes.fork_server import serve\n"
                f"serve({theirs.fileno()}, {report_w})"
            )
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(theirs.fileno(), report_w),
            )
        os.close(report_w)
        return ours, report_r

    async def ready(self) -> int:
        """Wait for the server's imports; returns the number of CUDA devices.

        Raises:
            ConfigError: what is to be imported is not there, or does not fit the configuration.
            SwarmError: an import failed, or the server ended.
        """
        assert self._ready is not None
        return await asyncio.shield(self._ready)

    async def spawn(self, name: str, entry: str, argv: Sequence[str], *, title: str) -> Child:
        """Fork a child that runs `entry` (`module:function`, called with `argv` and its `Reports`).

        Its output goes to `name`.log. Returns once it has a pid.

        Raises:
            SwarmError: the server has ended.
        """
        loop = asyncio.get_running_loop()
        if self._has_ended:
            raise self._gone()
        log = self._log_dir / f"{name}.log"
        child = Child(name=name, log=log, started=loop.create_future(), ended=loop.create_future(), _send=self._send)
        if name in self._children:
            raise InternalError(f"a child named {name} exists")
        self._children[name] = child
        self._send({"start": name, "entry": entry, "argv": list(argv), "title": title, "log": str(log)})
        child.pid = await asyncio.shield(child.started)  # cancelling the caller must not cancel the future
        return child

    async def stop(self, *, grace_s: float, among: str = "", written: Callable[[Child], int] = lambda child: -1) -> list[str]:
        """End every child whose name begins with `among`: SIGTERM, after `grace_s` SIGKILL.

        Args:
            grace_s: seconds that a child gets to end, and again for each time that what it writes has grown.
            among: "" for all.
            written: bytes that a child has written of what it is writing now, for which it gets longer; -1 if it writes nothing.

        Returns:
            The names of those that had to be killed.
        """
        clock = asyncio.get_running_loop().time
        alive = [child for child in self._children.values() if child.alive and child.name.startswith(among)]
        late: list[Child] = []
        seen = {child: (written(child), clock()) for child in alive}
        for child in alive:
            child.signal(signal.SIGTERM)
        while pending := [child for child in alive if child.alive and child not in late]:
            await asyncio.wait(
                [child.ended for child in pending], timeout=min(grace_s, _LOOK_EVERY_S), return_when=asyncio.FIRST_COMPLETED
            )
            for child in pending:
                count, (before, at) = written(child), seen[child]
                if count != before:
                    seen[child] = count, clock()
                elif clock() - at >= (grace_s if count < 0 else max(grace_s, WRITING_S)):
                    late.append(child)
        for child in late:
            child.signal(signal.SIGKILL)
        if late:
            await asyncio.wait([child.ended for child in late], timeout=2.0)
        return [child.name for child in late]

    async def close(self, *, grace_s: float, written: Callable[[Child], int] = lambda child: -1) -> None:
        """Stop every child and the server, as `stop` does; afterwards no process of theirs is left."""
        if self._process is None:
            return
        try:
            await self.stop(grace_s=grace_s, written=written)
        finally:
            if self._writer is not None:
                self._writer.close()  # the server sees the end of the stream and exits
            # Once the server has exited both streams end, after the last report; an import is not waited for.
            await asyncio.wait(self._tasks, timeout=0.5)
            self._process.kill()
            self._process.wait()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _send(self, message: dict[str, Any]) -> None:
        assert self._writer is not None
        if not self._writer.is_closing():  # else the server has gone, and its children with it
            self._writer.write(json.dumps(message).encode() + b"\n")

    async def _read_replies(self, replies: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):  # what was sent to a server that has gone
            while line := await replies.readline():
                self._raise_if_newer(json.loads(line))
        self._server_ended()

    def _raise_if_newer(self, reply: dict[str, Any]) -> None:
        assert self._ready is not None
        if "ready" in reply:
            self._ready.set_result(reply["ready"])
        elif "failed" in reply:
            self._ready.set_exception((ConfigError if reply["usage"] else SwarmError)(reply["failed"]))
        elif "started" in reply:
            self._children[reply["started"]].started.set_result(reply["pid"])
        else:
            self._children[reply["exited"]].ended.set_result(reply["code"])

    def _server_ended(self) -> None:
        """Without its server no child lives on."""
        gone, self._has_ended = self._gone(), True
        assert self._ready is not None
        if not self._ready.done():
            self._ready.set_exception(gone)
        for child in self._children.values():
            if not child.started.done():
                child.started.set_exception(gone)
            if child.alive:
                child.ended.set_result(-signal.SIGKILL)

    def _gone(self) -> SwarmError:
        return SwarmError(f"the fork server ended; see {self._log}")

    async def _read_reports(self, reports: asyncio.StreamReader) -> None:
        while line := await reports.readline():
            report = json.loads(line)
            self._on_report(report.pop("from"), report)
