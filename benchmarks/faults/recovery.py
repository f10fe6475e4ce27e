"""A peer is killed (kill -9) at each point of an averaging round: how soon do the others commit, and what?

Real processes on the loopback: a backbone, four peers of one stage and a trainer, all as their launchers start them, but
the stage's peers watch their own messages (`recovery_peer.py`) so that one dies exactly there: before its round, with half
of its slices out, with all of them out and sums still to come, or when it holds the average; once a member, once the
stage's leader. Time runs from the kill to the commit record. Then every survivor is asked for the average that the record
names: all must hold the same bits, and they must be the sum over the step's micro-batches, computed here in one process.

With `--hivemind-python` beside it: one of four averagers of hivemind 1.1.12 is killed after a part of a round's usual time
(`allreduce_hivemind.py`); its survivors have `--deadline` seconds. Its interpreter: see `allreduce.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.averages.big_stage import DATA, MODEL, WIDTH, BigFactory
from benchmarks.faults.recovery_peer import BEFORE, LEADER, MEMBER, PHASES, Death
from benchmarks.report import machine, publish
from swarm.base.config import RunConfig
from swarm.base.ids import Address, Ticket
from swarm.feed.feed import open_feed
from swarm.net.http.transport import HttpTransport
from swarm.testing.real_swarm import RealSwarm
from swarm.wire import messages as m
from swarm.wire.compression import decode_tensor
from swarm.wire.framing import Frame

PEERS = 4
#: The step whose round is disturbed; those before have connections and measurements made.
STEP = 2
TICKETS = 16
#: A peer that happened to compute none of them has no slices to send; then the run is made again.
TRIES = 3
TOLERANCE = 1e-5
PART_ELEMENTS = 2**22
ASK_S = 20.0
#: Parts of a usual round after which one of hivemind's averagers is killed.
PARTS = (0.0, 0.25, 0.5, 0.75, 0.95)
HIVEMIND_TIMEOUT_S = 1500.0


def configuration(num_elements: int) -> RunConfig:
    return RunConfig(
        name="recovery",
        model=MODEL,
        model_options={"num_elements": num_elements, "forward_s": 0.02, "backward_s": 0.04, "dense": True},
        num_stages=1,
        micro_batch_size=1,
        target_batch_size=TICKETS,
        total_steps=STEP + 1,
        precision="fp32",
        compression="none",
        eval_samples=0,
        checkpoint_every=0,
        min_peers_per_stage=PEERS - 1,
        warmup_steps=0,
        learning_rate=1e-12,  # changes no bit of the parameters, so that the expected sum needs no optimizer
    )


def expected(config: RunConfig) -> torch.Tensor:
    """The disturbed step's gradient sum, as one process computes it."""
    torch.set_num_threads(1)
    idle = config.model_copy(update={"model_options": {**config.model_options, "forward_s": 0.0, "backward_s": 0.0}})
    module = BigFactory(idle).build(0)
    feed = open_feed(config, DATA, None, None)
    for index in range(TICKETS):
        batch = feed.batch(Ticket(STEP, index))
        inputs, labels = ({n: torch.from_numpy(a) for n, a in part.items()} for part in (batch.inputs, batch.labels))
        module(inputs, labels)["loss_sum"].backward()
    gradient = module.weight.grad
    assert gradient is not None
    return gradient


@dataclass
class Outcome:
    """What a kill led to."""

    seconds: float
    record: m.CommitRecord
    #: How far the victim was: counts of slices.
    slices: dict[str, int]
    #: Distinct averages among the survivors, and the distance of the worst from the expected sum, over its norm.
    num_averages: int
    distance: float
    num_survivors: int


async def disturbed(death: Death, config: RunConfig, right: torch.Tensor, directory: Path) -> Outcome | None:
    """None if nobody died."""
    async with RealSwarm(directory, config, data=DATA) as swarm:
        await swarm.spawn("backbone", "backbone")
        names = [f"stage-0-{index}" for index in range(PEERS)]
        for name in names:
            await swarm.spawn(name, "stage", "--stage", 0, *death.words(), entry="benchmarks.faults.recovery_peer:main")
        for name in names:
            await swarm.serving(name)
        await swarm.spawn("trainer-0", "trainer")
        await swarm.step(STEP + 1)
        committed_at = time.monotonic()
        note = death.read()
        if note is None:
            return None
        addresses = [await swarm.serving(name) for name in names]
        survivors = [x for x in addresses if death.is_survived or x.port != note["peer"]]
        transport = HttpTransport()
        try:
            record = await record_of(transport, survivors[0])
            averages = [await average_of(transport, x, record, right.numel()) for x in survivors]
        finally:
            await transport.close()
    distance = max(float((average - right).norm() / right.norm()) for average in averages)
    num_averages = 1 + sum(not torch.equal(average, averages[0]) for average in averages)
    return Outcome(committed_at - note.pop("at"), record, note, num_averages, distance, len(survivors))


