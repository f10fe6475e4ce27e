"""Shares by bandwidth in a whole swarm: measured on real transfers, told with the seals, used in the next rounds."""

from __future__ import annotations

import asyncio

from swarm.testing.simulation.phases import Log, committed, kind
from swarm.testing.simulation.simulation import Simulation
from swarm.testing.simulation.small_model import SmallFactory, small_config
from swarm.testing.virtual_time import run_virtual
from swarm.wire import messages as m

#: Averages of 4 MiB.
ELEMENTS = 2**19
STEPS = 9


def test_a_slow_link_is_measured_and_its_peer_reduces_less() -> None:
    async def main() -> None:
        config = small_config(num_stages=1, total_steps=STEPS)
        simulation = Simulation(config, factory=SmallFactory(1, padding=ELEMENTS))
        reduces = Log(simulation, kind(m.Reduce))
        await simulation.start(peers_per_stage=4)
        slow = simulation.nodes["stage0.3"]
        for node in simulation.nodes.values():
            if node.name.startswith("stage"):
                rate = 5e5 if node is slow else 5e6
                simulation.network.line(node.address, up=rate, down=rate)
        await committed(simulation, 3)
        simulation.network.line(slow.address, up=5e6, down=5e6)  # as good as the others'
        await simulation.finish()
        shares: dict[int, dict[str, int]] = {}
        for call in reduces.calls:
            reduce = call.message
            assert sum(reduce.shares) > ELEMENTS
            shares[reduce.step] = {s.member.peer: n for s, n in zip(reduce.seals, reduce.shares, strict=True)}
        peer = slow.identity.peer_id
        total = sum(shares[0].values())
        assert max(shares[0].values()) - min(shares[0].values()) <= 1, "nothing was measured yet"
        assert shares[1][peer] < 0.05 * total, f"measured, the slow peer reduces little: {shares[1]}"
        assert shares[2][peer] < 0.05 * total, f"and in the next round: {shares[2]}"
        assert shares[STEPS - 1][peer] > 0.05 * total, f"its line is good again: {shares[STEPS - 1]}"
        sent = sum(p.bytes_moved.average_sent for p in simulation.stage_peers(0))
        assert sent == STEPS * 2 * 3 * total * 8, "three parts of every fp64 value go out, and three sums come back"
        assert all(len(version_ids) == 1 for version_ids in simulation.version_ids.values())
        digests = {p.committed.state_digest for p in simulation.stage_peers(0)}
        assert len(digests) == 1, "replicas_identical with unequal shares"
        await simulation.close()

    run_virtual(main())


def test_a_round_may_take_longer_than_average_s_while_it_moves() -> None:
    """Averages of 4 MiB over lines of 500 kB/s take over 10 s; three seconds are the longest that nothing may move."""

    async def main() -> None:
        config = small_config(num_stages=1, total_steps=2, timing={"average_s": 3.0})
        simulation = Simulation(config, factory=SmallFactory(1, padding=ELEMENTS))
        await simulation.start(peers_per_stage=3)
        for node in simulation.nodes.values():
            if node.name.startswith("stage"):
                simulation.network.line(node.address, up=5e5, down=5e5)
        began = asyncio.get_running_loop().time()
        await simulation.finish()
        assert asyncio.get_running_loop().time() - began > 10.0
        await simulation.close()

    run_virtual(main())
