"""A newcomer downloads the state of a big stage from several donors at once, and survives the loss of one halfway."""

from __future__ import annotations

import asyncio
import logging
import shutil
import statistics
from collections import Counter

import pytest

from swarm.peer.link import Refuse, RefusedBy
from swarm.peer.stage import state_transfer
from swarm.peer.stage.saved_states import SavedStates
from swarm.peer.stage.state_transfer import StateDonor
from swarm.testing.simulation.phases import committed, until
from swarm.testing.simulation.simulation import Simulation, check
from swarm.testing.simulation.small_model import small_config
from swarm.testing.virtual_time import run_virtual
from swarm.wire import messages as m


@pytest.fixture(autouse=True)
def small_ranges(monkeypatch):
    """The test model's 42 parameters in 14 ranges a tensor."""
    monkeypatch.setattr(state_transfer, "RANGE_ELEMENTS", 3)


@pytest.fixture
def served(monkeypatch):
    """Ranges that each donor's address served."""
    counts = Counter()
    plain = StateDonor._on_range

    async def counting(self, message, frame, progress):
        reply = await plain(self, message, frame, progress)
        counts[self._context.me.port] += 1
        return reply

    monkeypatch.setattr(StateDonor, "_on_range", counting)
    return counts


@pytest.mark.parametrize("kill_a_donor", [False, True])
def test_a_newcomer_downloads_from_three_donors_at_once(served, kill_a_donor):
    config = small_config(total_steps=14)

    async def main():
        simulation = Simulation(config, seed=21)
        await simulation.start(peers_per_stage=3, trainers=1)
        await committed(simulation, 2)
        node = await simulation.add_stage_peer("stage1.3", 1)
        donors = [simulation.nodes[f"stage1.{i}"].address for i in range(3)]
        for donor in donors:
            simulation.network.link(node.address, donor, latency_s=0.02)
        if kill_a_donor:
            async with asyncio.timeout(60):
                while served[donors[1].port] < 3:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
            assert sum(served.values()) < 40, "the download was over already"
            await simulation.kill("stage1.1")
        await simulation.finish()
        check(simulation)
        assert node.peer.membership.serving
        assert len([port for port in served if served[port] > 2]) == 3, f"ranges served: {dict(served)}"
        await simulation.close()

    run_virtual(main())


def test_no_ticket_waits_for_a_newcomer_that_copies_an_average():
    """It is ready at the record before; the average of the next one it has to copy, which takes as long as that is large."""
    config = small_config(total_steps=14)

    async def main():
        simulation = Simulation(config, seed=23, forward_s=0.2)
        await simulation.start(peers_per_stage=3, trainers=1)
        await committed(simulation, 3)
        node = await simulation.add_stage_peer("stage1.3", 1)
        server, loop = node.peer.micro_batches, asyncio.get_running_loop()
        copies = node.peer.committed._sums
        plain_copy, plain_version, waits, copying = copies._copy, server._version, [], []

        async def slow_copy(holder, step, digest):
            await asyncio.sleep(0.8)
            return await plain_copy(holder, step, digest)

        async def timed(message):
            began = loop.time()
            copying.append(node.peer.committed.is_copying)
            try:
                return await plain_version(message)
            finally:
                waits.append(loop.time() - began)

        copies._copy, server._version = slow_copy, timed
        await simulation.finish()
        check(simulation)
        assert server.phases["accumulated"], "it never served"
        await simulation.close()
        return waits, copying

    waits, copying = run_virtual(main())
    assert any(copying), "no ticket came while it copied: this test shows nothing"
    assert max(waits) < 0.5, "a ticket waited for the copy"


@pytest.fixture
def donors(monkeypatch):
    """Every donor, and the most pins and readers that one had."""
    seen = {"pins": 0, "readers": 0, "refused": Counter()}
    plain = StateDonor._on_offer

    async def watching(self, message, frame, progress):
        try:
            return await plain(self, message, frame, progress)
        except Refuse as refuse:
            seen["refused"][refuse.code] += 1
            raise
        finally:
            seen["pins"] = max(seen["pins"], self.num_pins)
            seen["readers"] = max(seen["readers"], len(self._pin.readers) if self._pin is not None else 0)

    monkeypatch.setattr(StateDonor, "_on_offer", watching)
    return seen


