"""One tree of errors, split by who is at fault. Retry and ban policies read the type, never the text."""

from __future__ import annotations


class SwarmError(Exception):
    """Root of every error that this package raises on purpose."""


class InternalError(SwarmError):
    """The fault is our own: an invariant does not hold. It is never retried."""


class ConfigError(SwarmError):
    """The configuration's or the command line's fault. One line: what, where, what to do. Exit code 2."""


class StorageError(SwarmError):
    """The local disk's fault: full, read-only or corrupt. Training goes on; the old file stays intact."""


class RemoteError(SwarmError):
    """The remote peer's fault: it answered, and the answer is of no use."""


class RemoteProtocolError(RemoteError):
    """The remote sent bytes that are no valid message."""


class RemoteRefused(RemoteError):
    """The remote understood and said no; `code` is one of `wire.messages.REFUSAL_CODES`."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code = code
        self.reason = reason


class LinkError(SwarmError):
    """The link's fault, or that of a peer that is gone: nothing useful came back."""


class Unreachable(LinkError):
    """No connection could be made: the request was never delivered."""


class UnknownHost(Unreachable):
    """No name service that this machine asks knows the host."""


class Stalled(LinkError):
    """The connection stood, but no counter advanced within the deadline."""


class LinkBroken(LinkError):
    """The connection ended before the reply did."""
