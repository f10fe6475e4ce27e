"""The memory budget for what in-flight micro-batches hold. Owns the counting, not the tensors."""

from __future__ import annotations


class MemoryBudget:
    """Counts bytes against a bound.

    Invariant: `0 <= used_bytes <= limit_bytes`.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0

    def reserve(self, num_bytes: int) -> bool:
        """Take `num_bytes` if they fit."""
        if self.used_bytes + num_bytes > self.limit_bytes:
            return False
        self.used_bytes += num_bytes
        return True

    def release(self, num_bytes: int) -> None:
        self.used_bytes -= num_bytes
        assert self.used_bytes >= 0, "more memory released than reserved"
