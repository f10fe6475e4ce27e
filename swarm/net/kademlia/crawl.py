"""The walk towards a key: asks ever nearer nodes and does not wait for the silent ones.

Owns one crawl's order of questions. Must not know what is asked; must not know sockets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kademlia.crawling import SpiderCrawl
from kademlia.node import Node

from swarm.net.kademlia.calls import Reply, ReplyFuture

#: Enough answers to end a crawl while only silent nodes are left to wait for.
_ENOUGH_ANSWERS = 3
#: Questions at once, however many nodes are silent.
_MAX_PARALLEL = 32
#: An answer is hoped for until so many times the time after which it is late.
_TIMEOUT = 3


@dataclass(slots=True)
class _Question:
    node: Node
    late_at: float
    given_up_at: float
    is_late: bool = False


class NearestCrawl(SpiderCrawl):
    """Finds the nodes nearest to `node` that answer.

    A node that is late gives its place to the next nearest, and from then on twice as many are asked at once, so that a
    table full of dead contacts costs little. Its answer is welcome until the end: a crawl with answers enough ends when
    all that are still out have been silent for long enough for a lost datagram to be sent again.

    Args:
        protocol: kademlia's protocol, whose own node is never asked.
        node: the target.
        peers: where to start.
        ksize: how many of the nearest are wanted.
        alpha: questions at once.
        late_s: how long a node's answer may take before another is asked in its place.
        ask: sends the question.
        read: takes a reply's body and the node that sent it and returns the nodes it names; None spoils the reply.
    """

    def __init__(
        self,
        protocol: Any,
        node: Node,
        peers: list[Node],
        ksize: int,
        alpha: int,
        *,
        late_s: Callable[[Node], float],
        ask: Callable[[Node], ReplyFuture],
        read: Callable[[Node, Any], list[Node] | None],
    ) -> None:
        super().__init__(protocol, node, peers, ksize, alpha)
        self._parallel = alpha
        self._late_s = late_s
        self._ask = ask
        self._read = read
        self._in_flight: dict[ReplyFuture, _Question] = {}
        self._answered: dict[bytes, Node] = {}
        #: Other addresses under which a node was named; tried if the first one is silent.
        self._elsewhere: dict[bytes, list[Node]] = {}
        self._named: set[tuple[bytes, str, int]] = {tuple(peer) for peer in peers}
        #: Questions after which a node was known, by id: 1 for those to start with.
        self._depth: dict[bytes, int] = {peer.id: 1 for peer in peers}

    @property
    def num_hops(self) -> int:
        """Questions in a row until the nearest node that answered had done so; 0 if none did."""
        if not self._answered:
            return 0
        return self._depth[min(self._answered.values(), key=self.node.distance_to).id]

    async def find(self) -> list[Node]:
        """The nearest nodes that answered, nearest first."""
        loop = asyncio.get_running_loop()
        try:
            while self._ask_more(loop.time()):
                now = loop.time()
                hopeful = [question for question in self._in_flight.values() if question.given_up_at > now]
                if not hopeful and len(self._answered) >= min(self.ksize, _ENOUGH_ANSWERS):
                    break
                due = [question.given_up_at if question.is_late else question.late_at for question in hopeful]
                done, _ = await asyncio.wait(
                    self._in_flight, timeout=max(0.0, min(due) - now) if due else None, return_when=asyncio.FIRST_COMPLETED
                )
                for future in done:
                    self._accept(self._in_flight.pop(future).node, future.result())
                self._mark_late(loop.time())
        except asyncio.CancelledError:
            for future in self._in_flight:
                future.cancel()
            raise
        return sorted(self._answered.values(), key=self.node.distance_to)[: self.ksize]

    def _ask_more(self, now: float) -> bool:
        num_fresh = sum(not question.is_late for question in self._in_flight.values())
        for node in self.nearest.get_uncontacted()[: max(0, self._parallel - num_fresh)]:
            self.nearest.mark_contacted(node)
            late_s = self._late_s(node)
            self._in_flight[self._ask(node)] = _Question(node, now + late_s, now + _TIMEOUT * late_s)
        return bool(self._in_flight)

    def _accept(self, node: Node, reply: Reply | None) -> None:
        named = self._read(node, reply.body) if reply is not None else None
        if named is None:
            self._give_place(node)
            return
        self._answered[node.id] = node
        self.nearest.push(node)
        depth = self._depth[node.id] + 1
        for other in named:
            if other.id == self.protocol.source_node.id or tuple(other) in self._named:
                continue
            self._named.add(tuple(other))
            self._depth.setdefault(other.id, depth)
            if other in self.nearest:
                self._elsewhere.setdefault(other.id, []).append(other)
            else:
                self.nearest.contacted.discard(other.id)
                self.nearest.push(other)

    def _mark_late(self, now: float) -> None:
        late = [question for question in self._in_flight.values() if not question.is_late and question.late_at <= now]
        if late:
            self._parallel = min(2 * self._parallel, _MAX_PARALLEL)
        for question in late:
            question.is_late = True
            self._give_place(question.node)

    def _give_place(self, node: Node) -> None:
        if node.id in self._answered:
            return
        self.nearest.remove([node.id])
        if elsewhere := self._elsewhere.get(node.id):
            self.nearest.contacted.discard(node.id)
            self.nearest.push(elsewhere.pop())
