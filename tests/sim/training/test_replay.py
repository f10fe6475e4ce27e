"""One ticket again in one process: it agrees with what the swarm recorded, and names the stage whose peer computed otherwise."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from test_llama import llama_config

from launch.replay import main as replay
from launch.run.ticket_files import TicketFiles
from models.registry import factory_of
from swarm.feed.feed import open_feed
from swarm.testing.simulation.phases import until
from swarm.testing.simulation.simulation import Simulation
from swarm.testing.virtual_time import run_virtual

PEERS = 2


def run(config, state_dir, *, alter=None):
    """Train to the end; `alter` is called with a peer of stage 1 when it has committed step 4."""

    feed = open_feed(config, None, None, None)
    config = config.model_copy(update={"data_digest": feed.data_digest})

    async def main():
        simulation = Simulation(config, seed=5, factory=factory_of(config), feed=feed, state_dir=state_dir)
        await simulation.add_backbone("backbone")
        for stage in range(config.num_stages):
            for index in range(PEERS):
                node = await simulation.add_stage_peer(f"stage-{stage}-{index}", stage)
                if alter is not None and (stage, index) == (1, 0):
                    held = node.peer.committed
                    held.on_commit.append(lambda record, held=held: alter(held) if record.step + 1 == 4 else None)
        files = TicketFiles(state_dir / "trainer-0", config)
        trainer = await simulation.add_trainer("trainer-0", on_ticket=files.append)
        await until(lambda: trainer.peer.finished, "the run is over")
        peer = simulation.nodes["stage-1-0"].peer.context.peer
        await simulation.close()
        return peer

    return run_virtual(main())


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    directory = tmp_path_factory.mktemp("healthy")
    run(llama_config(total_steps=6, checkpoint_every=4, compression="8bit", eval_samples=0), directory)
    return directory


def said(capsys):
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return lines[:-1], lines[-1]


@pytest.mark.parametrize("step", [1, 5])
def test_what_the_swarm_computed_is_computed_again(healthy, step, capsys):
    assert replay(["--checkpoints", str(healthy), "--step", str(step), "--log-format", "json"]) == 0
    stages, verdict = said(capsys)
    assert verdict["parted"] is False
    assert [line["stage"] for line in stages] == [0, 1, 2]
    assert verdict["message"].endswith("the swarm computed the same, within 0.001 (computed on cpu as there)")
    for line in stages:
        assert (line["computed_on"], line["computed_on_here"]) == ("cpu", "cpu"), "whatever devices this machine has"
        names = {"parameters", "loss" if line["stage"] == 2 else "output", *(["gradient"] if line["stage"] else [])}
        for name in names:
            assert line[name] == pytest.approx(line[f"{name}_here"], rel=1e-6), (line["stage"], name)


def test_a_peer_whose_weights_were_altered_is_named(tmp_path, capsys):
    """A few numbers of what it computes with; what it shares and what others compare is as it should be."""

    def alter(held):
        parameters = held.versions.newest.parameters
        name = next(name for name in parameters if name.endswith("o_proj.weight"))
        parameters[name] = torch.where(parameters[name].abs() > 0.2, 8.0, 1.0).mul(parameters[name]).detach().requires_grad_()

    peer = run(llama_config(total_steps=6, checkpoint_every=4, compression="8bit"), tmp_path, alter=alter)
    verdicts = []
    for index in range(4):
        code = replay(["--checkpoints", str(tmp_path), "--step", "5", "--index", str(index), "--log-format", "json"])
        stages, verdict = said(capsys)
        altered = stages[1]["peer"] == peer
        assert code == (1 if altered else 0), f"ticket {index}: {verdict}"
        if altered:
            assert (verdict["stage"], verdict["peer"], verdict["at"]) == (1, peer, "output")
        verdicts.append(altered)
    assert any(verdicts), "the altered peer computed no ticket of the step"
    assert replay(["--checkpoints", str(tmp_path), "--step", "1", "--quiet"]) == 0, "before that it was sound"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
def test_another_kind_of_device_accuses_nobody(healthy, capsys):
    """Its numbers are others where the 8-bit wire rounds the other way; what counts as none follows from that."""
    argv = ["--checkpoints", str(healthy), "--step", "5", "--device", "cuda:0", "--log-format", "json"]
    assert replay(argv) == 0
    stages, verdict = said(capsys)
    assert verdict["tolerance"] == 6.4e-3
    assert "stages 0, 1, 2 on cuda here, on cpu there" in verdict["message"]
    names = ("output", "parameters", "gradient", "loss")
    pairs = [(line[name], line[f"{name}_here"]) for line in stages for name in names if line.get(name) is not None]
    worst = max(abs(one / other - 1) for one, other in pairs)
    assert 0 < worst < 6.4e-3 / 4, f"{worst:.1e}: the default leaves little room"


def test_an_overflow_has_no_norm_and_stops_nobody(tmp_path, capsys):
    """With fp16 the first tickets overflow, since the loss scale begins high; they are recorded like any other."""
    run(llama_config(total_steps=4, precision="fp16", sequence_length=64), tmp_path)
    assert replay(["--checkpoints", str(tmp_path), "--step", "1", "--log-format", "json"]) == 0
    stages, _ = said(capsys)
    assert any(line["parameters"] is None for line in stages), "nothing overflowed"


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (
            ["--step", "4"],
            "no ticket of step 4 is recorded in {0}: trainers record those that begin where "
            "the configuration has a checkpoint written; here are steps 1, 5",
        ),
        (["--step", "5", "--index", "9"], "ticket 9 of step 5 is not recorded in {0}, others are: 0, 1, 2, 3"),
        (["--step", "5", "--data", "{1}"], "text.txt is not the run's: its digest is"),
    ],
)
def test_what_cannot_be_replayed_is_one_line(healthy, tmp_path, argv, named, capsys):
    text = tmp_path / "text.txt"
    text.write_text("other words " * 100)
    argv = [word.format(healthy, text) for word in argv]
    assert replay(["--checkpoints", str(healthy), "--log-level", "warning", *argv]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert named.format(healthy) in line


def test_a_step_whose_checkpoint_is_gone_says_which_it_needs(healthy, tmp_path, capsys):
    left = tmp_path / "left"
    shutil.copytree(healthy, left)
    for directory in left.glob("stage-1-*/checkpoints/stage-1/step-00000004"):
        shutil.rmtree(directory)
    assert replay(["--checkpoints", str(left), "--step", "5"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "step 5 begins with the parameters after step 4: no checkpoint of step 4" in line
    assert "[1]" in line
