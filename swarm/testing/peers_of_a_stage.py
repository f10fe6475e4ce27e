"""Peers of one stage that holds the whole model, in one process: their accumulators, compressors and rounds, and no others.

What a way to average costs in loss and bytes shows here in a moment. Micro-batches go to the peers in turn, one at a time.
Knows nothing of links, claims or records; `tests/sim` has those.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import torch

from swarm.averaging.all_reduce import PhaseExchange, Round, StageSum
from swarm.averaging.compressors.choice import compressor_of
from swarm.averaging.compressors.interface import Contribution
from swarm.averaging.local_updates import LocalAccumulator, OwnCopy
from swarm.averaging.reduction import CodedChunk
from swarm.base.config import RunConfig
from swarm.base.ids import ZERO_BALLOT, Ticket
from swarm.lifecycle.commit_record import clip_coefficient, genesis_record
from swarm.lifecycle.step import LedgerEntry
from swarm.peer.trainer.reports import FeedLike
from swarm.policy.schedule import learning_rate
from swarm.stage.accumulator import Accumulator
from swarm.stage.layout import Layout
from swarm.stage.optimizers.choice import inner_optimizer_of, optimizer_of
from swarm.stage.versions import Version, make_version
from swarm.testing.virtual_time import run_virtual
from swarm.wire.messages import Attempt, Member, Seal

_ATTEMPT = Attempt(n=1)


@dataclass
class Step:
    """What one step came to: the mean loss of its micro-batches, what was given to be summed, and the sum that all have."""

    loss: float
    given: torch.Tensor
    total: StageSum


class PeersOfAStage:
    """The peers of a run whose only stage is `model`.

    Args:
        config: of the run.
        model: anything that takes a batch's inputs and labels, and returns `loss_sum` and `tokens`.
        num_peers: to begin with.
    """

    def __init__(self, config: RunConfig, model: torch.nn.Module, num_peers: int) -> None:
        self.config = config
        self.model = model
        self.layout = Layout.of(model)
        self._optimizer = optimizer_of(config, self.layout, dtype=torch.float32, device="cpu")
        self._state = self._optimizer.moments.zero()
        parameters = [p for p in model.parameters() if p.requires_grad]
        masters = self.layout.flatten(parameters, dtype=torch.float32, device="cpu")
        record = genesis_record(config, "a" * 64, ZERO_BALLOT, ((),) * config.num_stages)
        #: What all share.
        self.version: Version = make_version(record, self.layout, masters, torch.float32)
        self.peers: list[OwnCopy] = []
        for _ in range(num_peers):
            self.join()
        #: Bytes of chunks that were sent, by all of them.
        self.bytes_sent = 0

    def join(self) -> None:
        """Add a peer, which has nothing of its own."""
        inner = inner_optimizer_of(self.config, self._optimizer)
        self.peers.append(OwnCopy(inner, torch.float32, compressor_of(self.config, self.layout)))

    def step(self, number: int, feed: FeedLike) -> Step:
        """Compute the tickets of one step, average, and update what all share."""
        accumulators = [self._accumulator(number, own) for own in self.peers]
        loss_sum, tokens = 0.0, 0
        for index in range(self.config.tickets_per_step):
            accumulator = accumulators[index % len(self.peers)]
            accumulator.ledger.grant(index, accumulator.ledger.attempt)
            entry, gradients = self._gradients(accumulator.version_for(self.version, index), feed, Ticket(number, index))
            accumulator.add(index, entry, gradients)
            loss_sum, tokens = loss_sum + entry.loss_sum, tokens + entry.tokens
        for accumulator in accumulators:
            accumulator.freeze(_ATTEMPT)
        contributions = [accumulator.contribution() for accumulator in accumulators]
        sums = run_virtual(self._average(number, accumulators, contributions))
        total = sums[0]
        assert len({x.digest for x in sums}) == 1, "replicas_identical"
        norm = float(torch.linalg.vector_norm(total.flat)) / tokens
        clip = clip_coefficient(norm, self.config.max_grad_norm) if self.config.mode == "sync" else 1.0
        masters, self._state = self._optimizer.update(
            self.version.masters,
            total.flat,
            self._state,
            step=number,
            learning_rate=learning_rate(self.config, number),
            factor=clip / tokens,
        )
        for own, accumulator, result in zip(self.peers, accumulators, sums, strict=True):
            own.compressor.adopt(result.state)
            if isinstance(accumulator, LocalAccumulator):
                accumulator.committed()
        self.version = make_version(self.version.record, self.layout, masters, torch.float32)
        given = torch.stack([x for x in contributions if x is not None]).sum(0)
        return Step(loss_sum / tokens, given, total)

    def trained_model(self) -> torch.nn.Module:
        """Return the model with the parameters that all share."""
        self._use(self.version)
        return self.model

    def loss_of(self, feed: FeedLike) -> float:
        """Return the mean loss per token of what all share, on the samples of an evaluation."""
        model = self.trained_model()
        with torch.no_grad():
            outputs = [model(_tensors(x.inputs), _tensors(x.labels)) for x in feed.eval_batches()]
        return sum(float(x["loss_sum"]) for x in outputs) / sum(int(x["tokens"]) for x in outputs)

    def _accumulator(self, step: int, own: OwnCopy) -> Accumulator:
        if self.config.mode == "local":
            return LocalAccumulator(step, own, dtype=torch.float32, device="cpu")
        return Accumulator(step, self.layout, dtype=torch.float32, device="cpu")

    def _use(self, version: Version) -> None:
        for name, parameter in self.model.named_parameters():
            if name in version.parameters:
                parameter.data = version.parameters[name].detach()

    def _gradients(self, version: Version, feed: FeedLike, ticket: Ticket) -> tuple[LedgerEntry, list[torch.Tensor | None]]:
        self._use(version)
        batch = feed.batch(ticket)
        outputs = self.model(_tensors(batch.inputs), _tensors(batch.labels))
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        gradients = torch.autograd.grad(outputs["loss_sum"], parameters, allow_unused=True)
        return LedgerEntry(int(outputs["tokens"]), float(outputs["loss_sum"].detach())), list(gradients)

    async def _average(
        self, step: int, accumulators: list[Accumulator], contributions: list[torch.Tensor | None]
    ) -> list[StageSum]:
        members = [Member(peer=f"{i:040x}", incarnation="0" * 16, host="localhost", port=1) for i in range(len(self.peers))]
        seals = [Seal(member=member, version_id=self.version.version_id) for member in members]
        tokens = tuple(sum(x.tokens for x in accumulator.ledger.entries.values()) for accumulator in accumulators)
        rounds: list[Round] = []
        for i, (own, contribution) in enumerate(zip(self.peers, contributions, strict=True)):
            compression = own.compressor.compress(Contribution(contribution, tokens, i, step))
            rounds.append(Round(_ATTEMPT, seals, members[i].key, compression, dtype=torch.float32))
        return list(await asyncio.gather(*(x.run(self._exchange_of(rounds, members[i])) for i, x in enumerate(rounds))))

    def _exchange_of(self, rounds: list[Round], me: Member) -> PhaseExchange:
        async def exchange(phase: int, j: int, number: int, part: CodedChunk | None) -> CodedChunk:
            reduced = await rounds[j].reduce(me, phase, number, part)
            self.bytes_sent += sum(memoryview(payload).nbytes for _, payload in (*([part] if part else []), reduced))
            return reduced

        return exchange


def _tensors(arrays: dict) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}
