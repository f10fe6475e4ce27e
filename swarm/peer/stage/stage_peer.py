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
from swarm.peer.stage.committed_state import CommittedState
from swarm.peer.stage.load import LoadMeter
from swarm.peer.stage.membership import Membership
from swarm.peer.stage.micro_batches import MicroBatchServer
from swarm.peer.stage.rounds import Rounds
from swarm.peer.stage.saved_states import OnChecked, SavedStates
from swarm.peer.stage.stage_context import BytesMoved, StageContext
from swarm.peer.stage.stage_leader import StageLeader
from swarm.peer.stage.stage_member import StageMember
from swarm.peer.stage.state_transfer import StateDonor
from swarm.peer.stage.step_state import MakeAccumulator, OpenSteps
from swarm.peer.stage.sum_copies import SumCopies
from swarm.stage.accumulator import Accumulator
from swarm.stage.compute import StageCompute
from swarm.stage.devices import device_of
from swarm.stage.executor import Priority, Threads
from swarm.stage.memory_budget import MemoryBudget
from swarm.stage.memory_plan import queued_sums
from swarm.stage.module import StageFactory, ties_of
from swarm.stage.optimizers.choice import optimizer_of
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
        on_checked: told of the checkpoints here once they were read; see `saved_states.py`.
        on_refused: told why a checkpoint could not be written.
        make_accumulator: makes the accumulator of a step, with the arguments of `Accumulator`.
    """

    def __init__(
        self,
        context: PeerContext,
        *,
        stage: int,
        factory: StageFactory,
        threads: Threads,
        machine: Machine,
        on_checked: OnChecked = lambda steps, damaged: None,
        on_refused: Callable[[StorageError], None] = lambda error: None,
        make_accumulator: MakeAccumulator = Accumulator,
    ) -> None:
        self.context = context
        self._factory = factory
        self._threads = threads
        self._machine = machine
        self._device = device_of(machine.device)
        if self._device.allocate is not None:
            context.transport.receive_into(self._device.allocate)
        self._budget = MemoryBudget(machine.memory_limit_bytes)
        self.link = Link(context)
        #: Called when this peer has taken up another stage.
        self.on_move: list[Callable[[], None]] = []
        self._on_checked = on_checked
        self._on_refused = on_refused
        self._make_accumulator = make_accumulator
        self.bytes_moved = BytesMoved()
        self._stopping = False
        self._told_end = False
        #: Others may know of this peer.
        self._is_known = False
        self._target: int | None = None
        self._woken = asyncio.Event()
        self._take_up(self._compute_of(stage))
        RunInfoServer(
            self.link,
            record=lambda: self.committed.record,
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

    def _take_up(self, compute: StageCompute, before: tuple[CommittedState, StageMember] | None = None) -> None:
        """Build all parts that serve one stage; from here on they answer, in the place of those of `before`."""
        self._tasks = Tasks()
        compute.show_progress(self._threads.compute)
        self.stage = compute.stage
        config, link, machine, state_dir = self.context.config, self.link, self._machine, self.context.state_dir
        optimizer = optimizer_of(
            config, compute.layout, dtype=compute.master_dtype, device=compute.device, offload=machine.offload_optimizer
        )
        self.stage_context = context = StageContext(link, compute, optimizer, self._threads, self._tasks, self.bytes_moved)
        steps = OpenSteps(context, self._make_accumulator)
        saved = SavedStates(context, state_dir, self._on_checked)
        max_queued = queued_sums(compute.layout.num_elements, config, self._budget.limit_bytes)
        self.committed = committed = CommittedState(context, steps, SumCopies(context, steps), saved, max_queued=max_queued)
        self._checkpoints = checkpoints = Checkpoints(context, committed, state_dir, self._on_refused)
        self.meter = LoadMeter(context, committed, machine.free_bytes, machine.flops_per_s)
        self.member = member = StageMember(context, committed, steps, self.meter, lambda: checkpoints.saved)
        if before is not None:
            committed.take_over_from(before[0])
            member.take_over_from(before[1])
        Rounds(context, committed, member, ties_of(self._factory, config.frozen))
        self.leader = StageLeader(context, committed, member)
        self.membership = Membership(context, committed, member, self._go_to)
        self.micro_batches = MicroBatchServer(
            context, committed, member, self.membership, budget=self._budget, device=self._device, meter=self.meter
        )
        StateDonor(context, committed)
        committed.on_commit.extend(
            (self._note_end, self.leader.forget, self.membership.note, saved.checkpoint_record.note, checkpoints.note)
        )

    def _note_end(self, record: m.CommitRecord) -> None:
        """Tell the operator once that the run does not need this peer; it stays for whoever needs the last state."""
        if record.step + 1 == self.context.config.total_steps and not self._told_end:
            self._told_end = True
            logger.info("the run is done; Ctrl-C to leave")
        elif is_stopped(record):
            logger.info("an operator stopped the run after step %d; Ctrl-C to leave", record.step + 1)

    def _status(self) -> m.StatusReply:
        context, committed, member, served = self.stage_context, self.committed, self.member, self.micro_batches
        return m.StatusReply(
            role="stage",
            member=self.context.member(),
            step=committed.num_commits,
            version_id=(committed.record and committed.held_version_id) or "",
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
                "parameters": context.compute.layout.num_trained,
                "upload_bytes_per_s": round(context.carries.upload.rate or 0),
                "download_bytes_per_s": round(context.carries.download.rate or 0),
                "bytes_sent": self.context.transport.carried()[0],
                "average_bytes_sent": self.bytes_moved.average_sent,
                "shares": self.leader.shares.reason,
                "auxiliaries": self.leader.shares.auxiliaries_reason,
                "state_bytes_sent": self.bytes_moved.state_sent,
                "state_bytes_received": self.bytes_moved.state_received,
                "state_digest": committed.state_digest[:16],
                **self.meter.told(),
                **member.at_work.told(),
                **self._device.memory_peaks(),
            },
            stages=committed.record.members if committed.record else (),
            stage=self.stage,
        )

    async def start(self) -> None:
        """Serve, join the DHT, prepare the module, and ask to be listed."""
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
        config = self.context.config
        self.stage_context.compute.warm_up(
            self.committed.versions.newest, num_samples=config.micro_batch_size, sequence_length=config.sequence_length
        )

    @property
    def _awaited(self) -> bool:
        """The next commit needs this peer: it is listed beside others, and has gradients of an open step or leads one.

        No step is open while the run is paused or stopped, and no record follows.
        """
        committed, member = self.committed, self.member
        record = committed.record
        if record is None or committed.listed() is None or record.order.paused or is_stopped(record):
            return False
        others = sum(x.ready for x in record.members[self.stage]) > 1
        return others and (bool(member.held_tickets()) or member.leads_stage())

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
        """Serve until `stop` is called.

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
        before, old = (self.committed, self.member), self.stage_context
        logger.info("moving from stage %d to stage %d", self.stage, stage)
        # Built by the compute thread: building draws random numbers, and its jobs rely on theirs.
        compute = (await self._threads.compute.run(lambda: self._compute_of(stage), Priority.CONTROL)).value
        await self._checkpoints.written()
        self._take_up(compute, before)
        await old.tasks.close()
        await self._threads.compute.run(old.compute.let_go, Priority.CONTROL)
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
            self.committed.num_commits,
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
