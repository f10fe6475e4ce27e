"""Kill every process of a run at a random moment, again and again: does the run that goes on lose or change anything?

A backbone, 2 stages x 2 peers and a trainer, fp64 without compression, a checkpoint every few steps. Each life ends by
SIGKILL to all processes at once, at a random moment: some while they start, most while they train; then all start again
with their state directories. Checked: a life goes on at the newest checkpoint that was complete on disk when the one
before was killed; every loss it reports equals that of a run left alone, and of one plain process; the metrics file holds
each step once. Exit code 1 if not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.plain_loop import adamw, one_step
from benchmarks.report import machine, publish
from models.registry import factory_of
from swarm.base.config import RunConfig
from swarm.base.errors import ConfigError
from swarm.feed.feed import open_feed
from swarm.stage.saved.whole_checkpoint import find_complete
from swarm.testing.real_swarm import RealSwarm, tiny_config

TOLERANCE = 1e-10
#: This part of the lives ends while its processes start, within this time; the others while they train.
EARLY, START_S = 0.25, 3.0


def newest_checkpoint(state_root: Path) -> int:
    """Steps in the newest checkpoint that is complete over all stages; 0 if there is none."""
    try:
        return find_complete([state_root])[0].record.step + 1
    except ConfigError:
        return 0


async def live_and_die(swarm: RealSwarm, rng: random.Random, longest_s: float) -> dict[str, Any]:
    """One life; says what was on disk before and after, and what it reported."""
    before = newest_checkpoint(swarm.state_root) if swarm.state_root.exists() else 0
    began = time.monotonic()
    begin = asyncio.ensure_future(swarm.begin())
    if rng.random() < EARLY:
        phase = "while it starts"
        await asyncio.sleep(rng.uniform(0.0, START_S))
    else:
        phase = "while it trains"
        await begin
        await swarm.step(before + 1, within_s=300.0)
        await asyncio.sleep(rng.uniform(0.0, longest_s))
    begin.cancel()
    await asyncio.gather(begin, return_exceptions=True)
    lasted_s = time.monotonic() - began
    await swarm.kill_all()
    steps = [(line["step"], line["loss"]) for line in swarm.steps]
    left = newest_checkpoint(swarm.state_root)
    return {"on_disk": before, "lasted_s": lasted_s, "phase": phase, "steps": steps, "left_on_disk": left}


def plain_losses(config: RunConfig) -> list[float]:
    """The same training in this process."""
    torch.set_num_threads(1)
    feed = open_feed(config, None, None, None)
    model = factory_of(config).build_whole()  # type: ignore[attr-defined]
    optimizer = adamw(config, model)
    return [one_step(config, feed, model, optimizer, step)[0] for step in range(config.total_steps)]


async def measure(directory: Path, config: RunConfig, rng: random.Random, kills: int, longest_s: float) -> dict[str, Any]:
    lives = []
    async with RealSwarm(directory / "killed", config) as swarm:
        for number in range(1, kills + 1):
            lives.append(life := await live_and_die(swarm, rng, longest_s))
            told = [step for step, _ in life["steps"]]
            print(
                f"life {number}: checkpoint of step {life['on_disk']}, reported {told[:1]}..{told[-1:]}, killed after "
                f"{life['lasted_s']:.1f} s",
                flush=True,
            )
        before = newest_checkpoint(swarm.state_root)
        await swarm.begin()
        assert await swarm.children["trainer-0"].ended == 0, swarm.log("trainer-0")
        lives.append(
            {
                "on_disk": before,
                "lasted_s": None,
                "left_on_disk": config.total_steps,
                "steps": [(line["step"], line["loss"]) for line in swarm.steps],
            }
        )
        await swarm.kill_all()
        config = swarm.config
        metrics = [json.loads(text) for text in swarm.metrics.read_text().splitlines()]
        (directory / "left").mkdir()
        swarm.take_up(directory / "left", config)
        await swarm.begin()
        assert await swarm.children["trainer-0"].ended == 0, swarm.log("trainer-0")
        left_alone = {line["step"]: line["loss"] for line in swarm.steps}
    return {"config": config, "lives": lives, "metrics": metrics, "left_alone": left_alone}


def judge(seen: dict[str, Any]) -> dict[str, tuple[bool, str]]:
    """Each check with whether it held, and its number."""
    config, lives, left_alone = seen["config"], seen["lives"], seen["left_alone"]
    plain = dict(enumerate(plain_losses(config), start=1))
    wrong_starts = [x for x in lives if x["steps"] and x["steps"][0][0] != x["on_disk"] + 1]
    gaps = [x for x in lives if [s for s, _ in x["steps"]] != list(range(x["on_disk"] + 1, x["on_disk"] + 1 + len(x["steps"])))]
    told = [(step, loss) for x in lives for step, loss in x["steps"]]
    to_left_alone = max(abs(loss - left_alone[step]) / abs(left_alone[step]) for step, loss in told)
    to_plain = max(abs(loss - plain[step]) / abs(plain[step]) for step, loss in told)
    once = [line["step"] for line in seen["metrics"]] == list(range(1, config.total_steps + 1))
    in_file = max(abs(line["loss"] - left_alone[line["step"]]) / abs(line["loss"]) for line in seen["metrics"])
    lost = [life["steps"][-1][0] - life["left_on_disk"] for life in lives if life["steps"]]
    return {
        "lives that went on elsewhere than at the newest complete checkpoint": (not wrong_starts, str(len(wrong_starts))),
        "lives with a step left out or told twice": (not gaps, str(len(gaps))),
        "losses of all lives against the run left alone, relative": (to_left_alone < TOLERANCE, f"{to_left_alone:.1e}"),
        "losses of all lives against one plain process, relative": (to_plain < TOLERANCE, f"{to_plain:.1e}"),
        "the metrics file holds each step once": (once, str(once)),
        "losses in the metrics file against the run left alone, relative": (in_file < TOLERANCE, f"{in_file:.1e}"),
        f"steps computed again after a kill, at most (checkpoint every {config.checkpoint_every})": (True, str(max(lost))),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="times that everyone is killed (default 20)")
    parser.add_argument("--steps", type=int, default=500, help="steps of the run (default 500)")
    parser.add_argument("--every", type=int, default=5, help="steps between checkpoints (default 5)")
    parser.add_argument(
        "--longest", type=float, default=4.0, metavar="S", help="a life ends within this time after its first step, in seconds"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the moments (default 1)")
    options = parser.parse_args()
    facts: dict[str, Any] = {**machine(), "kills": options.kills, "seed": options.seed}
    config = tiny_config(total_steps=options.steps, checkpoint_every=options.every)
    with tempfile.TemporaryDirectory() as directory:
        seen = asyncio.run(measure(Path(directory), config, random.Random(options.seed), options.kills, options.longest))
    checks = judge(seen)
    lives = seen["lives"]
    facts |= {
        "lives that reported a step": sum(bool(x["steps"]) for x in lives),
        "median life (s)": round(statistics.median(x["lasted_s"] for x in lives[:-1]), 1),
        "violations": sum(not held for held, _ in checks.values()),
    }
    rows = [{"check": name, "found": found, "held": "yes" if held else "NO"} for name, (held, found) in checks.items()]

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for number, life in enumerate(lives, start=1):
            if life["steps"]:
                axes.plot([s for s, _ in life["steps"]], [loss for _, loss in life["steps"]], lw=1, color=f"C{number % 10}")
            axes.axvline(life["on_disk"], color="0.85", lw=0.5)
        axes.set(xlabel="step", ylabel="loss (nats per token)", title=f"{len(lives)} lives of one run, over each other")

    publish("resume", facts=facts, tables={"checks": rows}, details={"lives": lives}, draw=draw)
    return 0 if facts["violations"] == 0 else 1


if __name__ == "__main__":
    raise SystemExit(main())
