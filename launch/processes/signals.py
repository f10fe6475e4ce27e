"""Which signals tell a process to stop. Owns nothing; what is done then is the launchers'."""

from __future__ import annotations

import signal

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def heeded_signals() -> tuple[signal.Signals, ...]:
    """Those of `STOP_SIGNALS` that this process ends at: not a hang-up that it was started to survive, as by `nohup`."""
    is_deaf = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return tuple(number for number in STOP_SIGNALS if not (is_deaf and number == signal.SIGHUP))