async def record_of(transport: HttpTransport, address: Address) -> m.CommitRecord:
    reply = (await transport.call(address, Frame(m.Hello()), stall_s=ASK_S)).message
    if not isinstance(reply, m.RunInfo) or reply.record is None or reply.record.step != STEP:
        raise SystemExit(f"{address} does not know the record of step {STEP}: {reply}")
    return reply.record


async def average_of(transport: HttpTransport, address: Address, record: m.CommitRecord, total: int) -> torch.Tensor:
    """The average that the record names, as the peer at `address` holds it."""
    flat = torch.empty(total)
    for offset in range(0, total, PART_ELEMENTS):
        request = m.FetchSum(
            run=record.run, stage=0, step=STEP, digest=record.results[0].sum_digest, offset=offset, length=PART_ELEMENTS
        )
        frame = await transport.call(address, Frame(request), stall_s=ASK_S)
        if not isinstance(frame.message, m.SumCopy):
            raise SystemExit(f"{address} does not hold the average that was committed: {frame.message}")
        part = decode_tensor(*frame.only_tensor())
        flat[offset : offset + part.numel()] = part
    return flat


def row_of(death: Death, outcome: Outcome, deadline_s: float) -> dict[str, Any]:
    record, slices = outcome.record, outcome.slices
    is_whole = record.results[0].num_tickets == TICKETS and not record.skipped
    return {
        "killed": "nobody" if death.is_survived else death.who,
        "when": "(whole round)" if death.is_survived else death.phase,
        "its slices out, back": f"{slices['written']}, {slices['answered']}",
        "to commit s": outcome.seconds,
        "in time": "yes" if outcome.seconds <= deadline_s else "NO",
        "repeated": record.reopened,
        "survivors": outcome.num_survivors,
        "different averages": outcome.num_averages,
        "off the mean by": outcome.distance,
        "every ticket once": "yes" if is_whole else "NO",
    }


# ---------------------------------------------------------------------------------------------------- hivemind


