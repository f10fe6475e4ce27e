"""The memory budget for what in-flight micro-batches hold. Owns the counting, not the tensors."""

from __future__ import annotations

import threading


class MemoryBudget:
    """Counts bytes against a bound, for the event loop and the compute thread.

    Invariant: `0 <= used_bytes <= limit_bytes`.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._lock = threading.Lock()

    def reserve(self, num_bytes: int) -> bool:
        """Take `num_bytes` if they fit."""
        with self._lock:
            if self.used_bytes + num_bytes > self.limit_bytes:
                return False
            self.used_bytes += num_bytes
            return True

    def release(self, num_bytes: int) -> None:
        with self._lock:
            self.used_bytes -= num_bytes
        assert self.used_bytes >= 0, "more memory released than reserved"
