"""Memory that is used again once nobody holds it. Owns idle buffers, within bounds; must not know what is stored in them.

A fresh buffer of some MiB costs a page fault for every 4 KiB, which takes longer than writing to it. Who gets a buffer
holds it through a view; when the last view of it is gone, however deep in another library, the buffer is idle again.
"""

from __future__ import annotations

import threading
import weakref

import numpy

#: Smaller buffers come from the heap, which uses its memory again by itself.
_LEAST_BYTES = 256 * 2**10
#: glibc maps blocks of 128 KiB or more afresh each time, page faults included, until it sees a larger one let go; then
#: all smaller ones come from the heap. This is the most that it learns from.
_MAX_HEAP_BYTES = 31 * 2**20


class Recycler:
    """Gives out buffers of any size; safe to use from any thread.

    Invariant: at most `max_idle` buffers and `max_idle_bytes` bytes are idle.
    """

    def __init__(self, *, max_idle: int, max_idle_bytes: int) -> None:
        self._max_idle = max_idle
        self._max_idle_bytes = max_idle_bytes
        self._idle: list[numpy.ndarray] = []
        #: Buffers in use, each with the reference that tells when nobody holds it any more, by that reference's id.
        self._in_use: dict[int, tuple[weakref.ref[numpy.ndarray], numpy.ndarray]] = {}
        # A buffer may come back in the middle of `take`, when its garbage is collected there.
        self._lock = threading.RLock()
        # Pieces of bodies that libraries receive shall come from the heap, too: this block is let go at once, untouched.
        numpy.empty(_MAX_HEAP_BYTES, numpy.uint8)

    @property
    def idle_bytes(self) -> int:
        """Bytes of memory that waits to be used again."""
        with self._lock:
            return sum(buffer.nbytes for buffer in self._idle)

    def take(self, num_bytes: int) -> memoryview:
        """Give out writable memory with anything in it; pages that were never written take no room."""
        if num_bytes < _LEAST_BYTES:
            return numpy.empty(num_bytes, numpy.uint8).data
        capacity = _capacity(num_bytes)
        with self._lock:
            found = next((i for i in reversed(range(len(self._idle))) if self._idle[i].nbytes == capacity), None)
            buffer = numpy.empty(capacity, numpy.uint8) if found is None else self._idle.pop(found)
        borrowed = buffer[:num_bytes]
        gone = weakref.ref(borrowed, self._give_back)
        with self._lock:
            self._in_use[id(gone)] = gone, buffer
        return borrowed.data  # this view, and every view of it, keeps `borrowed` alive

    def _give_back(self, gone: weakref.ref[numpy.ndarray]) -> None:
        with self._lock:
            self._idle.append(self._in_use.pop(id(gone))[1])
            while len(self._idle) > self._max_idle or self.idle_bytes > self._max_idle_bytes:
                del self._idle[0]


def _capacity(num_bytes: int) -> int:
    """`num_bytes`, rounded up by less than a quarter, so that bodies of about one size share buffers."""
    step = 1 << max(0, num_bytes.bit_length() - 3)
    return -(-num_bytes // step) * step
