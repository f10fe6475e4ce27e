"""How soon does a run commit again when most of its peers have gone at once, and how fast is it then?

The real peer code in virtual time on the in-memory network (`tests/sim`): stages of `--peers` peers each, of which `--left`
stay. What happens to the others: `killed`, their processes are gone and connections to them are refused; `preempted`, their
machines are gone and nothing answers; `stopped`, they take connections and say nothing. `joiners`: nobody dies, but `--joiners`
peers that hold the state and never answer at the addresses that they announce ask to be listed, and then go.

Prints for each the first commit after it (with joiners the longest time between two), in multiples of `stall_s`; the tickets
that were sent again until then; and the time of a step afterwards against a run that had only the peers that stayed, from its
beginning.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import random
import statistics
import sys
import time
from typing import Any

import torch

from benchmarks.report import machine, publish
from swarm.testing.simulation.simulation import Simulation
from swarm.testing.simulation.small_model import small_config
from swarm.testing.virtual_time import run_virtual

HOW = ("killed", "preempted", "stopped", "joiners")
#: Steps before the peers go, and steps that are measured after the first one that commits again.
BEFORE, AFTER = 3, 6
JOINERS_STAY_S = 5.0


async def _until_step(simulation: Simulation, step: int, within_s: float) -> float:
    """The loop's time at which `step` had committed somewhere."""
    loop = asyncio.get_running_loop()
    until = loop.time() + within_s
    while max(simulation.commits, default=-1) < step:
        if loop.time() > until:
            raise SystemExit(f"step {step} did not commit within {within_s:g} s: {simulation.describe()}")
        await asyncio.sleep(0.01)
    return loop.time()


async def _run(how: str, *, stages: int, peers: int, left: int, joiners: int, seed: int, within_s: float) -> dict[str, Any]:
    config = small_config(num_stages=stages, total_steps=1000, target_batch_size=4 * 2 * peers)
    simulation = Simulation(config, seed=seed)
    loop = asyncio.get_running_loop()
    try:
        await simulation.start(peers_per_stage=left if how in ("none", "joiners") else peers, trainers=1)
        await _until_step(simulation, BEFORE - 1, 300.0)
        await asyncio.sleep(0.05)  # in the middle of a step
        coming = None
        if how == "joiners":
            coming = asyncio.ensure_future(simulation.silent_joiners(joiners, for_s=JOINERS_STAY_S))
            await _until_step(simulation, max(simulation.commits) + 1, within_s)  # the record after the next one may list them
        elif how != "none":
            chosen = random.Random(seed)
            for stage in range(stages):
                for i in chosen.sample(range(peers), peers - left):
                    await simulation.fell(f"stage{stage}.{i}", how)
        went_at, step = loop.time(), max(simulation.commits) + 1
        first_s = await _until_step(simulation, step, within_s) - went_at
        while coming is not None and not (coming.done() and loop.time() > went_at + 2 * JOINERS_STAY_S):
            step, began = step + 1, loop.time()
            first_s = max(first_s, await _until_step(simulation, step, within_s) - began)
        retries = sum(x.retries for n in simulation.nodes.values() for x in n.reports if x.record.step == step)
        times = [await _until_step(simulation, step + 1 + i, within_s) for i in range(AFTER)]
        steps = [b - a for a, b in itertools.pairwise(times)]
        step_s = statistics.median(steps)
        return {"first_s": first_s, "stall_s": config.timing.stall_s, "retries": retries, "step_s": step_s}
    finally:
        await simulation.abandon()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--peers", type=int, default=32, help="of each stage (default 32)")
    parser.add_argument("--left", type=int, default=2, help="of each stage afterwards (default 2)")
    parser.add_argument("--joiners", type=int, default=60, help="that never answer (default 60)")
    parser.add_argument("--how", nargs="+", default=list(HOW), choices=HOW)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each (default 3)")
    parser.add_argument("--within", type=float, default=180.0, metavar="S", help="virtual seconds to wait for a commit")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.CRITICAL)
    rows = []
    for how in options.how:
        for seed in range(options.seeds):
            began = time.monotonic()
            shape = {"stages": options.stages, "peers": options.peers, "left": options.left, "joiners": options.joiners}
            found = run_virtual(_run(how, seed=seed, within_s=options.within, **shape))
            alone = run_virtual(_run("none", seed=seed, within_s=options.within, **shape))
            rows.append(
                {
                    "what": how,
                    "seed": seed,
                    "first commit after s": round(found["first_s"], 2),
                    "x stall_s": round(found["first_s"] / found["stall_s"], 2),
                    "sent again": found["retries"],
                    "step s": round(found["step_s"], 3),
                    "step s of those left": round(alone["step_s"], 3),
                    "took s": round(time.monotonic() - began, 1),
                }
            )
            print(rows[-1], flush=True)
    publish("dead_peers", facts={**machine(), **vars(options)}, tables={"dead peers": rows})
    return 1 if any(row["x stall_s"] > 3 for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
