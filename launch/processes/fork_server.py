"""The fork server's own process: imports once, forks a child per request, reaps and reports. Knows no kind of peer.

It speaks JSON lines over the socket that its creator handed it:

    -> {"start": name, "entry": "module:function", "argv": [...], "title": text, "log": path}
    -> {"signal": name, "number": n}
    -> {"preload": "module:function", "argument": text}, first of all
    <- {"ready": number of CUDA devices} or {"failed": text, "usage": is it the configuration's fault}
    <- {"started": name, "pid": pid}, {"exited": name, "code": n} (negative: killed by that signal)

Children report to the creator through one shared pipe: see `launch.processes.reports`. When the creator is gone, however it
went, every child is ended and the server exits.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from typing import Any

from setproctitle import setproctitle

from launch.processes.lifeline import die_with_parent, watch_pipe
from launch.processes.reports import PipeReports
from launch.processes.signals import STOP_SIGNALS
from swarm.base.errors import ConfigError, SwarmError

#: After the creator's death children get this long, in seconds, to end by themselves.
ORPHAN_GRACE_S = 4.0


class _Server:
    def __init__(self, control: socket.socket, report_fd: int) -> None:
        self._control = control
        self._report_fd = report_fd
        self._names: dict[int, str] = {}  # pid -> name
        self._unread = b""
        self._lifeline_r, self._lifeline_w = os.pipe()
        self._wakeup_r, self._wakeup_w = os.pipe()
        for fd in (self._wakeup_r, self._wakeup_w):
            os.set_blocking(fd, False)

    def preload(self) -> int:
        """Obey the first request; returns the number of CUDA devices."""
        while b"\n" not in self._unread:
            if not (data := self._control.recv(65536)):
                raise EOFError("the creator is gone")
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        request = json.loads(line)
        module, _, function = request["preload"].partition(":")
        return int(getattr(importlib.import_module(module), function)(request["argument"]))

    def serve(self) -> None:
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakeup_w)
        with selectors.SelectSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            selector.register(self._wakeup_r, selectors.EVENT_READ)
            self._obey()
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self._control:
                        if not self._read_requests():
                            return
                    else:
                        os.read(self._wakeup_r, 4096)
                        self._reap()

    def tell(self, **message: Any) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._control.sendall(json.dumps(message).encode() + b"\n")

    def end_children(self) -> None:
        """The creator is gone: ask the children to end, then make them."""
        for pid in self._names:
            os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + ORPHAN_GRACE_S
        while self._names and time.monotonic() < deadline:
            self._reap()
            time.sleep(0.02)
        for pid in self._names:
            os.kill(pid, signal.SIGKILL)

    def _read_requests(self) -> bool:
        """Obey what has come; False at the end of the stream."""
        try:
            data = self._control.recv(65536)
        except ConnectionResetError:
            data = b""
        if not data:
            return False
        self._unread += data
        self._obey()
        return True

    def _obey(self) -> None:
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            request = json.loads(line)
            if "start" in request:
                self._start(request)
            else:
                self._signal(request["signal"], request["number"])

    def _start(self, request: dict[str, Any]) -> None:
        server_pid = os.getpid()
        signal.pthread_sigmask(
            signal.SIG_BLOCK, STOP_SIGNALS
        )  # one that comes to the child at once waits until the child handles it
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                self._become_child(request, server_pid)
                code = _run_entry(request, self._report_fd)
            except BaseException:
                traceback.print_exc()
            finally:
                with contextlib.suppress(Exception):
                    sys.stdout.flush()
                    sys.stderr.flush()
                os._exit(code)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        self._names[pid] = request["start"]
        self.tell(started=request["start"], pid=pid)

    def _become_child(self, request: dict[str, Any], server_pid: int) -> None:
        """Leave everything of the server behind except the report pipe and the lifeline."""
        die_with_parent(server_pid)
        os.setpgid(0, 0)  # a Ctrl-C at the terminal is for the creator, which then stops its children in order
        signal.set_wakeup_fd(-1)
        for number in (*STOP_SIGNALS, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        log_fd = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log_fd, 1)
        os.dup2(log_fd, 2)
        os.close(log_fd)
        self._control.close()
        for fd in (self._lifeline_w, self._wakeup_r, self._wakeup_w):
            os.close(fd)
        setproctitle(request["title"])
        watch_pipe(self._lifeline_r)

    def _signal(self, name: str, number: int) -> None:
        for pid, known in self._names.items():
            if known == name:
                os.kill(pid, number)  # not reaped yet, so the pid is still its own

    def _reap(self) -> None:
        while self._names:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            self.tell(exited=self._names.pop(pid), code=os.waitstatus_to_exitcode(status))


def _run_entry(request: dict[str, Any], report_fd: int) -> int:
    """Run a launcher's `main(argv, reports)` and return its exit code."""
    module, _, function = request["entry"].partition(":")
    main = getattr(importlib.import_module(module), function)
    try:
        return int(main(request["argv"], PipeReports(request["start"], report_fd)) or 0)
    except SystemExit as error:  # argparse, after it has printed its line
        return error.code if isinstance(error.code, int) else 1


def serve(control_fd: int, report_fd: int) -> None:
    """Body of the server's process."""
    for number in STOP_SIGNALS:  # sent to everyone of a group or service, they are for the creator, which stops all in order
        signal.signal(number, signal.SIG_IGN)
    setproctitle(f"swarm fork server of {os.getppid()}")
    with socket.socket(fileno=control_fd) as control:
        server = _Server(control, report_fd)
        try:
            num_devices = server.preload()
        except Exception as error:
            traceback.print_exc()
            named = str(error) if isinstance(error, SwarmError | ImportError) else f"{type(error).__name__}: {error}"
            server.tell(failed=named, usage=isinstance(error, ConfigError))
            return
        server.tell(ready=num_devices)
        server.serve()
        server.end_children()
