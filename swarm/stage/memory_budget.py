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
        """Give back `num_bytes` that were reserved."""
        with self._lock:
            self.used_bytes -= num_bytes
        assert self.used_bytes >= 0, "more memory released than reserved"


class Reservation:
    """One request's part of a budget until it ends. A job of it that goes on afterwards gets no more."""

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self._num_bytes = 0
        self._has_ended = False
        self._lock = threading.Lock()

    def add(self, num_bytes: int) -> bool:
        """Take `num_bytes` more if they fit."""
        with self._lock:
            if self._has_ended or not self._budget.reserve(num_bytes):
                return False
            self._num_bytes += num_bytes
            return True

    def end(self) -> None:
        """Give all of it back."""
        with self._lock:
            self._has_ended = True
            self._budget.release(self._num_bytes)
            self._num_bytes = 0
