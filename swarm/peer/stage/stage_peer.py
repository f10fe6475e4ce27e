"""A stage peer: composition root that builds its parts and owns every task. Decides nothing itself."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swarm.base.errors import StorageError, SwarmError
from swarm.base.ids import Ticket
from swarm.lifecycle.order import is_stopped
from swarm.peer.context import PeerContext
from swarm.peer.link import Link, Tasks
from swarm.peer.run_info import RunInfoServer
from swarm.peer.stage.checkpoints import Checkpoints
from swarm.peer.stage.claims_client import ClaimsClient
from swarm.peer.stage.load import LoadMeter
from swarm.peer.stage.membership import Membership
from swarm.peer.stage.micro_batches import MicroBatchServer
from swarm.peer.stage.restore import OnChecked, RestorePoints
from swarm.peer.stage.rounds import Rounds
from swarm.peer.stage.stage_leader import StageLeader
from swarm.peer.stage.stage_member import StageMember
from swarm.peer.stage.state_transfer import StateDonor
from swarm.stage.compute import StageCompute
from swarm.stage.device import device_of
from swarm.stage.executor import Priority, Threads
from swarm.stage.memory_budget import MemoryBudget
from swarm.stage.memory_plan import queued_sums
from swarm.stage.module import StageFactory, ties_of
from swarm.stage.optimizer import moments_for
from swarm.wire import messages as m

logger = logging.getLogger(__name__)

#: A peer that leaves waits so long, in seconds, for what is in flight and for the commit that takes its gradients.
DRAIN_S = 10.0
#: And at most so long each time that it tells the coordinator.
LEAVE_S = 3.0


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What of its machine a stage peer uses, and how."""

    #: Torch device of parameters and activations.
    device: str = "cpu"
    #: Bound of what in-flight micro-batches may hold.
    memory_limit_bytes: int = 2**30
    #: `torch.compile` the stage's blocks before it serves.
    compile: bool = False
    #: The optimizer's state stays in main memory; for a device that is not the CPU.
    offload_optimizer: bool = False
    #: Memory that is left now, for another stage's state; None where nobody can tell.
    free_bytes: Callable[[], int] | None = None
    #: Of the device in a short benchmark; 0 if not known.
    flops_per_s: float = 0.0


