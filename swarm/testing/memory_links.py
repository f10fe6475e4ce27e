"""What lies between the peers of a simulation: each link's latency, rate and jitter, lines, cuts, and who stands still.

Owns faults on purpose and the time that bytes take; a message that waits here goes on when the fault is undone. The same
seed and program give the same schedule: one `random.Random`, no clock but the loop's, no iteration over sets. Must not
know requests, transports or handlers.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass

from swarm.base.ids import Address

#: A transfer over a link of limited bandwidth is counted in pieces that take this long.
_SLICE_S = 0.25
#: Transfers that share a line take turns with pieces of this size.
_LINE_BYTES = 64 * 2**10


@dataclass(frozen=True, slots=True)
class Link:
    """One direction between two peers: a message takes latency, up to `jitter_s` more, and its size over the rate."""

    latency_s: float
    jitter_s: float
    bytes_per_s: float


class _Line:
    """One direction of a peer's own line: all its transfers share the rate."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.free_at = 0.0


class SimulatedLinks:
    """Every way from one peer to another."""

    def __init__(
        self, rng: random.Random, *, latency_s: float = 0.001, jitter_s: float = 0.0, bytes_per_s: float = math.inf
    ) -> None:
        """
        Args:
            rng: the only source of chance.
            latency_s: one-way delay of every link that `link` does not change.
            jitter_s: a uniform extra delay of up to this, for each message.
            bytes_per_s: rate of one transfer; transfers do not share it.
        """
        self.injected: Counter[str] = Counter()
        self._rng = rng
        self._default = Link(latency_s, jitter_s, bytes_per_s)
        self._links: dict[tuple[Address, Address], Link] = {}
        #: Out of a peer and into it, by its address.
        self._lines: dict[Address, tuple[_Line, _Line]] = {}
        self._cuts: dict[tuple[Address, Address], None] = {}
        self._paused: dict[Address, None] = {}
        self._changed = asyncio.Event()

    # -------------------------------------------------------------------------------------------- faults on purpose

    def link(
        self,
        a: Address,
        b: Address,
        *,
        latency_s: float | None = None,
        jitter_s: float | None = None,
        bytes_per_s: float | None = None,
        one_way: bool = False,
    ) -> None:
        """Change the link from `a` to `b` and, unless `one_way`, back; what is not given becomes the default."""
        link = Link(
            self._default.latency_s if latency_s is None else latency_s,
            self._default.jitter_s if jitter_s is None else jitter_s,
            self._default.bytes_per_s if bytes_per_s is None else bytes_per_s,
        )
        for pair in _pairs(a, b, one_way):
            self._links[pair] = link

    def line(self, address: Address, *, up: float, down: float) -> None:
        """Give a peer a line of its own (bytes per second out and in), which all its transfers share, besides the links."""
        self._lines[address] = (_Line(up), _Line(down))

    def cut(self, a: Address, b: Address, *, one_way: bool = False) -> None:
        """Let nothing pass from `a` to `b` and, unless `one_way`, back. What is on its way arrives after `heal`."""
        for pair in _pairs(a, b, one_way):
            self._cuts[pair] = None
        self.injected["cut"] += 1

    def heal(self, a: Address, b: Address, *, one_way: bool = False) -> None:
        """Undo `cut`."""
        for pair in _pairs(a, b, one_way):
            self._cuts.pop(pair, None)
        self.change()

    def heal_all(self, address: Address | None = None) -> None:
        """Undo every cut, or each that ends at `address`."""
        for a, b in list(self._cuts):
            if address is None or address in (a, b):
                self.heal(a, b, one_way=True)

    def pause(self, address: Address) -> None:
        """Stop the peer as SIGSTOP does: it takes requests, and nothing advances."""
        self._paused[address] = None
        self.injected["pause"] += 1

    def resume(self, address: Address) -> None:
        """Let the peer go on, with old requests too."""
        self._paused.pop(address, None)
        self.change()

    # -------------------------------------------------------------------------------------------- moving bytes

    async def awake(self, address: Address) -> None:
        """Return once the peer at `address` is not paused."""
        while address in self._paused:
            await self._changed.wait()

    async def connectable(self, source: Address, target: Address) -> None:
        """Return once the link is cut in neither direction."""
        while (source, target) in self._cuts or (target, source) in self._cuts:
            await self._changed.wait()

    async def passable(self, source: Address, target: Address) -> None:
        """Return once the link is not cut and the sender not paused."""
        while self.is_blocked(source, target):
            await self._changed.wait()

    async def carry(self, source: Address, target: Address) -> None:
        """The way of a packet: not while the link is cut or the sender stopped, and with the link's latency."""
        link = self.between(source, target)
        await self.passable(source, target)
        await asyncio.sleep(link.latency_s + (self._rng.uniform(0, link.jitter_s) if link.jitter_s else 0.0))
        await self.passable(source, target)

    async def pieces(self, source: Address, target: Address, num_bytes: int) -> AsyncIterator[int]:
        """The bytes of a message in pieces, each once it has moved at the rates of the link and of both ends' lines."""
        link = self.between(source, target)
        lines = self._lines_between(source, target)
        loop = asyncio.get_running_loop()
        left = num_bytes
        while left > 0:
            piece = left if math.isinf(link.bytes_per_s) else min(left, math.ceil(link.bytes_per_s * _SLICE_S))
            if lines:
                piece = min(piece, _LINE_BYTES)
            done_at = loop.time() + piece / link.bytes_per_s
            for line in lines:
                line.free_at = max(loop.time(), line.free_at) + piece / line.bytes_per_s
                done_at = max(done_at, line.free_at)
            await asyncio.sleep(done_at - loop.time())
            await self.passable(source, target)
            yield piece
            left -= piece

    def between(self, source: Address, target: Address) -> Link:
        """The link from `source` to `target`."""
        return self._links.get((source, target), self._default)

    def is_limited(self, source: Address, target: Address) -> bool:
        """Whether bytes take time on this way."""
        return bool(self._lines_between(source, target)) or math.isfinite(self.between(source, target).bytes_per_s)

    def is_blocked(self, source: Address, target: Address) -> bool:
        """Whether nothing passes from `source` to `target` now."""
        return (source, target) in self._cuts or source in self._paused

    def is_paused(self, address: Address) -> bool:
        """Whether the peer at `address` is stopped."""
        return address in self._paused

    def forget(self, address: Address) -> None:
        """Nobody is at `address` any more; whoever comes next is not paused."""
        self._paused.pop(address, None)

    def _lines_between(self, source: Address, target: Address) -> list[_Line]:
        return [ways[k] for k, address in enumerate((source, target)) if (ways := self._lines.get(address)) is not None]

    def change(self) -> None:
        """Have everybody who waits look again."""
        self._changed.set()
        self._changed = asyncio.Event()


def _pairs(a: Address, b: Address, one_way: bool) -> list[tuple[Address, Address]]:
    return [(a, b)] if one_way else [(a, b), (b, a)]
