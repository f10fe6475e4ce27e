"""Whole-stage loss, partitions that heal, resume from disk: two histories become one, loudly, and nothing is lost twice."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shutil

import pytest

from swarm.base.errors import LinkBroken, StorageError
from swarm.base.ids import Ballot
from swarm.lifecycle.commit_record import restoring_record
from swarm.peer.coordinator.lineage import Lineage
from swarm.peer.coordinator.run_leadership import Demoted, RunLeadership
from swarm.peer.stage import saved_states
from swarm.stage.saved.checkpoint import StageCheckpoint, write_checkpoint
from swarm.testing.simulation.phases import committed, finish_from, kind
from swarm.testing.simulation.simulation import Simulation, check
from swarm.testing.simulation.small_model import small_config
from swarm.testing.virtual_time import run_virtual
from swarm.wire import messages as m
from swarm.wire.messages import MAX_SAVED


async def killed_after(config, tmp_path, steps):
    """A run of two peers a stage that ended all at once."""
    simulation = Simulation(config, seed=13, state_dir=tmp_path)
    await simulation.start(peers_per_stage=2, trainers=1)
    await committed(simulation, steps)
    await simulation.abandon()
    return simulation


@pytest.mark.parametrize("delay_steps", [0, 1])
def test_a_lost_stage_is_restored_from_the_newest_complete_checkpoint(tmp_path, caplog, delay_steps):
    """All holders of stage 1 die; one returns with its state directory. The run goes on from the last checkpoint.

    Until then whoever returned says what is waited for, and how long.
    """
    caplog.set_level(logging.INFO)
    config = small_config(
        total_steps=9, checkpoint_every=3, checkpoint_copies=2, delay_steps=delay_steps, timing={"stage_lost_s": 10.0}
    )

    async def main():
        simulation = Simulation(config, seed=11, state_dir=tmp_path)
        await simulation.start(peers_per_stage=2, trainers=1)
        await committed(simulation, 5)
        await simulation.kill("stage1.0")
        await simulation.kill("stage1.1")
        await asyncio.sleep(3.0)
        await simulation.add_stage_peer("stage1.0", 1)
        await simulation.finish()
        check(simulation, lineages=True)
        eras = {record.era for record in simulation.commits.values()}
        assert max(eras) == 1, "the run was not set back"
        peer = simulation.stage_peers(0)[0]
        assert 0 < peer.committed.discarded_steps <= 3, f"{peer.committed.discarded_steps} steps were discarded"
        await simulation.close()

    run_virtual(main())
    assert "going on from an earlier version than that of step " in caplog.text
    said = [r.getMessage() for r in caplog.records if r.name == "swarm.peer.stage.membership" and "not listed" in r.getMessage()]
    assert said == [
        "stage 1: this peer is not listed yet; the run waits for a live member of stage 1; "
        "without one for 10 s the run goes back to a checkpoint, once there are peers that have one"
    ]


def test_while_a_stage_is_lost_the_run_says_so(tmp_path):
    """What a person who watches a trainer reads, from the loss to the return of a holder with its checkpoint."""
    config = small_config(total_steps=5, checkpoint_every=2, timing={"stage_lost_s": 8.0})

    async def main():
        simulation = Simulation(config, seed=18, state_dir=tmp_path)
        await simulation.start(peers_per_stage=1, trainers=0)
        read = []
        await simulation.add_trainer("trainer0", on_waiting=read.append)
        await committed(simulation, 3)
        await simulation.kill("stage1.0")
        await asyncio.sleep(15.0)
        assert read[0] == (
            "a live member of stage 1; without one for 8 s the run goes back to a checkpoint, once there are peers that have one"
        )
        assert read[1] == "a peer of stages [1]: nobody serves them"
        await simulation.add_stage_peer("stage1.0", 1)
        await simulation.finish()
        check(simulation, lineages=True)
        assert min(r.step for r in simulation.commits.values() if r.era == 1) + 1 >= 2, "the checkpoint was not used"
        await simulation.close()

    run_virtual(main())


def test_a_stage_whose_only_peer_was_started_again_goes_on_at_once(tmp_path):
    """Its memory is gone for certain, so nobody waits for `stage_lost_s`."""
    config = small_config(total_steps=5, checkpoint_every=2)

    async def main():
        simulation = Simulation(config, seed=19, state_dir=tmp_path)
        await simulation.start(peers_per_stage=1, trainers=1)
        await committed(simulation, 3)
        began = asyncio.get_running_loop().time()
        await simulation.kill("stage1.0")
        await asyncio.sleep(2.0)
        await simulation.add_stage_peer("stage1.0", 1, same_port=True)
        await committed(simulation, 5)
        took = asyncio.get_running_loop().time() - began
        assert took < config.timing.stage_lost_s / 3, f"{took:.0f} s"
        await simulation.finish()
        check(simulation, lineages=True)
        await simulation.close()

    run_virtual(main())


def test_a_lost_stage_without_checkpoints_starts_from_the_initial_values():
    config = small_config(total_steps=4, timing={"stage_lost_s": 5.0})

    async def main():
        simulation = Simulation(config, seed=12)
        await simulation.start(peers_per_stage=1, trainers=1)
        await committed(simulation, 2)
        await simulation.kill("stage2.0")
        await asyncio.sleep(1.0)
        await simulation.add_stage_peer("stage2.0", 2)
        await simulation.finish()
        check(simulation, lineages=True)
        await simulation.close()

    run_virtual(main())


def test_a_run_resumes_from_disk_after_everyone_was_killed(tmp_path):
    """CASES row 21: same losses as an uninterrupted run, from the last complete checkpoint on."""
    config = small_config(total_steps=8, checkpoint_every=2, checkpoint_copies=2)

    async def main():
        simulation = await killed_after(config, tmp_path, 5)
        before = max(simulation.commits) + 1
        second = Simulation(config, seed=14, state_dir=tmp_path)
        await second.start(peers_per_stage=2, trainers=1)
        await second.finish()
        first_step = min(r.step for r in second.commits.values()) + 1
        assert first_step >= before - before % 2 - 2, f"resumed at step {first_step} of {before}"
        assert first_step > 0, "nothing was resumed"
        second.commits = {**{s: r for s, r in simulation.commits.items() if s < first_step}, **second.commits}
        check(second, lineages=True)
        await second.close()

    run_virtual(main())


@pytest.mark.parametrize("steps", [3, 5])
@pytest.mark.parametrize(
    ("after_s", "is_empty", "waiting_for"),
    [
        (12.0, False, "with them the run goes on at step "),
        (40.0, False, "with them the run goes on at step "),
        (40.0, True, "(stage 0: {kept}; stage 1: none; stage 2: {kept})"),
    ],
)
def test_a_run_waits_for_those_who_wrote_its_newest_checkpoint(tmp_path, after_s, is_empty, waiting_for, steps):
    """Only one peer of each stage wrote it, and that of stage 1 starts late, or is there and has lost it: nothing is begun
    again."""
    config = small_config(total_steps=7, checkpoint_every=2, checkpoint_copies=1, timing={"stage_lost_s": 20.0})

    async def main():
        simulation = await killed_after(config, tmp_path, steps)
        newest = steps - 1
        [written] = tmp_path.glob(f"*/checkpoints/stage-1/step-{newest:08d}/checkpoint.json")
        writer, kept = written.parts[-5], written.parents[1]
        if is_empty:
            kept.rename(tmp_path / "elsewhere")
        second = Simulation(config, seed=14, state_dir=tmp_path)
        await second.add_backbone("backbone0")
        for stage, i in ((0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)):
            if (name := f"stage{stage}.{i}") != writer or is_empty:
                second.identities[name] = simulation.identities[name]
                await second.add_stage_peer(name, stage)
        await second.add_trainer("trainer0")
        await asyncio.sleep(after_s)
        assert not second.commits, "it went on from an older head, or began again"
        waiting = second.nodes["backbone0"].peer.election.coordinator.waiting_for
        assert waiting_for.format(kept=", ".join(map(str, range(2, steps, 2)))) in waiting
        if is_empty:
            (tmp_path / "elsewhere").rename(kept)
        else:
            second.identities[writer] = simulation.identities[writer]
            await second.add_stage_peer(writer, 1)
        await finish_from(second, simulation, newest)

    run_virtual(main())


def test_the_last_checkpoint_of_all_stages_stays_while_a_stage_keeps_none(tmp_path):
    """All peers of stage 1 were replaced by one that has no directory: the other stages write on, for a set-back to them."""
    config = small_config(total_steps=9, checkpoint_every=2, checkpoint_keep=2)

    async def main():
        simulation = Simulation(config, seed=13, state_dir=tmp_path)
        await simulation.start(peers_per_stage=1, trainers=1)
        newcomer = await simulation.add_stage_peer("stage1.1", 1, keeps=False)
        await committed(simulation, 3)
        while not newcomer.peer.membership.serving:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await simulation.kill("stage1.0")
        await committed(simulation, 9)
        await simulation.abandon()
        kept = {k: sorted(int(p.name[5:]) for p in tmp_path.glob(f"*/checkpoints/stage-{k}/step-*")) for k in range(3)}
        assert kept[0] == kept[2] == [kept[1][-1], 8, 9], kept
        second = Simulation(config, seed=14, state_dir=tmp_path)
        await second.start(peers_per_stage=1, trainers=1)
        await finish_from(second, simulation, kept[1][-1])

    run_virtual(main())


def test_the_last_checkpoint_of_all_stages_stays_while_a_disk_refuses(tmp_path, monkeypatch):
    """Of one of two peers, which alone was to write: the other takes over when two checkpoints are missing."""
    config = small_config(total_steps=16, checkpoint_every=2, checkpoint_keep=1, checkpoint_copies=1)
    refusing = set()

    def write(root, *args, **options):
        if root.name in refusing:
            raise StorageError(f"cannot write checkpoint {root}: No space left on device")
        return write_checkpoint(root, *args, **options)

    monkeypatch.setattr("swarm.peer.stage.checkpoints.write_checkpoint", write)

    def kept():
        return {k: sorted(int(p.name[5:]) for p in tmp_path.glob(f"*/checkpoints/stage-{k}/step-*")) for k in range(3)}

    async def main():
        simulation = Simulation(config, seed=13, state_dir=tmp_path)
        await simulation.start(peers_per_stage=2, trainers=1)
        await committed(simulation, 3)
        [writer] = {path.parts[-4] for path in tmp_path.glob("*/checkpoints/stage-1/step-00000002")}
        refusing.add(writer)
        await committed(simulation, 7)
        assert kept() == {0: [2, 6], 1: [2], 2: [2, 6]}, "the run can go on from step 2 alone"
        await committed(simulation, 9)
        assert [steps[-1] for steps in kept().values()] == [8, 8, 8]
        await simulation.finish()
        check(simulation, lineages=True)
        await simulation.close()

    run_virtual(main())


@pytest.mark.parametrize("keeper", [0, 1])
def test_a_peer_without_a_directory_is_not_counted_on_to_write(tmp_path, keeper):
    """Whichever of the two leads its stage: the other writes."""
    config = small_config(total_steps=4, checkpoint_every=2, checkpoint_copies=1)

    async def main():
        simulation = Simulation(config, seed=13, state_dir=tmp_path)
        await simulation.add_backbone("backbone0")
        for stage in range(3):
            for i in range(2):
                await simulation.add_stage_peer(f"stage{stage}.{i}", stage, keeps=i == keeper)
        await simulation.add_trainer("trainer0")
        await simulation.finish()
        await simulation.close()
        written = {path.relative_to(tmp_path).as_posix() for path in tmp_path.glob("*/checkpoints/stage-*/step-00000004")}
        assert written == {f"stage{k}.{keeper}/checkpoints/stage-{k}/step-00000004" for k in range(3)}

    run_virtual(main())


def test_any_number_of_checkpoints_may_be_kept(tmp_path):
    """Seals tell the newest of them."""
    config = small_config(total_steps=MAX_SAVED + 8, checkpoint_every=1, checkpoint_keep=100)

    async def main():
        simulation = Simulation(config, seed=13, state_dir=tmp_path)
        await simulation.start(peers_per_stage=1, trainers=1)
        await simulation.finish()
        assert len(list(tmp_path.glob("*/checkpoints/stage-1/step-*"))) == config.total_steps
        last = simulation.commits[config.total_steps - 1]
        assert (last.era, last.saved >= config.total_steps - 2) == (0, True), "no seal was refused, and the run set back"
        await simulation.close()

    run_virtual(main())


def cut_short(directory):
    """What a disk that lost the end of a file leaves."""
    path = directory / "parameters.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


async def resumed_where_it_ended(config, tmp_path, damage, *, keep=None):
    """A run that is over, what `damage` leaves of its checkpoints, and everyone again; nobody has finished yet.

    Args:
        keep: takes a copy of the directories from before the damage.
    """
    simulation = Simulation(config, seed=13, state_dir=tmp_path)
    await simulation.start(peers_per_stage=2, trainers=1)
    await simulation.finish()
    await simulation.abandon()
    if keep is not None:
        shutil.copytree(tmp_path, keep)
    for path in sorted(tmp_path.glob("*/checkpoints/stage-*/step-*")):
        if damage(path):
            cut_short(path)
    second = Simulation(config, seed=14, state_dir=tmp_path)
    second.identities |= simulation.identities
    await second.start(peers_per_stage=2, trainers=1)
    return second


@pytest.mark.parametrize(("damaged", "first"), [("stage1.0", 4), ("stage1", 2)])
def test_a_damaged_checkpoint_is_none(tmp_path, caplog, damaged, first):
    """The other copy serves where there is one, else the checkpoint before it; each damaged file is a line, once.

    That the run goes on from an earlier head is said where it does, and nowhere else.
    """
    caplog.set_level(logging.INFO)
    config = small_config(total_steps=4, checkpoint_every=2, checkpoint_copies=2)

    async def main():
        second = await resumed_where_it_ended(
            config, tmp_path, lambda path: path.parts[-4].startswith(damaged) and path.name == "step-00000004"
        )
        told = []
        for peer in second.stage_peers(1):
            peer.committed._saved._on_checked = lambda steps, faults: told.append((sorted(steps), len(faults)))
        await second.finish()
        assert min(r.step for r in second.commits.values()) + 1 == first
        assert sorted(told) == ([([2], 1), ([2, 4], 0)] if first == 4 else [([2], 1), ([2], 1)])
        assert second.parameters().isfinite().all()
        await second.close()

    run_virtual(main())
    lines = [record.getMessage() for record in caplog.records if "is damaged" in record.getMessage()]
    assert len(lines) == len(set(lines)) == (1 if first == 4 else 2)
    assert all("step-00000004/parameters.safetensors is damaged" in line for line in lines)
    resumed = [record.getMessage() for record in caplog.records if record.getMessage().startswith("going on")]
    how = "going on" if first == 4 else "going on from an earlier version than that of step 4"
    assert resumed == [f"{how}: step {first} is the newest that every stage holds"]


@pytest.mark.parametrize("copies", [1, 2])
def test_a_run_whose_only_checkpoints_are_damaged_is_neither_done_nor_begun_anew(tmp_path, caplog, copies):
    """Nor by a peer that never had one, which could begin again; it goes on once there is an intact copy."""
    config = small_config(total_steps=4, checkpoint_copies=copies, timing={"stage_lost_s": 20.0})

    async def main():
        second = await resumed_where_it_ended(config, tmp_path, lambda path: path.parts[-2] == "stage-1", keep=tmp_path / "kept")
        await asyncio.sleep(40.0)
        assert not second.commits
        waiting = second.nodes["backbone0"].peer.election.coordinator.waiting_for
        assert waiting.startswith("intact checkpoints: damaged are those of stage 1 at peer ")
        assert not second.nodes["trainer0"].peer.finished
        for intact in (tmp_path / "kept").glob("*/checkpoints/stage-1/step-*"):
            shutil.copytree(intact, tmp_path / intact.relative_to(tmp_path / "kept"), dirs_exist_ok=True)
        await second.finish()
        assert {record.step for record in second.commits.values()} == {3}
        await second.close()

    run_virtual(main())
    assert "beginning again" not in caplog.text


@pytest.mark.parametrize("how", ["its replies are lost", "it fails"])
@pytest.mark.parametrize("after_s", [12.0, 40.0])
def test_a_run_does_not_begin_again_because_a_peer_does_not_say_what_it_holds(tmp_path, caplog, monkeypatch, how, after_s):
    """Only one peer of stage 1 wrote the only checkpoint, and no record tells that all stages had theirs."""
    caplog.set_level(logging.INFO)
    config = small_config(total_steps=4, checkpoint_copies=1, timing={"stage_lost_s": 20.0})
    scan = saved_states.scan

    async def main():
        second = await resumed_where_it_ended(config, tmp_path, lambda path: False)
        [written] = tmp_path.glob("*/checkpoints/stage-1/step-00000004/checkpoint.json")
        name = written.parts[-5]
        if how == "it fails":

            def scan_there(roots, **options):
                if roots == [tmp_path / name]:
                    raise MemoryError
                return scan(roots, **options)

            monkeypatch.setattr(saved_states, "scan", scan_there)
        else:
            second.lose_reply.append(kind(m.Holdings, target=second.nodes[name]))
        await asyncio.sleep(after_s)
        assert not second.commits
        second.lose_reply.clear()
        monkeypatch.undo()
        await second.finish()
        assert {record.step for record in second.commits.values()} == {3}
        await second.close()

    run_virtual(main())
    assert " to say what they hold" in caplog.text
    assert "beginning again" not in caplog.text


def test_a_new_run_begins_without_a_peer_that_does_not_say_what_it_holds(tmp_path, caplog):
    config = small_config(total_steps=2, timing={"stage_lost_s": 20.0})

    async def main():
        simulation = Simulation(config, seed=13, state_dir=tmp_path)
        await simulation.start(peers_per_stage=2, trainers=1)
        simulation.lose_reply.append(kind(m.Holdings, target=simulation.nodes["stage1.0"]))
        await asyncio.sleep(15.0)
        assert not simulation.commits
        await simulation.finish()
        await simulation.close()

    run_virtual(main())
    assert caplog.text.count("do not say what they hold: going on without it") == 1


def test_a_run_does_not_begin_again_while_a_damaged_checkpoint_is_mended(tmp_path):
    """A look that meets a file half-way finds it neither intact nor damaged."""
    config = small_config(total_steps=4, checkpoint_copies=1)

    async def main():
        keep = tmp_path / "kept"
        second = await resumed_where_it_ended(config, tmp_path, lambda path: path.parts[-2] == "stage-1", keep=keep)
        [intact] = keep.glob("*/checkpoints/stage-1/step-*/parameters.safetensors")
        damaged = tmp_path / intact.relative_to(keep)
        whole = intact.read_bytes()
        check = StageCheckpoint.check

        def while_it_is_written(self, tick):
            if self.stage == 1:
                damaged.write_bytes(whole[:-1])
            check(self, tick)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StageCheckpoint, "check", while_it_is_written)
            await asyncio.sleep(20.0)
            assert not second.commits
        damaged.write_bytes(whole)
        await second.finish()
        assert {record.step for record in second.commits.values()} == {3}
        await second.close()

    run_virtual(main())


@pytest.mark.parametrize("holders", ["come later", "are damaged and go", "are silent and forgotten"])
def test_those_who_hold_nothing_do_not_begin_again_without_those_who_hold_the_newest(tmp_path, holders):
    """Of each stage only one peer wrote the checkpoint: the others remember that there was one."""
    config = small_config(total_steps=7, checkpoint_every=2, checkpoint_copies=1, timing={"stage_lost_s": 20.0})

    async def main():
        simulation = await killed_after(config, tmp_path, 5)
        written = [
            path
            for path in tmp_path.glob("*/checkpoints/stage-*/step-*/parameters.safetensors")
            if path.parent.name in ("step-00000002", "step-00000004")
        ]
        writers = {path.parts[-5]: int(path.parts[-3][-1]) for path in written}
        assert len(writers) == config.num_stages
        whole = {path: path.read_bytes() for path in written}
        if holders == "are damaged and go":
            for path in written:
                cut_short(path.parent)
        second = Simulation(config, seed=14, state_dir=tmp_path)
        second.identities |= simulation.identities
        await second.add_backbone("backbone0")
        for name, stage in ((f"stage{k}.{i}", k) for k in range(config.num_stages) for i in range(2)):
            if holders != "come later" or name not in writers:
                await second.add_stage_peer(name, stage)
        await second.add_trainer("trainer0")
        if holders == "are silent and forgotten":
            for name in writers:
                second.pause(second.nodes[name])
        elif holders == "are damaged and go":
            await asyncio.sleep(10.0)
            for name in writers:
                await second.kill(name)
        await asyncio.sleep(50.0)
        assert not second.commits
        assert "with them the run goes on at step 4" in second.describe()
        for path, content in whole.items():
            path.write_bytes(content)
        for name, stage in writers.items():
            if holders == "are silent and forgotten":
                second.resume(second.nodes[name])
            else:
                await second.add_stage_peer(name, stage)
        await finish_from(second, simulation, 4)

    run_virtual(main())


def test_a_coordinator_remembers_what_it_was_told_of_by_a_peer_that_is_gone(tmp_path):
    """It has no state directory itself, and neither have those that stay."""
    config = small_config(total_steps=7, checkpoint_every=2, checkpoint_copies=1, timing={"stage_lost_s": 20.0})

    async def main():
        simulation = await killed_after(config, tmp_path, 5)
        [written] = tmp_path.glob("*/checkpoints/stage-1/step-00000004/checkpoint.json")
        [witness] = {"stage1.0", "stage1.1"} - {written.parts[-5]}
        second = Simulation(config, seed=14, state_dir=tmp_path)
        second.identities |= simulation.identities
        await second.add_backbone("backbone0")
        for stage in range(config.num_stages):
            await second.add_stage_peer(f"new{stage}", stage, keeps=False)
        for stage in (0, 2):
            await second.add_stage_peer(f"another{stage}", stage, keeps=False)
        await second.add_stage_peer(witness, 1)
        await asyncio.sleep(5.0)
        assert "with them the run goes on at step 4" in second.describe()
        await second.kill(witness)
        await asyncio.sleep(40.0)
        assert not second.commits
        assert "with them the run goes on at step 4" in second.describe()
        await second.close()

    run_virtual(main())


@pytest.mark.parametrize("lie", [{"members": ()}, {"step": 10**6}, {"version_id": "f" * 64}, {"run": "0" * 64}])
def test_a_record_that_nobody_can_have_written_is_obeyed_by_nobody(tmp_path, lie):
    config = small_config(total_steps=4, checkpoint_every=2)

    async def main():
        simulation = Simulation(config, seed=13, state_dir=tmp_path)
        await simulation.start(peers_per_stage=1, trainers=1)
        await simulation.finish()
        await simulation.abandon()
        [path, *_] = sorted(tmp_path.glob("*/milestone.json"))
        true = m.CommitRecord.model_validate_json(path.read_bytes())
        await simulation.close()
        second = Simulation(config, seed=14)
        await second.start(peers_per_stage=1, trainers=1)
        false = true.model_copy(update={"saved": 2, **lie})
        second.nodes["stage1.0"].peer.link.register(m.Holdings, lambda message, frame, progress: lied(second, false))
        await second.finish(within_s=100.0)
        await second.close()

    async def lied(simulation, record):
        member = simulation.nodes["stage1.0"].peer.stage_context.me
        return m.Held(member=member, records=(record,), checkpoint_record=record)

    run_virtual(main())


def test_a_checkpoint_record_that_makes_no_sense_tells_nothing(tmp_path, caplog):
    config = small_config(total_steps=2, checkpoint_every=1)
    contents = [b"{", b"{}", b"\xff", b" " * (2**24 + 1), None, "a pipe"]

    async def main():
        simulation = Simulation(config, seed=13, state_dir=tmp_path)
        for number, content in enumerate(contents):
            path = tmp_path / f"stage{number % 3}.{number // 3}" / "milestone.json"
            path.parent.mkdir(parents=True)
            if content is None:
                path.mkdir()
            elif content == "a pipe":
                os.mkfifo(path)
            else:
                path.write_bytes(content)
        await simulation.start(peers_per_stage=2, trainers=1)
        await simulation.finish()
        await simulation.close()

    run_virtual(main())
    told = [text for record in caplog.records if "milestone.json does not tell" in (text := record.getMessage())]
    assert len(told) == len(contents)
    for line in told:
        assert re.search(r"how far the run had come \(.*\): put an intact copy in its place, or delete it$", line), line
        assert "validation error" not in line
    assert sum("(run: Field required)" in line for line in told) == 1


def test_two_halves_of_a_partition_become_one_lineage():
    """Each half has a candidate and a peer of every stage, so both go on; when they meet, one gives way."""
    config = small_config(total_steps=60)

    async def main():
        simulation = Simulation(config, seed=15)
        await simulation.start(peers_per_stage=2, trainers=2, backbones=2)
        await committed(simulation, 2)
        names = list(simulation.nodes)
        left = [n for n in names if n.endswith("0")]
        simulation.partition(left)
        await committed(simulation, 6)
        await asyncio.sleep(8.0)
        simulation.heal_partition()
        await simulation.finish()
        assert any(len(version_ids) > 1 for version_ids in simulation.version_ids.values()), "both halves should have gone on"
        check(simulation, lineages=True)
        version_ids = {p.committed.versions.newest.version_id for p in simulation.stage_peers()}
        assert len(version_ids) == 1, f"peers ended on several heads: {version_ids}"
        await simulation.close()

    run_virtual(main())


@pytest.mark.parametrize("survives", [min, max])
def test_two_halves_that_both_began_the_run_follow_one_list_of_members(survives):
    """Both records have the head of the initial values. A trainer of the one half ends up with the other's coordinator.

    The list of the higher ballot holds, whichever coordinator is left.
    """
    config = small_config(total_steps=4)

    async def main():
        simulation = Simulation(config, seed=19, forward_s=0.5)
        await simulation.start(peers_per_stage=2, trainers=0, backbones=2)
        simulation.partition([n for n in simulation.nodes if n.endswith("0")])
        async with asyncio.timeout(60.0):
            while not all(p.membership.serving for p in simulation.stage_peers()):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        records = {p.committed.record.ballot: p.committed.record for p in simulation.stage_peers()}
        assert len(records) == 2
        assert len({r.version_id for r in records.values()}) == 1
        remaining = survives(records).coordinator
        lost = next(
            name for name, node in simulation.nodes.items() if name.startswith("backbone") and node.peer.context.peer != remaining
        )
        await simulation.add_trainer("trainer0")
        half = [n for n in simulation.nodes if n.endswith(lost[-1]) and n != "trainer0"]
        simulation.heal_partition()
        simulation.partition([*half, "trainer0"])
        async with asyncio.timeout(60.0):
            while not simulation.nodes["trainer0"].peer._running:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await simulation.kill(lost)
        simulation.heal_partition()
        await simulation.finish(within_s=100.0)
        check(simulation)
        await simulation.close()

    run_virtual(main())


def test_an_operator_may_choose_to_stop_instead_of_splitting():
    """min_peers_per_stage = 2 of 3: the half with the majority goes on, the other waits, and there is one lineage."""
    config = small_config(total_steps=40, min_peers_per_stage=2)

    async def main():
        simulation = Simulation(config, seed=16)
        await simulation.start(peers_per_stage=3, trainers=2, backbones=2)
        await committed(simulation, 2)
        simulation.partition([n for n in simulation.nodes if n.endswith("0")])
        await asyncio.sleep(20.0)
        simulation.heal_partition()
        await simulation.finish()
        check(simulation)
        await simulation.close()

    run_virtual(main())


def test_an_isolated_coordinator_that_re_elects_itself_for_minutes_and_then_heals():
    config = small_config(total_steps=60)

    async def main():
        simulation = Simulation(config, seed=17, forward_s=0.05)
        await simulation.start(peers_per_stage=2, trainers=1, backbones=2)
        await committed(simulation, 1)
        name = next(n for n, node in simulation.nodes.items() if simulation.coordinates(node))
        simulation.isolate(simulation.nodes[name])
        await asyncio.sleep(100.0)
        simulation.rejoin(simulation.nodes[name])
        await asyncio.sleep(30.0)
        await simulation.finish()
        check(simulation)
        await simulation.close()

    run_virtual(main())


@pytest.mark.parametrize("how", ["has not heard", "is cut off"])
def test_a_coordinator_whose_members_have_gone_on_gives_way_though_one_is_not_there(how):
    """Two were elected, each by some members. What the one knows nobody holds any more, and of the newer record one stage's
    only member has not heard yet, or does not answer now."""
    config = small_config(total_steps=12)

    async def main():
        simulation = Simulation(config, seed=21, forward_s=0.05)
        await simulation.start(peers_per_stage=1, trainers=1, backbones=2)
        await committed(simulation, 4)
        late = next(node for node in simulation.nodes.values() if node.peer is simulation.stage_peers(1)[0])
        if how == "is cut off":
            simulation.isolate(late)
        backbones = [node for name, node in simulation.nodes.items() if name.startswith("backbone")]
        link = next(node.peer.link for node in backbones if not simulation.coordinates(node))
        leadership = RunLeadership(link, Ballot(1, link.context.peer), rosters=None)
        leadership.take(simulation.commits[1])
        rival = simulation.commits[3]
        if how == "has not heard":
            late.peer.committed.record = simulation.commits[2]
        with pytest.raises(Demoted, match="a record of step 3"):
            await Lineage(leadership).resolve_rivalry(rival)
        assert how == "is cut off" or late.peer.committed.record.step >= rival.step, "it was not told"
        simulation.rejoin(late)
        await simulation.finish()
        check(simulation)
        await simulation.close()

    run_virtual(main())


@pytest.mark.parametrize("number", [None, 0, 1], ids=["all_live", "the_leader_dies", "another_dies"])
def test_a_version_that_nobody_holds_is_given_up_for_the_newest_that_somebody_does(number, tmp_path, monkeypatch, caplog):
    """Whatever led to it: members that a record lists as ready ask to join without its state, all of a stage that live."""
    config = small_config(total_steps=9, checkpoint_every=3, timing={"stage_lost_s": 8.0})

    async def main():
        simulation = Simulation(config, seed=22, state_dir=tmp_path, forward_s=0.05)
        await simulation.start(peers_per_stage=2, trainers=1)
        await committed(simulation, 5)

        async def resolve_rivalry(lineage, rival):
            lineage._leadership.rival = None
            mine = lineage._leadership.newest
            return restoring_record(simulation.commits[0], era=1, ballot=lineage._leadership.ballot, members=mine.members)

        with monkeypatch.context() as patch:
            patch.setattr(Lineage, "resolve_rivalry", resolve_rivalry)
            coordinator = next(n.peer.election.coordinator for n in simulation.nodes.values() if simulation.coordinates(n))
            coordinator._leadership.rival = simulation.commits[4]
            async with asyncio.timeout(10.0):
                while coordinator.record.era == 0:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        if number is not None:
            keys = [x.key for x in coordinator.record.members[1]]
            await simulation.kill(next(n.name for n in simulation.nodes.values() if n.peer.context.member().key == keys[number]))
        await simulation.finish(within_s=60.0)
        check(simulation, lineages=True)
        assert max(record.era for record in simulation.commits.values()) == 2
        await simulation.close()

    run_virtual(main())
    assert "no member of stages [0, 1, 2] has held the state of step 1 for 8 s" in caplog.text


def test_a_candidate_that_was_cut_off_does_not_begin_the_run_again():
    """Newcomers elect it, and neither they nor it know of a record: those who do must be asked before the first is written."""

    async def main():
        simulation = Simulation(small_config(total_steps=30), seed=1, forward_s=0.2)
        await simulation.start(peers_per_stage=1, trainers=2)
        await committed(simulation, 2)
        simulation.partition(["trainer1"])
        others = [node.address for name, node in simulation.nodes.items() if name != "trainer1"]
        for stage in range(3):
            for other in others:
                simulation.network.cut(simulation.next_address, other)
            await simulation.add_stage_peer(f"stage{stage}.late", stage)
        stood, begun = asyncio.Event(), []

        async def meet(call):
            asks = call.source == simulation.nodes["trainer1"].address
            if asks and isinstance(call.message, m.Commit) and call.message.record.step < 0:
                begun.append(call.message.record)
            elif asks and isinstance(call.message, m.Holdings):  # all that is left before the first record
                simulation.heal_partition()
                stood.set()
            elif asks and isinstance(call.message, m.Hello) and not stood.is_set():
                raise LinkBroken("lost (injected)")

        simulation.before_request.append(meet)
        simulation.dht_network.heal()
        async with asyncio.timeout(60.0):
            await stood.wait()
        await simulation.finish()
        check(simulation)
        assert not begun, "the run was begun again"
        members = max(simulation.commits.items())[1].members
        assert [len(xs) for xs in members] == [2, 2, 2], "the newcomers have joined the run"
        await simulation.close()

    run_virtual(main())