def test_case_09_eight_newcomers_want_the_state_of_one_donor(served, donors):
    """One reads as slowly beside this small state as 1 KB/s is beside 200 MB, one leaves halfway.

    One snapshot is pinned at a time, no step waits, and the others become members.
    """
    config = small_config(total_steps=16)

    async def main():
        simulation = Simulation(config, seed=22, forward_s=0.1)
        await simulation.start(peers_per_stage=1, trainers=1)
        await committed(simulation, 4)
        donor = simulation.nodes["stage1.0"].address
        newcomers = []
        for i in range(8):
            address = simulation.next_address
            simulation.network.link(address, donor, bytes_per_s=5.0 if i == 0 else 1e8, latency_s=0.01)
            newcomers.append(await simulation.add_stage_peer(f"stage1.{i + 1}", 1))
        halfway = newcomers[1]
        await until(lambda: halfway.peer.membership.state == "syncing" and served[donor.port] > 10, "it downloads")
        await simulation.kill(halfway.name)
        alive = newcomers[2:]
        await until(lambda: all(node.peer.membership.serving for node in alive), "the others serve", within_s=120)
        last = max(simulation.commits)
        assert last < config.total_steps - 1, "the run was over before they served"
        await simulation.finish()
        check(simulation)  # all copies that serve are one state, by digest
        assert donors["pins"] == 1, "a donor pinned more than one snapshot"
        assert donors["readers"] <= state_transfer.MAX_READERS
        assert donors["refused"]["busy"] > 0, "nobody was ever sent elsewhere"
        seconds = [report.seconds for report in simulation.nodes["trainer0"].reports]
        median = statistics.median(seconds[1:4])
        assert max(seconds[1:]) < 1.5 * median, f"a step took {max(seconds[1:]):.3f} s, the median was {median:.3f} s"
        await simulation.close()

    run_virtual(main())


def test_a_reader_that_hardly_moves_does_not_keep_others_out_for_ever(served, donors, caplog):
    """A stranger renews its hold on the snapshot for ever; newcomers wait for a while, not for ever, and say why."""
    config = small_config(total_steps=20)

    async def main():
        simulation = Simulation(config, seed=23, forward_s=0.1)
        await simulation.start(peers_per_stage=1, trainers=1)
        await committed(simulation, 2)
        donor, unknown_node = simulation.nodes["stage1.0"], simulation.nodes["stage0.0"]
        link, run = unknown_node.peer.link, unknown_node.peer.context.run
        offer = m.StateOffer(run=run, stage=1, reader="00" * 8)
        manifest, _ = await link.ask(donor.peer.stage_context.me, offer, m.StateManifest)

        async def hold() -> None:
            ask = m.StateRange(
                run=run, stage=1, version_id=manifest.record.version_id, name="masters", offset=0, length=1, reader="00" * 8
            )
            while True:
                await link.ask(donor.peer.stage_context.me, ask, m.StateChunk)
                await asyncio.sleep(1.0)

        holding = asyncio.ensure_future(hold())
        node = await simulation.add_stage_peer("stage1.1", 1)
        await until(lambda: node.peer.membership.serving, "the newcomer serves", within_s=60)
        assert donors["refused"]["busy"] > 0, "the stranger never kept anyone out"
        assert "stage 1: no state for stage 1: " in caplog.text
        await asyncio.gather(holding, return_exceptions=True)
        assert isinstance(holding.exception(), RefusedBy)
        await simulation.finish()
        check(simulation)
        await simulation.close()

    run_virtual(main())


def test_a_restart_warns_of_no_download_that_has_to_wait_for_a_moment(tmp_path, caplog, monkeypatch):
    """Who has lost its directory asks those that still read the checkpoint from theirs, and is answered once they have."""
    config = small_config(total_steps=8, checkpoint_every=2)
    plain = SavedStates.load

    async def slow(self, record):
        state = await plain(self, record)
        await asyncio.sleep(1.0 if record.step >= 0 and state is not None else 0.0)
        return state

    monkeypatch.setattr(SavedStates, "load", slow)
    caplog.set_level(logging.DEBUG, "swarm.peer.stage.membership")

    async def main():
        first = Simulation(config, seed=24, state_dir=tmp_path)
        await first.start(peers_per_stage=2, trainers=1)
        await committed(first, 5)
        await first.abandon()
        for stage in range(config.num_stages):
            shutil.rmtree(tmp_path / f"stage{stage}.1")
        second = Simulation(config, seed=25, state_dir=tmp_path)
        await second.start(peers_per_stage=2, trainers=1)
        await second.finish()
        await second.close()

    run_virtual(main())
    messages = [record.getMessage() for record in caplog.records if record.name == "swarm.peer.stage.membership"]
    assert sum("state of step" in text for text in messages) >= config.num_stages, "nobody downloaded"
    assert not [text for text in messages if "behind: this peer holds step" in text]