def hivemind(options: argparse.Namespace) -> list[dict[str, Any]]:
    given = {
        "peers": PEERS,
        "elements": options.elements,
        "compression": "none",
        "parts": options.parts,
        "averager": {},
        "deadline_s": options.deadline,
    }
    done = subprocess.run(
        [options.hivemind_python, "-W", "ignore", "-m", "benchmarks.averages.allreduce_hivemind", json.dumps(given)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=HIVEMIND_TIMEOUT_S,
        check=True,
    )
    return json.loads(done.stdout)


def hivemind_row(kill: dict[str, Any], num_elements: int) -> dict[str, Any]:
    every = max(1, num_elements // 1000)
    own = [torch.randn(num_elements, generator=torch.Generator().manual_seed(i))[::every] for i in range(PEERS)]
    survivors = [x for x in kill["survivors"] if x is not None]
    samples = [torch.tensor(x["sample"]) for x in survivors]
    seconds = [x["seconds"] for x in survivors]
    outcomes = sorted({x["outcome"].partition(":")[0] for x in survivors} | ({"hung"} if None in kill["survivors"] else set()))

    def off(mean: torch.Tensor) -> float:
        return max((float((sample - mean).norm() / mean.norm()) for sample in samples), default=float("inf"))

    return {
        "killed after": "before its round" if not kill["part"] else f"{kill['part']:.0%} of a round",
        "usual round s": kill["usual_s"],
        "survivors' s": f"{min(seconds):.2f} to {max(seconds):.2f}" if seconds else "-",
        "they say": "; ".join(outcomes),
        "different results": len({tuple(x["sample"]) for x in survivors}),
        "off the mean of survivors by": off(torch.stack(own[:-1]).mean(dim=0)),
        "off the mean of all by": off(torch.stack(own).mean(dim=0)),
        "old values": f"{max(part_equal(s, own[i]) for i, s in enumerate(samples)):.0%}" if samples else "-",
    }


def part_equal(sample: torch.Tensor, own: torch.Tensor) -> float:
    """The part of the elements that are what the peer had before."""
    return float((sample == own).double().mean())


# ---------------------------------------------------------------------------------------------------- all


def deaths(options: argparse.Namespace, directory: Path) -> list[Death]:
    """Nobody's first: how long a round takes from when a member is told to start it."""
    found = [Death(STEP, BEFORE, MEMBER, str(directory / "nobody"), is_survived=True)]
    for who in options.who:
        found += [Death(STEP, phase, who, str(directory / f"{who} {phase}")) for phase in options.phases]
    return found


async def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    config = configuration(options.elements)
    right = expected(config)
    rows = []
    with tempfile.TemporaryDirectory() as text:
        for number, death in enumerate(deaths(options, Path(text))):
            for attempt in range(TRIES):
                outcome = await disturbed(death, config, right, Path(text) / f"{number}.{attempt}")
                if outcome is not None:
                    break
            else:
                raise SystemExit(f"{death.who}, {death.phase}: nobody came to that point in {TRIES} runs")
            rows.append(row_of(death, outcome, config.timing.average_s))
            print("  " + json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def draw(rows: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]]) -> Any:
    def on(figure: Any) -> None:
        axes = figure.subplots()
        names = [f"{row['killed']}: {row['when']}" for row in rows]
        bars = axes.barh(names, [row["to commit s"] for row in rows], label="swarm: kill to commit")
        axes.bar_label(bars, fmt="%.2f", padding=2)
        if theirs:
            names = [f"hivemind: {'before' if not kill['part'] else format(kill['part'], '.0%')}" for kill in theirs]
            longest = [max((x["seconds"] for x in kill["survivors"] if x), default=0.0) for kill in theirs]
            axes.barh(names, longest, color="0.6", label="hivemind 1.1.12: kill to the last survivor's result")
        axes.invert_yaxis()
        axes.set_xlabel("seconds")
        axes.set_xscale("log")
        axes.legend(fontsize=8)

    return on


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=8_000_000, metavar="N", help="fp32 values (default: 8000000)")
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=list(PHASES), metavar="WHEN", help=f"of {PHASES}")
    parser.add_argument("--who", nargs="+", choices=(MEMBER, LEADER), default=[MEMBER, LEADER], help="(default: both)")
    parser.add_argument("--hivemind-python", metavar="PYTHON", help="interpreter that has hivemind 1.1.12")
    parser.add_argument("--deadline", type=float, default=60.0, metavar="S", help="of hivemind's survivors (default: 60)")
    parser.add_argument(
        "--parts",
        nargs="+",
        type=float,
        default=list(PARTS),
        metavar="X",
        help=f"of a round after which one of hivemind's is killed (default: {PARTS})",
    )
    parser.add_argument("--name", default="recovery", help="of the result files (default: recovery)")
    options = parser.parse_args()
    if options.elements % WIDTH:
        parser.error(f"--elements is a multiple of {WIDTH}")
    return options


def main() -> int:
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that no process is left behind
    timing = configuration(options.elements).timing
    facts = machine() | {
        "values": f"{options.elements} fp32 in the stage, {PEERS} peers, {TICKETS} micro-batches a step",
        "deadline": f"{timing.average_s:g} s for a round; a call waits {timing.stall_s:g} s while nothing advances",
        "mean": f"sum over all {TICKETS} micro-batches: those of the dead peer are computed again by the survivors",
    }
    rows = asyncio.run(measure(options))
    tables = {"A peer is killed in a round; the others": rows}
    theirs: list[dict[str, Any]] = []
    if options.hivemind_python:
        theirs = hivemind(options)
        tables["hivemind 1.1.12: one of four averagers is killed"] = [hivemind_row(x, options.elements) for x in theirs]
    publish(options.name, facts=facts, tables=tables, details={"hivemind": theirs}, draw=draw(rows, theirs))
    is_right = all(
        row["different averages"] == 1 and row["off the mean by"] <= TOLERANCE and "NO" not in row.values() for row in rows
    )
    return 0 if is_right else 1


if __name__ == "__main__":
    raise SystemExit(main())
