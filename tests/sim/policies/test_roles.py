"""Roles in a whole swarm: a slow uploader only aggregates, changed lines change roles, and no role costs a promise."""

from __future__ import annotations

import asyncio
import statistics

import pytest
import torch

from swarm.base.config import Timing
from swarm.testing.simulation.invariants import run_checked
from swarm.testing.simulation.phases import Log, committed, coordinator_of, kind, until
from swarm.testing.simulation.simulation import Simulation, check
from swarm.testing.simulation.small_model import SmallFactory, one_process, small_config
from swarm.testing.virtual_time import run_virtual
from swarm.wire import messages as m

torch.set_num_threads(1)

#: Averages of 8 MiB, which lines carry in `VECTOR_S`: in many chunks.
ELEMENTS = 2**20
VECTOR_S = 0.1


class Swarm:
    """Equal peers of one stage, of whose lines some are changed."""

    def __init__(self, *, steps: int, every_s: float, vector_s: float = VECTOR_S, forward_s: float = 0.002, **config: object):
        timing = config.pop("timing", None) or Timing(rebalance_every_s=every_s)
        self.config = small_config(**{"num_stages": 1, "total_steps": steps, "timing": timing, **config})
        self.simulation = Simulation(self.config, factory=SmallFactory(1, padding=ELEMENTS), forward_s=forward_s)
        self.rate = ELEMENTS * 8 / vector_s
        #: When each step had committed.
        self.at: dict[int, float] = {}

    async def start(self, num_peers: int) -> None:
        await self.simulation.start(peers_per_stage=num_peers)
        for i in range(num_peers):
            self.line(f"stage0.{i}")
        for peer in self.simulation.stage_peers(0):
            peer.committed.on_commit.append(lambda record: self.at.setdefault(record.step, asyncio.get_running_loop().time()))

    def line(self, name: str, *, up: float = 1.0) -> None:
        self.simulation.network.line(self.simulation.nodes[name].address, up=up * self.rate, down=self.rate)

    def roles(self, step: int | None = None) -> dict[str, str]:
        """Of each peer, by its name, in the record of a step, or the newest."""
        record = self.simulation.commits[max(self.simulation.commits) if step is None else step]
        names = {node.identity.peer_id: name for name, node in self.simulation.nodes.items()}
        return {names[x.peer]: x.role for x in record.members[0]}

    def step_s(self, first: int) -> float:
        """Seconds of a step, of the steps from `first` on."""
        times = [self.at[step] - self.at[step - 1] for step in sorted(self.at) if step >= first]
        return statistics.median(times)

    async def finish(self) -> None:
        """The run ends as it would have in one process."""
        await self.simulation.finish()
        assert self.simulation.records() == pytest.approx(one_process(self.config).losses, rel=1e-8), "same_as_one_process"
        assert len({peer.committed.state_digest for peer in self.simulation.stage_peers(0)}) == 1, "replicas_identical"
        await self.simulation.close()


def test_a_slow_uploader_only_aggregates_and_steps_are_nearly_as_fast_as_without_it() -> None:
    """Three equal peers take 0.214 s a step; a fourth that computes as fast and uploads a tenth took 1.2 s."""

    async def main() -> None:
        swarm = Swarm(steps=14, every_s=3.0)
        trains = Log(swarm.simulation, kind(m.Train))
        slices = Log(swarm.simulation, kind(m.Slice))
        await swarm.start(4)
        swarm.line("stage0.3", up=0.1)
        await swarm.finish()
        slow = swarm.simulation.nodes["stage0.3"]
        changed = next(step for step in range(14) if swarm.roles(step)["stage0.3"] != "both")
        assert swarm.at[changed] - swarm.at[0] < 2 * 3.0
        assert swarm.roles() == {**{f"stage0.{i}": "both" for i in range(3)}, "stage0.3": "aggregate"}
        assert swarm.step_s(1) < 1.0 < max(swarm.at[k] - swarm.at[k - 1] for k in range(1, changed)), "it was slow before"
        assert swarm.step_s(changed + 3) <= 0.28
        late = [x for x in trains.calls if x.message.ticket.step > changed + 1 and x.target == slow.address]
        assert not late, "it gets no tickets"
        sent = [x for x in slices.calls if x.source == slow.address and x.message.step > changed + 1]
        assert sent, "it asks for what the others reduce"
        assert not any(x.message.tensors for x in sent), "and uploads no contribution"
        assert swarm.simulation.nodes["stage0.3"].stage_peer.committed.num_commits == 14, "it is a full replica"

    run_virtual(main())


