"""A backbone's help with averages: it reduces slices for any stage of its run, and holds only the chunks under way.

It has no replica and knows no model. A stage's leader asks before each attempt (`Assist`), which keeps memory for what the
attempt may need; then the attempt begins (`Reduce`) and the members send their chunks (`Slice`), each of which must be what
the leader said. An attempt replaces the one before of its stage. Decides nothing: leaders choose whom they let reduce, and
how much.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from swarm.averaging.reduction import Code, GroupVector, Reduction, RoundFailed, bytes_under_way
from swarm.net.transport import Progress
from swarm.peer.announcing import keep_announcing, record_of, withdraw
from swarm.peer.context import aggregator_key
from swarm.peer.link import Link, Refuse
from swarm.peer.link_meters import LinkMeters
from swarm.policy.bandwidth import Reach
from swarm.stage.executor import Executor, Priority
from swarm.wire import messages as m
from swarm.wire.framing import Frame
from swarm.wire.peer_records import PeerRecord

logger = logging.getLogger(__name__)

#: Sums are made in the masters' type.
_DTYPES = {"float32": torch.float32, "float64": torch.float64}
#: Members of all stages that are helped at once: each has a few requests open, of which a transport admits a thousand.
MAX_SENDERS = 128
#: The last sums have left this peer if nothing leaves it for so long, in seconds.
QUIET_S = 0.5


@dataclass(eq=False)
class _Attempt:
    """An attempt of one stage that this peer was asked to help with; it is over once `reduction` is."""

    step: int
    attempt: m.Attempt
    num_members: int
    vector: GroupVector
    dtype: torch.dtype
    #: That may be needed for it.
    num_bytes: int
    asked_at: float
    reduction: Reduction | None = None
    #: Set when `reduction` is made, or never will be.
    begun_or_over: asyncio.Event = field(default_factory=asyncio.Event)

    def may_begin(self, asked_after: float) -> bool:
        """Tell whether it has begun, or its leader asked a short while ago."""
        return self.reduction is not None or self.asked_at > asked_after

    def end(self, reason: str) -> None:
        """End the attempt: whoever waits is told now."""
        if self.reduction is not None:
            self.reduction.fail(RoundFailed(reason))
        self.begun_or_over.set()


class Aggregator:
    """Serves `Assist`, `Reduce` and `Slice`.

    Args:
        link: asks and is asked.
        executor: a thread of its own, which sums.
        limit_bytes: bound of what attempts may need together; it should be what the transport admits.
    """

    def __init__(self, link: Link, executor: Executor, *, limit_bytes: int) -> None:
        self._link = link
        self._timing = link.context.config.timing
        self._executor = executor
        self._limit_bytes = limit_bytes
        self._carries = LinkMeters(link.context.transport)
        self._reach = Reach()
        #: The newest of each stage that is not over.
        self._attempts: dict[int, _Attempt] = {}
        #: The last step in which each stage let this peer reduce.
        self._helped_at: dict[int, int] = {}
        self._num_attempts = 0
        self._leaving = False
        link.register(m.Assist, self._on_assist)
        link.register(m.Reduce, self._on_reduce)
        link.register(m.Slice, self._on_slice)

    # ------------------------------------------------------------------------------------------------ asked for help

    async def _on_assist(self, message: m.Assist, frame: Frame, progress: Progress) -> m.Assisting:
        if self._leaving:
            raise Refuse("busy", "this peer leaves")
        if message.stage >= self._link.context.config.num_stages:
            raise Refuse("wrong_stage", f"the run has {self._link.context.config.num_stages} stages")
        known = self._attempts.get(message.stage)
        if known is not None and message.attempt.order <= known.attempt.order:
            raise Refuse("wrong_state", f"attempt {known.attempt.order} has begun")
        attempt = self._attempt_of(message)
        now = asyncio.get_running_loop().time()
        for stage, other in list(self._attempts.items()):
            if stage == message.stage or not other.may_begin(now - self._timing.average_s):
                self._forget(stage, other, "a newer attempt began")
        self._make_room(attempt)
        self._attempts[message.stage] = attempt
        # All stages average at the same time, so that each has a share of the link.
        helped = {message.stage, *(stage for stage, step in self._helped_at.items() if step >= message.step - 1)}
        bandwidth = self._reach.tell(now)
        return m.Assisting(
            member=self._link.context.member(),
            bandwidth=bandwidth and bandwidth / len(helped),
            is_limit=self._reach.is_limit(now),
        )

    def _attempt_of(self, message: m.Assist) -> _Attempt:
        vector, code = message.vector, Code(message.vector.codec)
        dtype = _DTYPES.get(vector.dtype)
        if dtype is None or vector != code.spec(vector.num_elements, dtype) or vector.is_sparse:
            raise Refuse("bad_request", f"{vector.dtype} {vector.shape} in {vector.codec} is no average that is summed here")
        return _Attempt(
            message.step,
            message.attempt,
            message.num_members,
            GroupVector(vector.num_elements, None, code),
            dtype,
            num_bytes=bytes_under_way(code, vector.num_elements, dtype, message.num_members),
            asked_at=asyncio.get_running_loop().time(),
        )

    def _make_room(self, attempt: _Attempt) -> None:
        """Keep the invariant: all attempts together need no more than `limit_bytes`, and their members' requests are admitted."""
        others = self._attempts.values()
        num_bytes = attempt.num_bytes + sum(other.num_bytes for other in others)
        if num_bytes > self._limit_bytes:
            raise Refuse("busy", f"{num_bytes} bytes would be needed, the limit is {self._limit_bytes}")
        num_senders = attempt.num_members + sum(other.num_members for other in others)
        if num_senders > MAX_SENDERS:
            raise Refuse("busy", f"{num_senders} members would send their chunks, the limit is {MAX_SENDERS}")

    def _forget(self, stage: int, attempt: _Attempt, reason: str) -> None:
        attempt.end(reason)
        if self._attempts.get(stage) is attempt:
            del self._attempts[stage]

    # ------------------------------------------------------------------------------------------------ one attempt

    def _asked_for(self, message: m.Reduce | m.Slice) -> _Attempt:
        attempt = self._attempts.get(message.stage)
        if attempt is None or (attempt.step, attempt.attempt) != (message.step, message.attempt):
            raise Refuse("wrong_state", "this peer does not help with that attempt")
        return attempt

    async def _on_reduce(self, message: m.Reduce, frame: Frame, progress: Progress) -> m.Reduced:
        attempt = self._asked_for(message)
        if attempt.reduction is not None:
            raise Refuse("wrong_state", "this attempt has been started already")
        reduction = attempt.reduction = self._reduction_of(attempt, message)
        attempt.begun_or_over.set()
        self._helped_at[message.stage] = message.step
        self._num_attempts += 1
        progress.follow(self._movement_of(reduction))
        try:
            async with self._carries.measured():
                await self._all_reduced(reduction)
            if not self._carries.is_measuring:
                self._reach.heard(self._carries.upload, self._carries.download, asyncio.get_running_loop().time())
        except RoundFailed as failure:
            reduction.fail(failure)
            for fault in reduction.blamed.values():
                logger.error("step %d, stage %d: %s", message.step, message.stage, fault)
            return m.Reduced(suspects=failure.suspects, reason=str(failure)[:2000])
        finally:
            self._forget(message.stage, attempt, "the attempt is over")
        return m.Reduced()

    def _reduction_of(self, attempt: _Attempt, message: m.Reduce) -> Reduction:
        members = [*(seal.member for seal in message.seals), *message.auxiliaries]
        here = self._link.context.member().key
        me = next((i for i, member in enumerate(members) if member.key == here), -1)
        if me < len(message.seals):
            raise Refuse("not_member", "this peer is no auxiliary of that attempt")
        if len(message.seals) > attempt.num_members:
            raise Refuse("bad_request", f"{len(message.seals)} members, this peer was asked to help {attempt.num_members}")
        try:
            return Reduction(
                members,
                me,
                attempt.vector,
                dtype=attempt.dtype,
                slice_sizes=message.shares,
                num_auxiliaries=len(message.auxiliaries),
                run_job=self._run_job,
            )
        except ValueError as error:
            raise Refuse("bad_request", str(error)) from None

    async def _run_job(self, job: Callable[[], Any]) -> Any:
        return (await self._executor.run(job, Priority.CONTROL)).value

    def _movement_of(self, reduction: Reduction) -> Callable[[], int]:
        """Counts chunks, sums, and bytes on their way from and to members, of which the slowest may need long for a chunk."""
        served = self._link.context.transport.served
        return lambda: reduction.num_received + self._executor.finished + served.num_bytes

    async def _all_reduced(self, reduction: Reduction) -> None:
        """Wait until all chunks are reduced.

        Raises:
            RoundFailed: naming those whose chunks are missing, if nothing moves for a while. It ends before the members' own
                patience with this peer does.
        """
        loop, movement = asyncio.get_running_loop(), self._movement_of(reduction)
        timeout_s = max(self._timing.stall_s - 3 * self._timing.heartbeat_s, self._timing.stall_s / 2)
        reduced = asyncio.ensure_future(reduction.all_reduced())
        seen, moved_at = movement(), loop.time()
        try:
            while not (await asyncio.wait({reduced}, timeout=self._timing.heartbeat_s))[0]:
                if movement() != seen:
                    seen, moved_at = movement(), loop.time()
                elif loop.time() - moved_at >= timeout_s:
                    late = reduction.awaited
                    names = ", ".join(member.peer[:8] for member in late) or "anyone"
                    raise RoundFailed(f"no chunk of {names} came for {timeout_s:g} s", late)
            reduced.result()
        finally:
            reduced.cancel()

    async def _on_slice(self, message: m.Slice, frame: Frame, progress: Progress) -> Frame:
        attempt = self._asked_for(message)
        try:
            async with asyncio.timeout(self._timing.request_s):
                await attempt.begun_or_over.wait()  # the sender was told to start a moment before this peer
        except TimeoutError:
            raise Refuse("wrong_state", "this peer was not told to start") from None
        reduction = attempt.reduction
        if reduction is None:
            raise Refuse("wrong_state", "the attempt is over")
        index = next((i for i, member in enumerate(reduction.members) if member.key == message.member.key), None)
        if index is None:
            raise Refuse("not_member", "the sender is not sealed in this attempt")
        if message.phase:
            raise Refuse("bad_request", "auxiliaries help in one exchange")
        chunk = (message.tensors[0], frame.buffers[0]) if message.tensors else None
        progress.follow(self._movement_of(reduction))
        try:
            spec, buffer = await reduction.reduce(index, message.number, chunk)
        except RoundFailed as failure:
            raise Refuse("failed", str(failure)) from None
        except ValueError as error:
            raise Refuse("bad_request", str(error)) from None
        return Frame(m.ReducedSlice(tensors=(spec,)), (buffer,))

    # ------------------------------------------------------------------------------------------------ coming and going

    async def announce_loop(self) -> None:
        """Renew this peer's record in the DHT."""
        await keep_announcing(self._link, aggregator_key(self._link.context.run), self._record)

    def _record(self) -> PeerRecord:
        return record_of(self._link.context, "backbone")

    def status(self) -> dict[str, str | int | float | bool]:
        """Return what an operator wants to see."""
        return {
            "attempts_helped": self._num_attempts,
            "attempts_under_way": len(self._attempts),
            "upload_bytes_per_s": round(self._carries.upload.rate or 0),
            "download_bytes_per_s": round(self._carries.download.rate or 0),
        }

    async def retire(self, until: float) -> None:
        """Help with nothing new; what is under way ends first, and sums leave, until the loop's time `until`."""
        self._leaving = True
        loop, served = asyncio.get_running_loop(), self._link.context.transport.served
        num_served = -1
        while loop.time() < until and (self._is_asked or served.num_bytes != num_served):
            num_served = served.num_bytes
            await asyncio.sleep(QUIET_S)
        await withdraw(self._link, aggregator_key(self._link.context.run), self._record)

    @property
    def _is_asked(self) -> bool:
        asked_after = asyncio.get_running_loop().time() - self._timing.request_s
        return any(attempt.may_begin(asked_after) for attempt in self._attempts.values())

    def close(self) -> None:
        """End what is under way, and the thread."""
        for attempt in self._attempts.values():
            attempt.end("this peer leaves")
        self._executor.close()
