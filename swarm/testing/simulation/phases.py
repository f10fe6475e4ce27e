"""Hooks to act at a phase of a step: requests of one kind are met, held back or counted as they reach the network.

Phases are told by the messages that begin them, not by anyone's private state, so a test says *when* in the words of the
protocol: "the first frozen `Collect` of step 2". A peer's messages to itself do not pass the network.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

from swarm.base.ids import Address
from swarm.peer.stage.stage_peer import StagePeer
from swarm.testing.simulation.nodes import Node
from swarm.testing.simulation.simulation import Simulation, check
from swarm.testing.simulation.tapped import Call
from swarm.wire import messages as m

Matches = Callable[[Call], bool]


def step_of(message: m.Message) -> int | None:
    """The step that a message speaks of."""
    if isinstance(message, m.Train):
        return message.ticket.step
    if isinstance(message, m.Commit):
        return message.record.step
    step = getattr(message, "step", None)
    return step if isinstance(step, int) else None


def kind(
    kind: type[m.Message],
    *,
    step: int | None = None,
    stage: int | None = None,
    freeze: bool | None = None,
    source: Node | None = None,
    target: Node | None = None,
) -> Matches:
    """Matches requests of one kind, of any step, stage, freeze, source or target that is not given."""

    def matches(call: Call) -> bool:
        message = call.message
        return (
            isinstance(message, kind)
            and (step is None or step_of(message) == step)
            and (stage is None or getattr(message, "stage", None) == stage)
            and (freeze is None or getattr(message, "freeze", None) == freeze)
            and (source is None or call.source == source.address)
            and (target is None or call.target == target.address)
        )

    return matches


class HeldBack:
    """Requests that match wait before they are sent, from `with` until its end or `release`; at most `limit` of them."""

    def __init__(self, simulation: Simulation, matches: Matches, *, limit: int | None = None) -> None:
        self._simulation = simulation
        self._matches = matches
        self._limit = limit
        self._first = asyncio.Event()
        self._released = asyncio.Event()
        #: Requests that were held, in order.
        self.calls: list[Call] = []

    async def _before(self, call: Call) -> None:
        if self._released.is_set() or not self._matches(call):
            return
        if self._limit is not None and len(self.calls) >= self._limit:
            return
        self.calls.append(call)
        self._first.set()
        await self._released.wait()

    def __enter__(self) -> HeldBack:
        self._simulation.before_request.append(self._before)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._simulation.before_request.remove(self._before)
        self.release()

    def release(self) -> None:
        """Let them go on, and hold no more."""
        self._released.set()

    async def reached(self, *, within_s: float = 300.0) -> Call:
        """The first that matches.

        Raises:
            AssertionError: none came, so the phase was never reached.
        """
        try:
            async with asyncio.timeout(within_s):
                await self._first.wait()
        except TimeoutError:
            raise AssertionError(f"no such request within {within_s:g} s; {self._simulation.describe()}") from None
        return self.calls[0]


class Log:
    """Every request that matches, with its reply or error, from now on."""

    def __init__(self, simulation: Simulation, matches: Matches = lambda call: True) -> None:
        #: In the order in which they were sent.
        self.calls: list[Call] = []

        async def before(call: Call) -> None:
            if matches(call):
                self.calls.append(call)

        simulation.before_request.append(before)

    def __len__(self) -> int:
        return len(self.calls)


async def until(condition: Callable[[], bool], what: str, *, within_s: float = 300.0, every_s: float = 0.005) -> None:
    """Wait until `condition()` holds.

    Raises:
        AssertionError: `what` never came about.
    """
    try:
        async with asyncio.timeout(within_s):
            while not condition():  # noqa: ASYNC110 (a test looks from outside; nobody sets an event for it)
                await asyncio.sleep(every_s)
    except TimeoutError:
        raise AssertionError(f"not within {within_s:g} s: {what}") from None


async def committed(simulation: Simulation, steps: int, *, within_s: float = 300.0) -> None:
    """Until some peer took over the record of that many steps."""
    await until(lambda: max(simulation.commits, default=-1) + 1 >= steps, f"{steps} steps committed", within_s=within_s)


async def finish_from(second: Simulation, first: Simulation, num_commits: int) -> None:
    """`second` goes on after `num_commits` commits of `first`, to the end: together they are what one process does."""
    await second.finish()
    assert min(record.step for record in second.commits.values()) + 1 == num_commits
    second.commits = {**{step: r for step, r in first.commits.items() if step < num_commits}, **second.commits}
    check(second, lineages=True)
    await second.close()


def ledger(node: Node, step: int) -> set[int]:
    """Tickets in a stage peer's accumulator of `step`."""
    assert isinstance(node.peer, StagePeer)
    state = node.peer.member.steps.get(step)
    return set() if state is None else set(state.accumulator.ledger.entries)


def node_at(simulation: Simulation, address: Address) -> Node:
    """The node that serves at `address`."""
    return next(node for node in simulation.nodes.values() if node.address == address)


def node_of(simulation: Simulation, member: m.Member) -> Node:
    """The node that is this member."""
    return node_at(simulation, Address(member.host, member.port))


def coordinator_of(simulation: Simulation) -> Node:
    """Who coordinates now, with the highest ballot if there are two."""
    leading = [(found.ballot, name) for name, node in simulation.nodes.items() if (found := simulation.coordinator_at(node))]
    assert leading, "nobody coordinates"
    return simulation.nodes[max(leading)[1]]