class StagePeer:
    """Serves one stage until stopped, or another one where the records move it.

    Args:
        context: who this peer is.
        stage: which stage it serves first.
        factory: builds the stage's module.
        threads: compute, and do what must not wait for that; closed with the peer.
        machine: computes.
    """

    def __init__(self, context: PeerContext, *, stage: int, factory: StageFactory, threads: Threads, machine: Machine) -> None:
        self.context = context
        self._factory = factory
        self._threads = threads
        self._machine = machine
        self._device = device_of(machine.device)
        if self._device.allocate is not None:
            context.transport.allocate = self._device.allocate
        self._budget = MemoryBudget(machine.memory_limit_bytes)
        self.link = Link(context)
        #: Called when this peer has taken up another stage.
        self.on_move: list[Callable[[], None]] = []
        #: Told of the checkpoints here once they were read; see `restore.py`.
        self.on_checked: OnChecked = lambda steps, damaged: None
        #: Told why a checkpoint could not be written.
        self.on_refused: Callable[[StorageError], None] = lambda error: None
        self._stopping = False
        self._told_end = False
        #: Others may know of this peer.
        self._is_known = False
        self._target: int | None = None
        self._woken = asyncio.Event()
        self._take_up(self._compute_of(stage))
        RunInfoServer(
            self.link,
            record=lambda: self.member.record,
            status=self._status,
            coordinator=lambda: self.member.coordinator or self.membership.answered_by,
        )

    def _compute_of(self, stage: int) -> StageCompute:
        config = self.context.config
        return StageCompute(
            self._factory,
            stage,
            precision=config.precision,
            seed=config.seed,
            device=self._machine.device,
            compile=self._machine.compile,
            frozen=config.frozen,
            budget=self._budget,
        )

    def _take_up(self, compute: StageCompute, before: StageMember | None = None) -> None:
        """Build all parts that serve one stage; from here on they answer, in the place of those of `before`."""
        self._tasks = Tasks()
        compute.show_progress(self._threads.compute)
        self.stage = stage = compute.stage
        moments = moments_for(
            self.context.config,
            compute.layout,
            dtype=compute.master_dtype,
            device=compute.device,
            offload=self._machine.offload_optimizer,
        )
        self.member = StageMember(self.link, stage, compute, moments, self._threads, self._tasks)
        self.member.max_queued = queued_sums(compute.layout.num_elements, self.context.config, self._budget.limit_bytes)
        self.member.on_commit.append(self._note_end)
        if before is not None:
            self.member.succeed(before)
        self.meter = LoadMeter(self.member, self._machine.free_bytes, self._machine.flops_per_s)
        Rounds(self.link, self.member, ties_of(self._factory, self.context.config.frozen))
        self.leader = StageLeader(self.link, self.member, self._tasks)
        self.membership = membership = Membership(self.link, self.member)
        membership.on_move = self._go_to
        claims = ClaimsClient(self.link, self.member, self._tasks)
        self.micro_batches = MicroBatchServer(self.link, self.member, claims, self._budget, self._device, self.meter)
        self.micro_batches.accepting, self.micro_batches.coming = lambda: membership.serving, lambda: membership.coming
        StateDonor(self.link, self.member)
        RestorePoints(self.link, self.member, self.context.state_dir, lambda *found: self.on_checked(*found))
        self._checkpoints = Checkpoints(
            self.link, self.member, self._tasks, self.context.state_dir, lambda error: self.on_refused(error)
        )

    def _note_end(self, record: m.CommitRecord) -> None:
        """The peer stays, for whoever needs the last state; its operator is told once that the run does not need it."""
        if record.step + 1 == self.context.config.total_steps and not self._told_end:
            self._told_end = True
            logger.info("the run is done; Ctrl-C to leave")
        elif is_stopped(record):
            logger.info("an operator stopped the run after step %d; Ctrl-C to leave", record.step + 1)

    def _status(self) -> m.StatusReply:
        member, served = self.member, self.micro_batches
        return m.StatusReply(
            role="stage",
            member=self.context.member(),
            step=member.num_commits,
            version_id=(member.record and member.held_head) or "",
            state=self.membership.state,
            detail={
                "stage": self.stage,
                "total_steps": self.context.config.total_steps,
                "waiting_for": self.membership.waiting_for[:200],
                "in_flight": served.in_flight,
                "accumulated": served.phases["accumulated"],
                "passed": served.phases["passed"],
                "failed": served.phases["failed"],
                "recomputed": served.recomputed,
                "busy_s": round(self.meter.busy_s, 3),
                "parameters": member.compute.layout.num_elements,
                "upload_bytes_per_s": round(member.carries.upload.rate or 0),
                "download_bytes_per_s": round(member.carries.download.rate or 0),
                "bytes_sent": self.context.transport.carried()[0],
                "average_bytes_sent": member.average_bytes_sent,
                "shares": self.leader.shares.reason,
                "auxiliaries": self.leader.shares.helpers_reason,
                "state_bytes_sent": member.state_bytes_sent,
                "state_bytes_received": member.state_bytes_received,
                "state_digest": member.state_digest[:16],
                **member.at_work.told(),
                **self._device.memory_peaks(),
            },
            stages=member.record.members if member.record else (),
            stage=self.stage,
        )

    async def start(self) -> None:
        await self.link.serve()
        await self.context.dht.start(self.context.bootstrap)
        await self._threads.compute.run(self._warm_up, Priority.CONTROL)
        self._start_loops()

    def _start_loops(self) -> None:
        self._is_known = True
        self._tasks.start(self.link.presence.keep_looking(), "looks", vital=True)
        self._tasks.start(self.membership.announce_loop(), "announce", vital=True)
        self._tasks.start(self.membership.join_loop(), "membership", vital=True)

    def _warm_up(self) -> None:
        config, member = self.context.config, self.member
        member.compute.warm_up(
            member.versions.newest, num_samples=config.micro_batch_size, sequence_length=config.sequence_length
        )

    @property
    def _awaited(self) -> bool:
        """A record still lists this peer beside others, and an open step has some of its gradients or is led by it.

        No step is open while the run is paused or stopped, and no record follows.
        """
        member = self.member
        if member.record is None or member.listed() is None or member.record.order.paused or is_stopped(member.record):
            return False
        others = sum(x.ready for x in member.record.members[self.stage]) > 1
        return others and (bool(member.held_tickets()) or member.leads())

    @property
    def is_saving(self) -> bool:
        """A checkpoint is being written, which takes as long as it is large."""
        return self._checkpoints.is_writing

    def stop(self) -> None:
        """End `run`; `close` then drains."""
        self._stopping = True
        self._woken.set()

    def _go_to(self, stage: int) -> None:
        self._target = stage
        self._woken.set()

    async def run(self) -> None:
        """Until `stop`.

        Raises:
            SwarmError: a part of the peer failed.
        """
        while not self._stopping:
            await self._tasks.until(self._woken)
            self._woken.clear()
            target, self._target = self._target, None
            if target is not None and not self._stopping:
                await self._move(target)

    async def _move(self, stage: int) -> None:
        """Take up another stage as a joiner. A move to the same stage is none: nothing is built and nothing downloaded."""
        if stage == self.stage:
            return
        before, tasks = self.member, self._tasks
        logger.info("moving from stage %d to stage %d", self.stage, stage)
        # Built by the compute thread: building draws random numbers, and its jobs rely on theirs.
        compute = (await self._threads.compute.run(lambda: self._compute_of(stage), Priority.CONTROL)).value
        await self._checkpoints.written()
        self._take_up(compute, before)
        await tasks.close()
        await self._threads.compute.run(before.compute.let_go, Priority.CONTROL)
        await self._threads.compute.run(self._warm_up, Priority.CONTROL)
        self._start_loops()
        for callback in self.on_move:
            callback()

    async def _leave(self, lost: Sequence[Ticket] = ()) -> bool:
        """Tell the coordinator; True if it heard."""
        try:
            async with asyncio.timeout(LEAVE_S):
                return await self.membership.leave(lost)
        except (SwarmError, TimeoutError):
            logger.info("left without telling the coordinator")
            return False

    async def close(self) -> None:
        """Take nothing new, finish what is in flight, contribute to the next commit, and go; all within a bound.

        What has committed is written meanwhile, by those who write checkpoints: all may be going, and that is waited for.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + DRAIN_S
        self.membership.drain()
        self._checkpoints.write_newest()
        told = self._is_known and await self._leave()
        while loop.time() < until and (self.micro_batches.in_flight or (told and self._awaited)):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        lost = self.member.held_tickets() if self._awaited else []
        if lost:
            await self._leave(lost)
        served = self.micro_batches.phases
        logger.info(
            "stage %d: leaving after step %d: %d tickets accumulated, %d passed on, %d failed, %d given back",
            self.stage,
            self.member.num_commits,
            served["accumulated"],
            served["passed"],
            served["failed"],
            len(lost),
        )
        self._checkpoints.write_newest()  # of a commit that came meanwhile
        await self._checkpoints.written()
        await self._tasks.close()
        if self._is_known:
            await self.membership.withdraw()
        self._threads.close()
        self._device.close()
        await self.context.dht.close()
        await self.context.transport.close()
