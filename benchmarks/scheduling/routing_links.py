"""`routing.py --links`: equal peers behind slower and slower lines beside a fast one: does anyone make the swarm slower?

Two stages; the first takes a fifth of the second's time, so the second is the pace. There one peer has a fast line, and in each
cell another one of the same speed has a line of its own rate. Virtual time with the product's peers, trainer and router; with
`--real` real processes, each in a network namespace with a token bucket.

Bound: a peer is occupied by a ticket for the longer of its compute and its line's busier direction. A step with `n` tickets
takes at least the least `d` for which the peers together can serve `n` in `d`, where the first ticket of a peer takes one
whole trip and each other one that it is occupied (the tail). Without the tail it is the sum of 1 / occupied.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.report import machine, publish
from benchmarks.timed_model import DATA, MODEL
from launch.status import ask
from swarm.base.config import RunConfig
from swarm.base.ids import Address
from swarm.base.timing import TIMING_PRESETS, Timing
from swarm.net.http.transport import HttpTransport
from swarm.policy.throughput import rate_of
from swarm.testing.launched import Launched
from swarm.testing.processes import free_port
from swarm.testing.shaped_namespaces import DRIVER, Place, namespaces
from swarm.testing.simulation.phases import Log, kind
from swarm.testing.simulation.simulation import Simulation
from swarm.testing.simulation.small_model import WIDTH, small_config
from swarm.testing.virtual_time import run_virtual
from swarm.wire import messages as m

#: Bytes per second of the second peer's line; 0: there is none.
RATES = (0.0, 1e6, 400e3, 150e3, 60e3, 25e3, 10e3)
#: Samples of a ticket: 33 kB in each direction, and the labels.
ROWS = 688
TICKET_BYTES = ROWS * (WIDTH + 1) * 8
COMPUTE_S = 0.3
REAL_RATE, REAL_WIDTH, FAST_RATE = 2e6, 65536, 1e9


def least_s(num_tickets: int, occupied: list[float], trips: list[float]) -> float:
    """The least time in which peers serve so many tickets, each of which occupies them so long and is so long on its trip."""
    low, high = 0.0, num_tickets * min(occupied) + max(trips)
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        served = sum(1 + (middle - trip) // each for each, trip in zip(occupied, trips, strict=True) if middle >= trip)
        low, high = (low, middle) if served >= num_tickets else (middle, high)
    return high


def simulated(job: tuple[float, int, int]) -> dict[str, Any]:
    """Steps of the swarm whose second peer has a line of that rate."""
    rate, num_tickets, num_steps = job
    found: dict[str, Any] = {}

    async def main() -> None:
        config = small_config(
            num_stages=2,
            total_steps=num_steps,
            micro_batch_size=ROWS,
            target_batch_size=ROWS * num_tickets,
            timing=Timing(**TIMING_PRESETS["wan"]),
        )
        simulation = Simulation(config, forward_s=COMPUTE_S / 3)
        trained = Log(simulation, kind(m.Train))
        await simulation.add_backbone("backbone0")
        first = await simulation.add_stage_peer("stage0.0", 0)
        first.slowness = 0.2
        await simulation.add_stage_peer("stage1.0", 1)
        if rate:
            slow = await simulation.add_stage_peer("stage1.1", 1)
            simulation.network.line(slow.address, up=rate, down=rate)
        await asyncio.sleep(5.0)
        trainer = await simulation.add_trainer("trainer0")
        await simulation.finish(within_s=1e5)
        calls = [call for call in trained.calls if call.message.stage == 1 and isinstance(call.reply, m.Trained)]
        slow_port = simulation.nodes["stage1.1"].address.port if rate else None
        late = [call for call in calls if call.message.ticket.step > 0]
        found["share"] = sum(call.target.port == slow_port for call in late) / len(late)
        found["steps"] = [report.seconds for report in trainer.reports if report.seconds]
        await simulation.close()

    run_virtual(main())
    return found


def draw(rows: list[dict[str, Any]]) -> Any:
    def on(figure: Any) -> None:
        left, right = figure.subplots(1, 2)
        rates = [row["line kB/s"] for row in rows]
        left.semilogx(rates, [row["x without"] for row in rows], "o-", label="measured")
        left.semilogx(rates, [row["bound"] for row in rows], "--", label="bound, with the tail")
        left.axhline(1.0, color="0.6")
        left.set_ylabel("throughput, times that without the second peer")
        right.loglog(rates, [row["share"] for row in rows], "o-", label="measured")
        right.loglog(rates, [row["share of the bound"] for row in rows], "--", label="1 / max(compute, bytes / line)")
        right.set_ylabel("the second peer's share of its stage")
        for axes in (left, right):
            axes.set_xlabel("kB/s of the second peer's line")
            axes.legend()

    return on


def links(options: argparse.Namespace) -> None:
    jobs = [(rate, options.tickets, options.steps) for rate in RATES]
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        cells = pool.map(simulated, jobs, chunksize=1)
    alone = statistics.fmean(cells[0]["steps"][1:])
    fill_s = alone - options.tickets * COMPUTE_S
    rows = []
    for rate, cell in zip(RATES[1:], cells[1:], strict=True):
        line_s = TICKET_BYTES / rate
        occupied = [1 / rate_of(COMPUTE_S, s).tickets_per_s for s in (0.0, line_s)]
        trips = [COMPUTE_S, COMPUTE_S + (TICKET_BYTES + ROWS * WIDTH * 8) / rate]
        bound = alone / (least_s(options.tickets, occupied, trips) + fill_s)
        mean_s = statistics.fmean(cell["steps"][1:])
        share = (1 / occupied[1]) / sum(1 / x for x in occupied)
        rows.append(
            {
                "line kB/s": rate / 1e3,
                "occupied s": occupied[1],
                "tickets/s": options.tickets / mean_s,
                "x without": alone / mean_s,
                "first step": alone / cell["steps"][0],
                "bound": bound,
                "of the bound": alone / mean_s / bound,
                "without tail": sum(occupied[0] / x for x in occupied),
                "share": cell["share"],
                "share of the bound": share,
            }
        )
    facts = machine() | {
        "peers": f"stage 1: two that compute {COMPUTE_S:g} s for a ticket; stage 0: one that takes a fifth of that",
        "ticket": f"{TICKET_BYTES} bytes in, {ROWS * WIDTH * 8} bytes back",
        "steps": f"{options.steps} of {options.tickets} tickets, without the first: {alone:.2f} s without a second peer",
    }
    publish("routing_links", facts=facts, tables={"A second peer behind a line": rows}, details=cells, draw=draw(rows))


# ---------------------------------------------------------------------------------------------------- real processes


def real_config(num_tickets: int) -> RunConfig:
    return RunConfig(
        name="links",
        model=MODEL,
        num_stages=2,
        sequence_length=REAL_WIDTH,
        micro_batch_size=1,
        target_batch_size=num_tickets,
        model_options={
            "width": REAL_WIDTH,
            "forward_s": [COMPUTE_S / 15, COMPUTE_S / 3],
            "backward_s": [COMPUTE_S * 2 / 15, COMPUTE_S * 2 / 3],
        },
        total_steps=100,
        eval_samples=0,
        checkpoint_every=0,
        compression="none",
        timing=Timing(**TIMING_PRESETS["wan"]),
    )


async def served(places: list[Place], port: int) -> list[int]:
    """Tickets that each peer of stage 1 has accumulated so far."""
    transport = HttpTransport()
    replies = [await ask(transport, Address(place.host, port), timeout_s=30.0) for place in places]
    await transport.close()
    return [int(reply.detail["accumulated"]) for reply in replies]


def measured(rates: list[float], options: argparse.Namespace) -> dict[str, Any]:
    """Tickets per second of real processes, whose peers of stage 1 have lines of these rates in bits per second."""
    config, port = real_config(options.tickets), free_port()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        directory = Path(name)
        run = directory / "run.json"
        run.write_bytes(config.to_bytes())
        # As many namespaces as peers: those beside stage 1 have lines that are never the limit.
        beside, *places = stack.enter_context(namespaces([FAST_RATE, *rates]))

        def launched(module: str, name: str, place: Place | None, **words: Any) -> Launched:
            where = {"prefix": place.prefix, "host": place.host} if place else {"host": DRIVER}
            return stack.enter_context(Launched(module, directory / f"{name}.log", quiet=True, **where, **words))

        join = f"{DRIVER}:{port}"
        launched("launch.backbone", "backbone", None, run=run, port=port)
        words = {"join": join, "port": port, "device": "cpu", "threads": 1, "join_timeout": 120, "allow_import": MODEL}
        launched("launch.stage", "first", beside, stage=0, **words)
        for i, place in enumerate(places):
            launched("launch.stage", f"second-{i}", place, stage=1, **words)
        until = time.monotonic() + 180.0
        while time.monotonic() < until:
            try:
                if len(asyncio.run(listed(port))) == len(places):
                    break
            except (OSError, SystemExit):
                pass
            time.sleep(1.0)
        trainer = launched("launch.trainer", "trainer", None, join=join, data=DATA, metrics=directory / "metrics.jsonl")
        timeout_s = 60.0 + 4.0 * options.steps * options.tickets * COMPUTE_S
        trainer.steps(1, timeout_s)
        before = asyncio.run(served(places, port))
        lines = trainer.steps(options.steps, timeout_s)
        after = asyncio.run(served(places, port))
    done = [b - a for a, b in zip(before, after, strict=True)]
    return {"steps": [line["seconds"] for line in lines], "served": done}


async def listed(port: int) -> tuple[m.Member, ...]:
    """Ready members of stage 1, as the backbone knows them."""
    from swarm.base.errors import SwarmError

    transport = HttpTransport()
    try:
        reply = await ask(transport, Address(DRIVER, port), timeout_s=5.0)
        return tuple(x for x in reply.stages[1] if x.ready) if len(reply.stages) > 1 else ()
    except SwarmError:
        return ()
    finally:
        await transport.close()


def real(options: argparse.Namespace) -> None:
    cells = {"fast only": [FAST_RATE], "fast + 2 Mb/s": [FAST_RATE, REAL_RATE]}
    rows, details = [], {}
    for name, rates in cells.items():
        details[name] = cell = measured(rates, options)
        mean_s = statistics.fmean(cell["steps"][1:])
        occupied = [max(COMPUTE_S, REAL_WIDTH * 4 * 8 / rate) for rate in rates]
        rows.append(
            {
                "peers of stage 1": name,
                "tickets/s": options.tickets / mean_s,
                "bound": sum(1 / x for x in occupied),
                "first step": options.tickets / cell["steps"][0],
                "share of each peer": " ".join(f"{x / max(1, sum(cell['served'])):.2f}" for x in cell["served"]),
                "1 / max(compute, line)": " ".join(f"{1 / x / sum(1 / y for y in occupied):.2f}" for x in occupied),
            }
        )
        print(rows[-1], flush=True)
    facts = machine() | {
        "peers": f"real processes, a network namespace with tbf each way for each; stage 1 takes {COMPUTE_S:g} s for a ticket",
        "ticket": f"{REAL_WIDTH * 4} bytes in each direction",
        "steps": f"{options.steps} of {options.tickets} tickets, without the first",
    }
    publish("routing_links_real", facts=facts, tables={"A second peer behind 2 Mb/s": rows}, details=details)
