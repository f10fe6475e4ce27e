"""A run goes on as another one: with another number of stages, of peers, another batch and learning rate."""

from __future__ import annotations

import asyncio
import json

import pytest
import torch
from test_llama import llama_config, plain_loop

from launch.recut import main as recut
from models.registry import factory_of
from swarm.base.config import parse_config_bytes
from swarm.feed.feed import open_feed
from swarm.stage.saved.whole_checkpoint import find_complete
from swarm.testing.simulation.phases import committed
from swarm.testing.simulation.simulation import Simulation
from swarm.testing.virtual_time import run_virtual

OLD = {"precision": "fp64", "total_steps": 8, "checkpoint_every": 2, "checkpoint_copies": 1, "lr_schedule": "constant"}


def plain_losses(*parts):
    """One process that trains by one configuration after another: (configuration, first step, end)."""
    torch.set_num_threads(1)
    return plain_loop(*parts)[0]


def of(config, state_dir):
    # Of this seed a peer looked at its record while it read its state from disk.
    return Simulation(config, seed=2, factory=factory_of(config), feed=open_feed(config, None, None, None), state_dir=state_dir)


@pytest.fixture(scope="module")
def old_run(tmp_path_factory):
    """The state directory of a run of 3 stages that was killed after 5 steps; its newest checkpoint is of step 4."""
    directory = tmp_path_factory.mktemp("old")
    config = llama_config(**OLD)

    async def main():
        simulation = of(config, directory)
        await simulation.start(peers_per_stage=1, trainers=1)
        await committed(simulation, 5)
        await simulation.abandon()

    run_virtual(main())
    return config, directory


def go_on(state_dir, *, peers_per_stage):
    """Losses by step of the run in `state_dir`, as `launch_local --state-dir` would start it."""
    config = parse_config_bytes((state_dir / "run.json").read_bytes())

    async def main():
        simulation = of(config, state_dir)
        await simulation.add_backbone("backbone")
        for stage in range(config.num_stages):
            for index in range(peers_per_stage):
                await simulation.add_stage_peer(f"stage-{stage}-{index}", stage)
        await simulation.add_trainer("trainer-0")
        await simulation.finish()
        await asyncio.sleep(1.0)
        await simulation.close()
        return {record.step + 1: record.loss for record in simulation.commits.values()}

    return config, run_virtual(main())


@pytest.mark.parametrize(("stages", "peers_per_stage", "delay_steps"), [(1, 1, 0), (2, 2, 0), (2, 1, 1)])
def test_a_run_goes_on_with_another_number_of_stages_and_peers(old_run, tmp_path, stages, peers_per_stage, delay_steps):
    old, directory = old_run
    out = tmp_path / "new"
    changes = ["--stages", str(stages), *(["--delay-steps", "1"] if delay_steps else [])]
    assert recut(["--checkpoints", str(directory), "--out", str(out), *changes]) == 0
    _, losses = go_on(out, peers_per_stage=peers_per_stage)
    assert min(losses) == 4, "the step of the checkpoint is where it goes on"
    plain = plain_losses((old, 0, 8))
    # The first delayed step after a fork uses the fork's own parameters; those after it are one step late.
    last = 5 if delay_steps else 8
    assert [losses[step] for step in range(4, last + 1)] == pytest.approx(plain[3:last], rel=1e-8)
    assert sorted(losses) == [4, 5, 6, 7, 8]


def test_a_fork_with_another_batch_and_learning_rate_goes_on_with_the_next_sample(old_run, tmp_path, capsys):
    old, directory = old_run
    out = tmp_path / "new"
    changes = ["--target-batch-size", "32", "--learning-rate", "0.001", "--steps", "5"]
    assert recut(["--checkpoints", str(directory), "--out", str(out), *changes]) == 0
    new, losses = go_on(out, peers_per_stage=1)
    told = capsys.readouterr().out
    assert "at step 2 of 5" in told, "4 steps of 16 samples are 2 of 32"
    assert told.endswith(f"it goes on with: launch_local --state-dir {out}\n")
    plain = plain_losses((old, 0, 4), (new, 2, 5))
    assert [losses[step] for step in range(3, 6)] == pytest.approx(plain[4:], rel=1e-8)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ([], "nothing is changed"),
        (["--seed", "3"], "model and seed stay"),
        (["--stages", "9"], "--stages 9"),
        (["--steps", "4"], "give it more with --steps"),
        (["--target-batch-size", "128"], "before the end of the first batch of 128"),
        (["--set", "model_options.hidden_size=16"], "does not fit the checkpoint"),
    ],
)
def test_what_cannot_be_forked_is_one_line_and_leaves_nothing(old_run, tmp_path, capsys, changes, named):
    _, directory = old_run
    out = tmp_path / "new"
    assert recut(["--checkpoints", str(directory), "--out", str(out), *changes]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert named in line
    assert not out.exists()


def test_a_fork_says_when_it_sees_samples_again(old_run, tmp_path, capsys):
    _, directory = old_run
    assert (
        recut(
            [
                "--checkpoints",
                str(directory),
                "--out",
                str(tmp_path / "new"),
                "--target-batch-size",
                "24",
                "--steps",
                "9",
                "--log-format",
                "json",
            ]
        )
        == 0
    )
    first = json.loads(capsys.readouterr().out.splitlines()[0])
    assert first["step"] == 2
    assert first["message"].endswith("it sees the last 16 samples again")


def test_a_fork_keeps_moments_in_8_bits_or_changes_how_they_are_kept(tmp_path):
    old = llama_config(**OLD | {"precision": "fp32", "optimizer": "adamw8bit"})

    async def main():
        simulation = of(old, tmp_path / "old")
        await simulation.start(peers_per_stage=1, trainers=1)
        await committed(simulation, 5)
        await simulation.abandon()

    run_virtual(main())
    losses = {}
    for name, changes in (("alike", ["--stages", "2"]), ("exact", ["--stages", "2", "--optimizer", "adamw"])):
        assert recut(["--checkpoints", str(tmp_path / "old"), "--out", str(tmp_path / name), *changes]) == 0
        if name == "alike":
            before, after = (
                {key: value for part in find_complete([tmp_path / run], step=4) for key, value in part.moments().items()}
                for run in ("old", "alike")
            )
            assert before.keys() == after.keys()
            assert all(torch.equal(before[key], after[key]) for key in before), "codes are carried over as they are"
        _, losses[name] = go_on(tmp_path / name, peers_per_stage=1)
    alike, exact = ([losses[name][step] for step in range(5, 9)] for name in ("alike", "exact"))
    assert exact == pytest.approx(alike, rel=1e-2)
