"""What must hold after every turn of the event loop, and the loop that asks.

Two kinds of truth are kept apart here. A ticket *may* lie in two ledgers for a while: a member that its leader could not
reach is excluded, and its tickets go to others. But then the leader's book, once it has collected the ledgers, must count
at most one of them. And nobody waits for an answer beyond the stall time in which nothing moved.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from swarm.net.transport import Progress
from swarm.peer.stage.committed_state import CommittedState
from swarm.peer.stage.stage_peer import StagePeer
from swarm.testing.virtual_time import VirtualTimeLoop
from swarm.wire.messages import CommitRecord

if TYPE_CHECKING:
    from swarm.testing.simulation.nodes import Nodes

T = TypeVar("T")

#: Beyond the stall time and the time to connect, what scheduling and a slow link's pieces may take.
SLACK_S = 1.0
#: Virtual seconds between looks at the requests under way.
LOOK_S = 0.5


class InvariantBroken(AssertionError):
    """Something that must hold at every moment did not."""


class CheckedLoop(VirtualTimeLoop):
    """Virtual time, with `checks` called after every turn; the first that fails ends the run."""

    def __init__(self, seed: int = 0, *, late_s: float = 0.0) -> None:
        super().__init__(seed, late_s=late_s)
        self.checks: list[Callable[[], None]] = []

    def _run_once(self) -> None:
        super()._run_once()
        try:
            for check in self.checks:
                check()
        except BaseException:
            self.checks.clear()  # what follows is only the end of the tasks
            raise


def run_checked(main: Coroutine[Any, Any, T], *, seed: int = 0, late_s: float = 0.0) -> T:
    """As `run_virtual`, with the invariants of every `Simulation` that `main` makes."""
    with asyncio.Runner(loop_factory=lambda: CheckedLoop(seed, late_s=late_s)) as runner:
        return runner.run(main)


class WatchedProgress(Progress):
    """Counts for the caller, and remembers when it last did."""

    def __init__(self, counted: Progress | None, now: float) -> None:
        super().__init__(counted.remote if counted is not None else "", among=counted)
        self._counted = counted
        self.advanced_at = now

    def advance(self, amount: int = 1) -> None:
        """Count for the caller, and remember when."""
        super().advance(amount)
        self.advanced_at = asyncio.get_running_loop().time()
        if self._counted is not None:
            self._counted.advance(amount)


class Invariants:
    """The invariants of one simulation; `ledgers_changed` is set by everything that may write one."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._look_at = 0.0
        self.ledgers_changed = False
        #: Of each member: the head of the state that it held when it had taken over a record that listed it as ready.
        self._held: dict[CommittedState, str] = {}

    def note_taken_over(self, peer: StagePeer, record: CommitRecord) -> None:
        """A member has just taken over `record`: if it held the state that this builds on, it must hold one still.

        Raises:
            InvariantBroken: it let its state go, though it may have been the only one who had it.
        """
        me, committed = peer.stage_context.me, peer.committed
        ready = any(x.key == me.key and x.ready for x in record.members[peer.stage])
        held = self._held.pop(committed, "")
        if held and record.previous_version_id == held and ready and not committed.has_state:
            self._broken(f"stage {peer.stage}: {me.peer[:8]} let go the state that step {record.step} builds on")
        if ready and committed.has_state:
            self._held[committed] = committed.versions.newest.version_id

    def check(self) -> None:
        """Look at everything that may have changed.

        Raises:
            InvariantBroken: saying what, where and when.
        """
        if self.ledgers_changed:
            self.ledgers_changed = False
            self._check_ledgers()
        now = asyncio.get_running_loop().time() if self._nodes.open_calls else 0.0
        if now >= self._look_at:
            self._look_at = now + LOOK_S
            self._check_requests(now)

    def _check_ledgers(self) -> None:
        holders: dict[tuple[int, int, int], list[StagePeer]] = {}
        for peer in self._nodes.stage_peers():
            for step, state in peer.member.steps.items():
                ledger = state.accumulator.ledger
                both = ledger.overflow.intersection(ledger.entries)
                if both:
                    self._broken(f"step {step}: {sorted(both)} are in a ledger and its overflow at stage {peer.stage}")
                for index in ledger.entries:
                    holders.setdefault((peer.stage, step, index), []).append(peer)
        for (stage, step, index), peers in holders.items():
            if len(peers) > 1:
                self._check_twice(stage, step, index, peers)

    def _check_twice(self, stage: int, step: int, index: int, holders: list[StagePeer]) -> None:
        """Several live members hold one ticket: the newest book must count one of them at most."""
        eras = {p: p.committed.record.era if p.committed.record is not None else 0 for p in self._nodes.stage_peers(stage)}
        newest = [p for p, era in eras.items() if era == max(eras.values())]  # ledgers from before a set-back count no more
        books = [p.leader._books[step] for p in newest if step in p.leader._books]
        if any(peer.committed.num_commits > step for peer in self._nodes.stage_peers()):
            return  # decided: what ledgers hold of it counts no more, and its books are closed one after the other
        if not books:
            return  # the leader is gone: nobody grants, and the next one collects first
        book = max(books, key=lambda x: x.attempt.order)
        ledgers = [p.member.steps[step].accumulator.ledger for p in holders if p in newest]
        collected = max((x.attempt.order for x in ledgers), default=book.attempt.order)
        if not book.is_collected or collected > book.attempt.order:
            return  # what is left is the book of a leader that a record left out: nobody grants, as above
        members = {p: p.stage_context.me for p in holders if p in newest}
        counted = [me for me in members.values() if me.key in book.members and me.key not in book.excluded]
        if len(counted) > 1:
            names = [me.peer[:8] for me in counted]
            self._broken(
                f"stage {stage}: ticket {(step, index)} is in the ledgers of {names}, none excluded at {book.attempt.order}"
            )

    def _check_requests(self, now: float) -> None:
        nodes = self._nodes
        connect_s = nodes.config.timing.connect_s
        for call in list(nodes.open_calls):
            if nodes.network.is_paused(call.source):
                call.progress.advanced_at = now  # a stopped process waits for nothing
            waited = now - call.progress.advanced_at
            if waited > call.stall_s + connect_s + SLACK_S:
                name = type(call.message).__name__
                self._broken(f"{name} to {call.target} has not advanced for {waited:.1f} s")

    def _broken(self, what: str) -> None:
        raise InvariantBroken(f"at {asyncio.get_running_loop().time():.3f} s: {what}")
