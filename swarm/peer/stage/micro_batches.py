"""Serves `train` requests at a stage peer: forward, the next hop, backward, accumulate, answer with the input gradient.

One nested request carries the round trip (docs/design.md, "The life of a micro-batch"). Must not know how steps end.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field

from swarm.base.errors import ConfigError
from swarm.lifecycle.micro_batch import MICRO_BATCH
from swarm.lifecycle.step import LedgerEntry
from swarm.net.transport import Progress
from swarm.peer.hop import HopResult, call_stage
from swarm.peer.link import Refuse
from swarm.peer.stage.claims_client import ClaimsClient
from swarm.peer.stage.committed_state import CommittedState
from swarm.peer.stage.load import LoadMeter
from swarm.peer.stage.membership import Membership
from swarm.peer.stage.stage_context import StageContext
from swarm.peer.stage.stage_member import StageMember
from swarm.policy.job_times import RECOMPUTATION
from swarm.stage.accumulator import Accumulator
from swarm.stage.compute import Activation
from swarm.stage.device import Added, CodedTensors, Device, DeviceTime, HostNumbers, Outgoing, kind_of
from swarm.stage.executor import Priority
from swarm.stage.memory_budget import MemoryBudget, Reservation
from swarm.stage.module import Tensors, is_too_large
from swarm.stage.norms import finite, gradient_norms, norm_of
from swarm.stage.versions import Version
from swarm.wire import messages as m
from swarm.wire.compression import CODECS
from swarm.wire.framing import Frame

logger = logging.getLogger(__name__)

#: The last stage has so many micro-batches between the beginning of their forward and the end of their backward. Two are enough:
#: while the backward of one is on its way to the compute thread, the forward of the other keeps that busy.
GRAPHS_OF_LAST_STAGE = 2


@dataclass
class _Work:
    """One request on its way through this peer."""

    message: m.Train
    frame: Frame
    reserved: Reservation
    phase: str = MICRO_BATCH.initial
    queue_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    transfer_s: float = 0.0
    num_bytes: int = 0
    #: What the trainer asked to be told: by the names of `Norms`, on the device.
    norms: Tensors = field(default_factory=dict)

    def transition(self, event: str) -> None:
        self.phase = MICRO_BATCH.next(self.phase, event)

    def end(self, event: str) -> None:
        if MICRO_BATCH.allows(self.phase, event):
            self.transition(event)


class MicroBatchServer:
    """Serves `Train` for one stage."""

    def __init__(
        self,
        context: StageContext,
        committed: CommittedState,
        member: StageMember,
        membership: Membership,
        *,
        budget: MemoryBudget,
        device: Device,
        meter: LoadMeter,
    ) -> None:
        self._context = context
        self._committed = committed
        self._member = member
        self._membership = membership
        self._claims = ClaimsClient(context, member)
        self._budget = budget
        self._device = device
        self._meter = meter
        self._compute = context.compute
        self._executor = context.executor
        #: Largest shapes of what has not the samples as its first dimension.
        self._declared = self._compute.declared(context.config.micro_batch_size, context.config.sequence_length)
        self._codec = CODECS[context.config.compression]
        #: Entered by a micro-batch from its forward to its backward. Elsewhere the budget counts autograd graphs.
        self._room: AbstractAsyncContextManager[None] = nullcontext()
        if self._compute.last:
            self._room = asyncio.Semaphore(GRAPHS_OF_LAST_STAGE)
        #: The requests that have ended, by their last phase.
        self.phases: Counter[str] = Counter()
        self.in_flight = 0
        self.recomputed = 0
        #: What a micro-batch holds for the next stage until that has answered, as the last one did.
        self._sent_bytes = 0
        context.link.register(m.Train, self._on_train)

    async def _on_train(self, message: m.Train, frame: Frame, progress: Progress) -> Frame:
        context, committed, member = self._context, self._committed, self._member
        context.require_stage(message.stage)
        member.at_work.follow(progress, waits_s=context.config.timing.stall_s)
        await self._taken_up()
        if not self._membership.serving:
            raise Refuse("busy", "this peer is not serving now")
        if len(message.route) != context.config.num_stages - message.stage:
            raise Refuse("bad_request", "the route does not lead to the last stage")
        if self._compute.last and not any(spec.role == "label" for spec in message.tensors):
            raise Refuse("bad_request", "labels are missing")
        self._require_fitting(message)
        if why := member.at_work.overdue():
            raise Refuse("busy", why)
        version = await self._version(message)
        if message.mode == "train" and committed.hands_over(message.ticket.step):
            raise Refuse("busy", "this peer moves to another stage")
        if not self._membership.serving:  # it may have begun to leave while the request waited for its version
            raise Refuse("busy", "this peer is not serving any more")
        work = _Work(message, frame, Reservation(self._budget))
        has_room = work.reserved.add(frame.body_bytes)
        if not has_room or not (work.reserved.add(self._sent_bytes) or self.in_flight == 0):
            work.reserved.end()
            raise Refuse("busy", f"{self._budget.used_bytes} of {self._budget.limit_bytes} bytes are in use")
        self.in_flight += 1
        try:
            if message.mode == "eval":
                return await self._evaluate(work, version, progress)
            return await self._train(work, version, progress)
        except asyncio.CancelledError:
            work.end("cancel")
            raise
        except (ConfigError, RuntimeError, MemoryError) as error:  # torch reports shapes, devices and memory as the latter
            if isinstance(error, ConfigError):  # the model does what no peer can serve
                self._context.tasks.fail(error)
            else:
                logger.warning("ticket %s failed in phase %s: %s", tuple(message.ticket), work.phase, error)
            raise Refuse("failed", f"{type(error).__name__}: {error}"[:500]) from error
        finally:
            work.end("fail")
            self.phases[work.phase] += 1
            self.in_flight -= 1
            work.reserved.end()

    def _require_fitting(self, message: m.Train) -> None:
        """Refuse what is no micro-batch of this run, before anything is computed or claimed for it."""
        config = self._context.config
        step, index = message.ticket
        count = config.tickets_per_step if message.mode == "train" else max(1, config.eval_tickets)
        if not (0 <= index < count and 0 <= step <= config.total_steps):
            raise Refuse("bad_request", f"ticket {(step, index)} is none of this run")
        for spec in message.tensors:
            if is_too_large(
                spec.name,
                spec.shape,
                self._declared,
                is_floating=not spec.dtype.startswith(("int", "uint", "bool")),
                num_samples=config.micro_batch_size,
                sequence_length=config.sequence_length,
            ):
                raise Refuse("bad_request", f"{spec.name} of shape {spec.shape[:4]} is larger than a micro-batch of this run")

    async def _taken_up(self) -> None:
        """Wait until a peer that the newest record lists for the first time serves; for a while at most."""
        loop = asyncio.get_running_loop()
        until = loop.time() + min(2.0, self._context.config.timing.request_s)
        while self._membership.coming and (loop.time() < until or self._committed.is_applying):  # noqa: ASYNC110
            await asyncio.sleep(0.02)

    async def _version(self, message: m.Train) -> Version:
        """Return the version that the request names; a commit that is just being applied is waited for."""
        context, committed = self._context, self._committed
        loop = asyncio.get_running_loop()
        until = loop.time() + min(2.0, context.config.timing.request_s)
        while True:
            version = committed.versions.get(message.version_id)
            if version is not None and (committed.up_to_date or context.config.delay_steps):
                base = context.config.base_step(message.ticket.step)
                if message.mode == "train" and version.num_commits != base:
                    raise Refuse("bad_request", f"step {message.ticket.step} does not build on this version")
                return version
            if committed.is_copying:
                raise Refuse("busy", "this peer copies the average of the last step")
            if message.ticket.step < committed.num_commits:
                raise Refuse("ahead", f"{committed.num_commits} steps have committed", record=committed.record)
            try:
                async with asyncio.timeout_at(until):
                    async with committed.taken_over:
                        await committed.taken_over.wait()
            except TimeoutError:
                if committed.is_applying:  # behind a long job perhaps: the caller follows that
                    until = loop.time() + context.config.timing.request_s
                    continue
                raise Refuse("behind", f"this peer is at step {committed.num_commits}", record=committed.record) from None

    # ------------------------------------------------------------------------------------------------ training

    async def _train(self, work: _Work, version: Version, progress: Progress) -> Frame:
        message, context, member = work.message, self._context, self._member
        step, index = message.ticket
        state = member.step_state(step)
        loop = asyncio.get_running_loop()
        claim, request_s = self._claims.request(step, index), context.config.timing.request_s
        if self._compute.last:  # no time downstream hides this wait, and an autograd graph would be held meanwhile
            await asyncio.wait([claim], timeout=request_s)
        came_at = loop.time()
        async with self._room:
            work.queue_s = loop.time() - came_at
            work.transition("forward")
            forward = await self._executor.run(
                lambda: self._forward_job(work, state.accumulator.version_for(version, index)), Priority.FORWARD
            )
            activation, sent, forward_time = forward.value
            work.queue_s += forward.queue_s
            work.transition("sent")
            below: HopResult | None = None
            if not self._compute.last:  # the last stage goes on without waiting for its device
                with member.at_work.beside("forward"):
                    await self._device.complete(sent, forward_time)
                self._sent_bytes = sum(spec.num_bytes for spec, _ in sent.payload)
                below = await self._downstream(work, sent.payload, progress)
                await asyncio.wait([claim], timeout=request_s)
            work.transition("gradient")
            kind = "backward" if activation.inputs else RECOMPUTATION
            backward = await self._executor.run(
                lambda: self._backward_job(work, activation, below, state.accumulator), Priority.BACKWARD, kind
            )
        answer, added, told, backward_time = backward.value
        with member.at_work.beside(kind):
            await self._device.complete(sent, forward_time, answer, added, told, backward_time)
        work.forward_s = forward.run_s if forward_time.seconds is None else forward_time.seconds
        work.backward_s = backward.run_s if backward_time.seconds is None else backward_time.seconds
        if forward_time.seconds is not None:  # the compute thread has only told its device what to do
            self._executor.times.note("forward", work.forward_s)
            self._executor.times.note(kind, work.backward_s)
        work.queue_s += backward.queue_s
        self._note(work, sent.payload, below, answer.payload)
        verdict = added.verdict
        tokens, loss_sum = added.entry.tokens, added.entry.loss_sum
        if below is not None:
            tokens, loss_sum = below.trained.tokens, below.trained.loss_sum
        work.transition("pass" if verdict == "denied" else "accumulate")
        self.recomputed += activation.recomputed
        hop = m.Hop(
            stage=message.stage,
            peer=context.me.peer,
            accumulated=verdict != "denied",
            queue_s=work.queue_s,
            forward_s=work.forward_s,
            backward_s=work.backward_s,
            transfer_s=work.transfer_s,
            num_bytes=work.num_bytes,
            moving_s=work.frame.arrival_s,
            recomputed=activation.recomputed,
            norms=m.Norms(**finite(told.values)) if told.values else None,
            computed_on=kind_of(self._compute.device) if message.with_norms else None,
        )
        return self._reply(hop, below, tokens, loss_sum, answer.payload, overflow=verdict == "overflow")

    def _note(self, work: _Work, outputs: CodedTensors, below: HopResult | None, answer: CodedTensors) -> None:
        received = work.frame.body_bytes + (below.frame.body_bytes if below is not None else 0)
        sent = sum(spec.num_bytes for spec, _ in [*outputs, *answer])
        self._meter.ticket(busy_s=work.forward_s + work.backward_s, queue_s=work.queue_s, num_bytes=max(received, sent))

    def _forward_job(self, work: _Work, version: Version) -> tuple[Activation, Outgoing, DeviceTime]:
        compute, device = self._compute, self._device
        device.begin()
        inputs = device.receive(work.frame, "input")
        labels = device.receive(work.frame, "label") if compute.last else None
        estimate = compute.graph_bytes_like(inputs) + sum(tensor.nbytes for tensor in inputs.values())
        keep = compute.last or self._budget.used_bytes + estimate <= self._budget.limit_bytes
        if keep and compute.try_graphs(version, inputs, labels):
            device.begin()  # that time is no measure of this peer's speed
        activation = compute.forward(version, work.message.ticket, inputs, labels, keep_graph=keep)
        if keep and not compute.last:
            keep = work.reserved.add(activation.graph_bytes + activation.input_bytes)
        outputs = {} if compute.last else activation.outputs or {}
        if work.message.with_norms and (norm := norm_of(outputs.values())) is not None:
            work.norms["output"] = norm
        sent = device.send({name: t.detach() for name, t in outputs.items()}, self._codec, "input")
        if not keep:  # what came over the wire stays, in its few bits
            activation.drop()
        return activation, sent, device.end()

    def _backward_job(
        self, work: _Work, activation: Activation, below: HopResult | None, accumulator: Accumulator
    ) -> tuple[Outgoing, Added, HostNumbers, DeviceTime]:
        """Do backward, claim, ledger and sum as one job: nothing comes between them."""
        device = self._device
        device.begin()
        if not activation.inputs:
            activation.take(device.receive(work.frame, "input"), None)
        entry: LedgerEntry | Tensors
        if below is None:
            gradients, entry = None, activation.outputs or {}
        else:
            gradients, entry = device.receive(below.frame, "grad"), LedgerEntry(below.trained.tokens, 0.0)
        result = self._compute.backward(activation, gradients, tokens=0 if below is None else below.trained.tokens)
        answer = device.send(result.inputs, self._codec, "grad")
        loss_scale, with_norms = activation.version.record.loss_scale, bool(work.message.with_norms)
        added = device.add(
            accumulator,
            work.message.ticket.index,
            result.parameters,
            loss_scale=loss_scale,
            entry=entry,
            with_norm=with_norms,
            borrowed=result.borrowed,
        )
        if with_norms:
            work.norms |= gradient_norms(result.inputs, added.norm, loss_scale=loss_scale)
        return answer, added, device.tell(work.norms), device.end()

    async def _downstream(self, work: _Work, outputs: CodedTensors, progress: Progress) -> HopResult:
        message = work.message
        labels = [
            (spec, buffer) for spec, buffer in zip(message.tensors, work.frame.buffers, strict=True) if spec.role == "label"
        ]
        payload = [*outputs, *labels]
        tensors = tuple(spec for spec, _ in payload)

        def request(route: m.Route) -> m.Train:
            return m.Train(
                run=message.run,
                mode=message.mode,
                ticket=message.ticket,
                version_id=message.version_id,
                stage=message.stage + 1,
                route=route,
                tensors=tensors,
                with_norms=message.with_norms,
            )

        result = await call_stage(
            self._context.link,
            message.route[1:],
            request,
            [buffer for _, buffer in payload],
            stage=message.stage + 1,
            progress=progress,
        )
        work.transfer_s = result.transfer_s
        work.num_bytes = sum(spec.num_bytes for spec in tensors) + result.frame.body_bytes
        return result

    def _reply(
        self, hop: m.Hop, below: HopResult | None, tokens: int, loss_sum: float, payload: CodedTensors, *, overflow: bool = False
    ) -> Frame:
        hops: tuple[m.Hop, ...] = (hop,)
        if below is not None:
            failed = tuple((member.peer, reason) for member, reason, _ in below.failed)
            stalled = tuple(member.peer for member, _, waited_s in below.failed if waited_s)
            first, *rest = below.trained.hops
            hops = (hop, first.model_copy(update={"failed": failed, "stalled": stalled, "moving_s": below.moving_s}), *rest)
            overflow = overflow or below.trained.overflow
        reply = m.Trained(hops=hops, loss_sum=loss_sum, tokens=tokens, overflow=overflow, tensors=tuple(s for s, _ in payload))
        return Frame(reply, tuple(b for _, b in payload))

    # ------------------------------------------------------------------------------------------------ evaluation

    async def _evaluate(self, work: _Work, version: Version, progress: Progress) -> Frame:
        compute = self._compute

        def job() -> tuple[Outgoing, int, float]:
            device = self._device
            inputs = device.receive(work.frame, "input")
            labels = device.receive(work.frame, "label") if compute.last else None
            outputs = compute.evaluate(version, inputs, labels)
            if compute.last:
                return device.send({}, self._codec, "input"), int(outputs["tokens"]), float(outputs["loss_sum"])
            return device.send(outputs, self._codec, "input"), 0, 0.0

        work.transition("forward")
        outcome = await self._executor.run(job, Priority.EVALUATION)
        sent, tokens, loss_sum = outcome.value
        below: HopResult | None = None
        if not compute.last:
            await self._device.complete(sent)
            below = await self._downstream(work, sent.payload, progress)
            tokens, loss_sum = below.trained.tokens, below.trained.loss_sum
        if not math.isfinite(loss_sum):
            raise Refuse("failed", "the loss is not finite")
        work.transition("evaluated")
        hop = m.Hop(
            stage=work.message.stage,
            peer=self._context.me.peer,
            accumulated=False,
            queue_s=outcome.queue_s,
            forward_s=outcome.run_s,
        )
        return self._reply(hop, below, tokens, loss_sum, [])