@pytest.mark.parametrize(
    ("slow", "optimum"),
    [(False, 0.5 + 1.5), (True, 10 / 6.133)],
    ids=["four at 100: 66.667", "three compute and a slow uploader aggregates: 6.133"],
)
def test_steps_take_what_the_linear_program_says(slow: bool, optimum: float) -> None:
    """At these roles, in units of the time in which a line carries an average, within 15 %.

    A peer alone computes a step in two units. That comes before the average in the first case, and overlaps in the second.
    """

    async def main() -> None:
        swarm = Swarm(
            steps=9 if slow else 5,
            every_s=22.0,
            vector_s=1.0,
            forward_s=2.0 / 16 / 3,
            delay_steps=int(slow),
            target_batch_size=64,
        )
        await swarm.start(4)
        if slow:
            swarm.line("stage0.3", up=0.1)
        await swarm.finish()
        assert swarm.step_s(6 if slow else 2) <= optimum * 1.15
        assert list(swarm.roles().values()) == ["both", "both", "both", "aggregate" if slow else "both"]

    run_virtual(main())


def test_roles_follow_a_line_within_two_periods() -> None:
    """Compute counts here: a peer gets tickets again once its line is good."""

    async def main() -> None:
        every_s = 6.0
        swarm = Swarm(steps=60, every_s=every_s, forward_s=0.03)
        await swarm.start(4)

        async def changed(aggregates: bool) -> None:
            """Until the record says so; a step may be under way at the end of the second period."""
            await until(
                lambda: (swarm.roles()["stage0.3"] == "aggregate") is aggregates,
                f"only aggregates: {aggregates}",
                within_s=2 * every_s + 1.5,
            )

        await committed(swarm.simulation, 2)
        swarm.line("stage0.3", up=0.1)
        await changed(True)
        swarm.line("stage0.3")
        await changed(False)
        assert list(swarm.roles().values()).count("aggregate") == 0
        await swarm.simulation.abandon()

    run_virtual(main())


def test_no_role_changes_in_an_hour_when_nothing_is_gained() -> None:
    """Lines that differ by a third and paces that vary are measured, and decided upon every 300 s."""

    async def main() -> None:
        timing = Timing(
            heartbeat_s=10.0,
            stall_s=120.0,
            request_s=20.0,
            lease_s=120.0,
            coordinator_s=30.0,
            record_ttl_s=120.0,
            average_s=600.0,
        )
        swarm = Swarm(steps=18, every_s=300.0, vector_s=20.0, forward_s=30.0, timing=timing)
        await swarm.start(4)
        swarm.line("stage0.3", up=0.67)
        began = asyncio.get_running_loop().time()
        await swarm.simulation.finish(within_s=20000.0)
        assert asyncio.get_running_loop().time() - began > 3600
        assert {x.role for record in swarm.simulation.commits.values() for x in record.members[0]} == {"both"}
        roles = next(n for n in swarm.simulation.nodes.values() if swarm.simulation.coordinates(n))
        assert "faster" in swarm.simulation.coordinator_at(roles).rebalancing.roles.reasons[0], "it was measured and decided"
        await swarm.simulation.close()

    run_virtual(main())


# ------------------------------------------------------------------------------------------------ what goes wrong


def test_tickets_go_to_who_only_aggregates_if_nobody_else_is_left() -> None:
    async def main() -> None:
        simulation = Simulation(small_config(total_steps=8), seed=3)
        await simulation.start(peers_per_stage=2)
        await committed(simulation, 1)
        simulation.give_role("stage1.1", "aggregate")
        aggregator = simulation.nodes["stage1.1"].stage_peer
        await until(lambda: role_of(simulation, aggregator.context.peer) == "aggregate", "it only aggregates")
        await simulation.kill("stage1.0")
        await simulation.finish()
        assert role_of(simulation, aggregator.context.peer) == "both"
        check(simulation)
        await simulation.close()

    run_checked(main())


def test_roles_outlive_the_coordinator_that_gave_them() -> None:
    async def main() -> None:
        simulation = Simulation(small_config(total_steps=12), seed=5)
        await simulation.add_backbone("backbone1")
        await simulation.start(peers_per_stage=2)
        await committed(simulation, 1)
        simulation.give_role("stage1.1", "aggregate")
        peer = simulation.nodes["stage1.1"].stage_peer.context.peer
        await until(lambda: role_of(simulation, peer) == "aggregate", "it only aggregates")
        await simulation.kill(coordinator_of(simulation).name)
        await simulation.finish()
        assert role_of(simulation, peer) == "aggregate"
        check(simulation)
        await simulation.close()

    run_checked(main())


def role_of(simulation: Simulation, peer: str) -> str:
    record = simulation.commits[max(simulation.commits)]
    return next((x.role for xs in record.members for x in xs if x.peer == peer), "")
