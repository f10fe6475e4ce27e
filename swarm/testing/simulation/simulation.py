"""A whole swarm in one process and in virtual time: the real peer code on the in-memory twins, with a small torch model.

`Simulation` starts peers (`nodes.py`), injects faults (`faults.py`), waits for the end and tells the outcome; `check` compares
that with the plain loop of `small_model`. Used by `tests/sim` and `benchmarks/faults/chaos.py`.
"""

from __future__ import annotations

import asyncio

import torch

from swarm.peer.stage.stage_peer import StagePeer
from swarm.peer.trainer.trainer import Trainer
from swarm.stage.module import Tie, ties_of
from swarm.testing.memory_transport import MemoryTransport
from swarm.testing.simulation.faults import Faults
from swarm.testing.simulation.small_model import PlainResult, one_process


class Simulation(Faults):
    """One run, from its start to its outcome."""

    async def began(self, *, within_s: float = 60.0) -> None:
        """Until some peer knows the genesis record."""
        async with asyncio.timeout(within_s):
            while not self.version_ids:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def finish(self, *, within_s: float = 600.0) -> None:
        """Until every trainer is done; fails if a peer did."""
        try:
            async with asyncio.timeout(within_s):
                while not self._all_done():  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise AssertionError(f"not finished within {within_s} s; {self.describe()}") from None
        await asyncio.sleep(2.0)  # the last record reaches everyone
        for node in self.nodes.values():
            if node.running is not None and node.running.done():
                node.running.result()
        # A peer of each stage holds what it made: some may hang still, and what was let go is noticed after a while.
        until = asyncio.get_running_loop().time() + 60.0 + self.config.timing.stage_lost_s
        while not all(self._holders(stage) for stage in range(self.config.num_stages)):
            assert asyncio.get_running_loop().time() < until, f"a stage has no holder of the last step; {self.describe()}"
            await asyncio.sleep(0.5)

    def _all_done(self) -> bool:
        """Every trainer ended, and a trainer that ended saw the last step; a failed peer ends the wait too."""
        for node in self.nodes.values():
            if node.running is not None and node.running.done() and not node.running.cancelled() and node.running.exception():
                return True
        trainers = [n for n in self.nodes.values() if isinstance(n.peer, Trainer)]
        return bool(trainers) and all(n.running is not None and n.running.done() for n in trainers)

    def describe(self) -> str:
        """What everyone does, for a failure message."""
        lines = []
        for node in self.nodes.values():
            peer = node.peer
            if isinstance(peer, StagePeer):
                lines.append(f"{node.name}: {peer.membership.state} at {peer.committed.num_commits}")
            elif isinstance(peer, Trainer):
                lines.append(f"{node.name}: at {peer.record.step + 1 if peer.record else None}, {len(peer._running)} in flight")
            if (coordinator := self.coordinator_at(node)) is not None:
                lines.append(f"{node.name} coordinates, waiting for {coordinator.waiting_for}")
        return "; ".join(lines)

    async def abandon(self) -> None:
        """Drop everything without a word."""
        for name in list(self.nodes):
            await self.kill(name)

    async def close(self) -> None:
        """End every peer as its launcher does."""
        for node in self.nodes.values():
            if node.running is not None:
                node.running.cancel()
                await asyncio.gather(node.running, return_exceptions=True)
        for node in self.nodes.values():
            await node.peer.close()

    def _holders(self, stage: int) -> list[StagePeer]:
        """Peers of a stage that hold the state after the last step."""
        peers = [peer for peer in self.stage_peers(stage) if peer.committed.up_to_date]
        return [peer for peer in peers if peer.committed.versions.newest.num_commits == self.config.total_steps]

    def parameters(self) -> torch.Tensor:
        """The whole parameter vector, from the first up-to-date peer of each stage."""
        parts = []
        for stage in range(self.config.num_stages):
            parts.append(self._holders(stage)[0].committed.versions.newest.masters)
        return torch.cat(parts)

    def copies(self, tie: Tie) -> list[torch.Tensor]:
        """Every copy of a tied parameter, of all peers that hold the state after the last step."""
        return [
            holder.stage_context.compute.layout.named(holder.committed.versions.newest.masters)[name]
            for stage, name in tie.places
            for holder in self._holders(stage)
        ]

    def records(self) -> list[float | None]:
        """Loss of every committed step, from the trainer that saw most."""
        best = max((n.reports for n in self.nodes.values() if isinstance(n.peer, Trainer)), key=len)
        return [report.record.loss for report in best]


_plain: dict[bytes, PlainResult] = {}


def check(simulation: Simulation, *, lineages: bool = False) -> None:
    """Promises 1, 2 and 3 at the end of a run in fp64 without compression.

    Args:
        simulation: has finished.
        lineages: a step may have had several heads, because the run was set back or split.

    Raises:
        AssertionError: saying which promise, and where.
    """
    config = simulation.config
    key = config.to_bytes()
    plain = _plain.get(key)
    if plain is None:
        plain = _plain[key] = one_process(config)
    losses: dict[int, float] = {}
    for step, record in simulation.commits.items():
        if step >= 0:
            tickets = [result.num_tickets for result in record.results]
            assert tickets == [config.tickets_per_step] * config.num_stages, f"exactly_once: step {step}: {tickets}"
            assert record.loss is not None, f"step {step} has no loss"
            losses[step] = record.loss
    assert sorted(losses) == list(range(config.total_steps)), f"steps committed: {sorted(losses)}"
    for step, loss in losses.items():
        expected = plain.losses[step]
        assert abs(loss - expected) <= 1e-8 * abs(expected), f"same_as_one_process: step {step}: {loss} not {expected}"
    for step, version_ids in simulation.version_ids.items():
        assert len(version_ids) == 1 or lineages, f"two heads for step {step}"
    distance = float((simulation.parameters() - plain.parameters).norm() / plain.parameters.norm())
    assert distance < 1e-8, f"same_as_one_process: parameters differ by {distance}"
    for peer in simulation.stage_peers():
        captured, transport = peer.stage_context.compute._captured, peer.context.transport
        assert isinstance(transport, MemoryTransport)
        if not transport.held_bytes:  # a peer that moved may still serve one of its old stage
            kept = peer._budget.used_bytes - (captured._reserved_bytes if captured is not None else 0)
            assert kept == 0, f"bounded: stage {peer.stage} serves nothing and reserves {kept} bytes for micro-batches"
    for tie in ties_of(simulation.factory):
        first, *others = simulation.copies(tie)
        assert all(torch.equal(first, other) for other in others), f"replicas_identical: copies of {tie.name} differ"
    for stage in range(config.num_stages):
        states = {
            (p.committed.versions.newest.version_id, p.committed.state_digest)
            for p in simulation.stage_peers(stage)
            if p.membership.serving and p.committed.up_to_date and p.committed.state_digest
        }
        assert (
            len({digest for version_id, digest in states if version_id in simulation.version_ids[config.total_steps - 1]}) == 1
        ), f"replicas_identical: stage {stage}: {states}"
