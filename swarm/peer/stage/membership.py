"""How a stage peer becomes, stays and stops being a member: joins, downloads state, catches up, announces itself.

Owns the peer's life (`lifecycle/peer.py`). A peer that a record leaves out, or that cannot follow a record, starts
again from a snapshot: it never serves a state that others did not agree on. Left out, it keeps what it has until another is seen
to hold it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from swarm.base.errors import LinkError, RemoteError
from swarm.base.ids import Ticket
from swarm.lifecycle.peer import PEER
from swarm.peer.announcing import find_coordinators, keep_announcing, record_of, withdraw
from swarm.peer.context import stage_key
from swarm.peer.link import Refuse, RefusedBy
from swarm.peer.stage.committed_state import CommittedState
from swarm.peer.stage.stage_context import StageContext
from swarm.peer.stage.stage_member import StageMember
from swarm.peer.stage.state_transfer import download
from swarm.peer.waiting import USUAL_WAITS, Lasting
from swarm.policy.liveness import Stillness
from swarm.wire import messages as m
from swarm.wire.peer_records import PeerRecord

logger = logging.getLogger(__name__)


class Membership:
    """Runs the loops that keep one stage peer a member."""

    def __init__(
        self, context: StageContext, committed: CommittedState, member: StageMember, on_move: Callable[[int], None]
    ) -> None:
        self._context = context
        self._committed = committed
        self._member = member
        self._link = context.link
        #: Told the stage to which this peer goes, once its old one can do without it.
        self._on_move = on_move
        self.state = PEER.initial
        self._poke = asyncio.Event()
        #: The coordinator that last answered; a hint for people, since there may be two.
        self.answered_by: m.Member | None = None
        #: The first record that no longer listed this peer at its stage.
        self._gone_since: m.CommitRecord | None = None
        #: A record left this peer out: its state may be wrong, or the only one. It is kept for a set-back alone, until another
        #: member is seen to hold it.
        self._left_out = False
        #: Why downloads fail, and what the run waits for, while this peer is no full member.
        self._failing, self._waiting = Lasting(), Lasting()
        #: What the run waits for, as far as this peer heard; "" while it goes on.
        self.waiting_for = ""
        self._stillness: Stillness | None = None

    def note(self, record: m.CommitRecord) -> None:
        """Look now what `record`, which has been taken over, asks of this peer."""
        self._poke.set()

    @property
    def serving(self) -> bool:
        """This peer takes micro-batches."""
        return self.state == "serving"

    @property
    def coming(self) -> bool:
        """This peer has a state and serves in a moment: others may have heard before it that a record lists it."""
        has_state = self._committed.record is not None and self._committed.has_state and not self._left_out
        return self.state in ("waiting", "syncing") and has_state

    def drain(self) -> None:
        """Take nothing new from here on: this peer goes."""
        self._transition("drain")
        self._poke.set()

    def _transition(self, event: str) -> None:
        before, self.state = self.state, PEER.next(self.state, event)
        if before != self.state:
            logger.info("stage %d peer: %s -> %s", self._context.stage, before, self.state)

    # ------------------------------------------------------------------------------------------------ announcing

    async def announce_loop(self) -> None:
        """Renew this peer's record in the DHT."""
        await keep_announcing(self._link, stage_key(self._link.context.run, self._context.stage), self._record)

    def _record(self) -> PeerRecord:
        stage, step = self._context.stage, self._committed.num_commits
        return record_of(self._link.context, "stage", stage=stage, step=step, state=self.state)

    async def withdraw(self) -> None:
        """Say in the DHT that this peer goes; the loops have ended."""
        await withdraw(self._link, stage_key(self._link.context.run, self._context.stage), self._record)

    # ------------------------------------------------------------------------------------------------ joining

    async def join_loop(self) -> None:
        """Follow the records; ask to be listed while no record lists this peer (or lists it as not ready)."""
        timing = self._link.context.config.timing
        while True:
            self._poke.clear()
            await self._follow()
            listed = self._committed.listed()
            wanted = self.state in ("waiting", "syncing") or (listed is not None and not listed.ready)
            if wanted and self.state != "draining":
                _, self.waiting_for = await self._ask_to_join()
                is_over = self.waiting_for.startswith("nothing:")
                usual = self.waiting_for.startswith(USUAL_WAITS) and not is_over
                if self._waiting.note_news("" if usual else self.waiting_for):
                    what = self.waiting_for.removeprefix("nothing: ") if is_over else f"the run waits for {self.waiting_for}"
                    logger.info("stage %d: this peer is not listed yet; %s", self._context.stage, what)
            else:
                self._failing, self._waiting = Lasting(), Lasting()
                await self._look_whether_the_run_waits()
            try:
                # Pre-genesis and joining peers ask often; members wake up on records and look in rarely.
                async with asyncio.timeout(timing.request_s / 8 if wanted else timing.request_s):
                    await self._poke.wait()
            except TimeoutError:
                continue

    async def _look_whether_the_run_waits(self) -> None:
        """Tell the operator what the run waits for, if no step commits for long while nothing is asked of this member."""
        timing, now = self._link.context.config.timing, asyncio.get_running_loop().time()
        if self._stillness is None or not self._stillness.observe(self._committed.num_commits, now=now):
            self.waiting_for = ""
        self._stillness = self._stillness or Stillness(2 * timing.request_s, now)
        if not self._stillness.take_due(self._committed.num_commits, now=now):
            return
        waiting_for = await self._ask_what_the_run_waits_for()
        if waiting_for not in ("", self.waiting_for) and not waiting_for.startswith(USUAL_WAITS):
            logger.info("stage %d: the run waits for %s", self._context.stage, waiting_for)
        self.waiting_for = waiting_for

    async def _ask_what_the_run_waits_for(self) -> str:
        for address in await self._coordinators():
            reply = await self._link.status_of(address)
            if reply is not None and reply.ballot >= 0:
                return str(reply.detail.get("waiting_for", ""))
        return "a coordinator"

    async def _follow(self) -> None:
        """Do what the newest record asks of this peer."""
        committed = self._committed
        async with committed.settled():
            record = committed.record
            if record is not None:
                self._move_along(record)
        if record is not None and self._left_out:
            await self._let_go(record)
        elif record is not None and self.state == "moving":
            await self._hand_over(record)
        elif record is not None and self.state == "syncing":
            await self._synchronise(record)

    def _move_along(self, record: m.CommitRecord) -> None:
        """Move along the table after what the newest record says of this peer, which has taken it over."""
        committed, listed = self._committed, self._committed.listed()
        if listed is None:
            if committed.listed_elsewhere() is not None and PEER.allows(self.state, "moved"):
                self._transition("moved")
            elif PEER.allows(self.state, "excluded"):
                if self.state == "serving":
                    logger.warning("record of step %d no longer lists this peer: joining again", record.step)
                self._transition("excluded")
                # Being left out may mean that this peer's state is wrong: it downloads it anew, once another has it.
                self._left_out = self._left_out or committed.has_state
            return
        if self._left_out and not (listed.ready and committed.up_to_date):
            return
        self._left_out, self._gone_since = False, None
        if self.state in ("waiting", "moving"):
            self._transition("listed_ready" if listed.ready and committed.up_to_date else "listed")
        if self.state == "serving" and not committed.up_to_date:
            self._transition("fell_behind")
            self._transition("listed")
        if self.state == "syncing":
            if committed.up_to_date:
                self._transition("synced")
            else:
                committed.let_go()

    async def _hand_over(self, record: m.CommitRecord) -> None:
        """Go once a live member of the old stage is seen: this peer may be the last that holds its state."""
        target = self._committed.listed_elsewhere()
        if target is not None and await self._look_if_others_hold(record):
            self._on_move(target)

    async def _let_go(self, record: m.CommitRecord) -> None:
        """Drop the state that this peer was left out with, once another is seen to hold it, and download it anew."""
        if not await self._look_if_others_hold(record):
            return
        async with self._committed.settled():
            listed = self._committed.listed()
            if listed is not None and listed.ready and self._committed.up_to_date:
                return  # the run was set back to this state meanwhile
            self._committed.let_go()
            self._left_out = False
        self._poke.set()

    async def _look_if_others_hold(self, record: m.CommitRecord) -> bool:
        """Ask whether another member holds the state of this peer's stage at `record`, which does not list this peer there."""
        self._gone_since = first = self._gone_since or record
        others = [x for x in record.members[self._context.stage] if x.ready and x.key != self._context.me.key]
        if others and (record.era, record.step) > (first.era, first.step):
            return True  # the stage went on
        return any([await self._holds(x, record) for x in others])

    async def _holds(self, other: m.Member, record: m.CommitRecord) -> bool:
        reply = await self._link.status_of(other)
        return reply is not None and reply.member.key == other.key and reply.version_id == record.version_id

    async def _synchronise(self, record: m.CommitRecord) -> None:
        """Download a snapshot while averages queue, then apply those; retried by the loop if it fails."""
        context, committed = self._context, self._committed
        donors = [x for x in record.members[context.stage] if x.ready and x.key != context.me.key]
        self._link.context.rng.shuffle(donors)
        try:
            state = await download(context, donors, min_step=record.step)
        except (LinkError, RemoteError) as error:
            # Tried again twice a second, and after a restart it is soon well.
            level = logging.WARNING if self._failing.note_news(str(error)) else logging.DEBUG
            logger.log(level, "stage %d: %s", context.stage, error)
            await self._catch_up(donors)
            return
        async with committed.settled():
            if committed.has_state:
                return  # a state was restored meanwhile
            await committed.go_on_from(state)
        if committed.up_to_date:
            await committed.refresh_digest()
            self._transition("synced")
            logger.info("stage %d: state of step %d is complete", context.stage, committed.num_commits)

    async def _catch_up(self, donors: list[m.Member]) -> None:
        """Learn the newest record from anyone who has one."""
        for donor in donors:
            try:
                info, _ = await self._link.ask(donor, m.Hello(), m.RunInfo)
            except (LinkError, RemoteError):
                continue
            if info.record is not None:
                self._hear_of(info.record)
                return

    def _hear_of(self, record: m.CommitRecord) -> None:
        """Take over `record` if it is news: who was asked may lag behind this peer."""
        try:
            self._committed.learn(record)
        except Refuse as refuse:
            logger.debug("record of step %d not taken over: %s", record.step, refuse)

    async def _ask_to_join(self, *, leaving: bool = False, lost: Sequence[Ticket] = ()) -> tuple[bool, str]:
        """Return whether a coordinator heard it, and what the run waits for in its words."""
        context = self._link.context
        version_id = None if leaving else await self._held_version_id()
        request = m.Join(
            run=context.run,
            stage=self._context.stage,
            member=context.member(ready=version_id is not None),
            version_id=version_id,
            leaving=leaving,
            lost=tuple(lost),
        )
        waits = "a coordinator: no backbone or trainer answers"
        for address in await self._coordinators():
            try:
                joining, _ = await self._link.ask(address, request, m.Joining)
            except RefusedBy as refused:
                waits = "a coordinator: those who answer are not elected yet"
                if refused.refusal.record is not None:
                    self._hear_of(refused.refusal.record)
            except (LinkError, RemoteError) as error:
                logger.debug("join: %s: %s", address, error)
            else:
                self.answered_by = address
                return True, joining.waiting_for
        return False, waits

    async def _held_version_id(self) -> str | None:
        """Return the name of the version that this peer holds, if that is the newest."""
        committed = self._committed
        async with committed.settled():
            is_newest = committed.record is None or (committed.up_to_date and not self._left_out)
            return committed.held_version_id if is_newest else None

    async def _coordinators(self) -> list[m.Member]:
        known = [self._member.coordinator] if self._member.coordinator is not None else []
        found = await find_coordinators(self._link)
        return known + [x for x in found if not known or x.key != known[0].key]

    async def leave(self, lost: Sequence[Ticket] = ()) -> bool:
        """Tell the coordinator that this peer goes, so that the next record does not list it; True if it heard.

        `lost` are tickets whose gradients go with it, because no commit took them in time.
        """
        return (await self._ask_to_join(leaving=True, lost=lost))[0]
