"""`allreduce.py --shaped`: shares by bandwidth against equal ones, on links with real limits.

The driver first plays the leader and gives equal shares; then the product's leader gives those that follow from the
bandwidths that its members measured on these very rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from typing import Any

from benchmarks.averages.allreduce_swarm import WARM_UP, Swarm, swarm_of
from benchmarks.report import machine, publish
from swarm.peer.link import together
from swarm.policy.shares import Reducer, best_shares, time_of
from swarm.testing.shaped_namespaces import DRIVER, namespaces
from swarm.wire import messages as m


async def equal_round(swarm: Swarm) -> float:
    """Seconds of one round with equal shares, led by the driver."""
    attempt, seals = await swarm.seals()
    request = m.Reduce(run=swarm.link.context.run, stage=0, step=0, attempt=attempt, seals=seals)
    began = time.monotonic()
    replies = await together(*(swarm.link.ask(x, request, m.Reduced, stall_s=120.0) for x in swarm.members))
    seconds = time.monotonic() - began
    if len({reply.sum_digest for reply, _ in replies}) != 1 or not replies[0][0].sum_digest:
        raise SystemExit(f"equal shares: {[reply.reason for reply, _ in replies]}")
    return seconds


async def led_round(swarm: Swarm) -> float:
    """Seconds of one round as the product's leader runs it."""
    attempt, seals = await swarm.seals()
    began = time.monotonic()
    reply = await swarm.average(attempt, seals)
    if reply.result is None or len(reply.result.holders) != len(swarm.members):
        raise SystemExit(f"shares by bandwidth: {reply.reason}")
    return time.monotonic() - began


async def measured(swarm: Swarm) -> list[tuple[float, float]]:
    """What each member says its link carries up and down, in bytes per second."""
    attempt, _ = await swarm.seals()
    ask = m.Collect(run=swarm.link.context.run, stage=0, step=0, attempt=attempt, freeze=True, leader=swarm.members[0])
    replies = await together(*(swarm.link.ask(x, ask, m.Collected) for x in swarm.members))
    return [(reply.upload or 0.0, reply.download or 0.0) for reply, _ in replies]


async def run(rates: list[float], num_elements: int, rounds: int) -> dict[str, Any]:
    with namespaces(rates) as places:
        async with swarm_of(len(rates), num_elements, places=places, driver=DRIVER) as swarm:
            equal = [await equal_round(swarm) for _ in range(WARM_UP + rounds)][WARM_UP:]
            led = [await led_round(swarm) for _ in range(WARM_UP + rounds)][WARM_UP:]
            return {"equal_s": equal, "led_s": led, "measured": await measured(swarm)}


def shaped(options: argparse.Namespace) -> None:
    rates = [mb * 1e6 * options.scale for mb in [200] * 4 + [100] * 4 + [50] * 4]
    result = asyncio.run(run(rates, options.shaped_elements, options.rounds))
    true = [Reducer(upload=rate / 8, download=rate / 8) for rate in rates]
    num_bytes = 4 * options.shaped_elements
    best = best_shares(true)
    equal_s, led_s = statistics.median(result["equal_s"]), statistics.median(result["led_s"])
    predicted = [time_of(true, [1 / len(true)] * len(true)) * num_bytes, best.time * num_bytes]
    rows = [
        {"shares": "equal", "predicted s": predicted[0], "measured s": equal_s, "x predicted": equal_s / predicted[0]},
        {"shares": "by bandwidth", "predicted s": predicted[1], "measured s": led_s, "x predicted": led_s / predicted[1]},
    ]
    gains = [
        {
            "predicted gain": predicted[0] / predicted[1],
            "measured gain": equal_s / led_s,
            "measured / predicted": (equal_s / led_s) / (predicted[0] / predicted[1]),
        }
    ]
    links = [
        {"Mb/s": rate / 1e6, "measured up": up * 8 / 1e6, "measured down": down * 8 / 1e6}
        for rate, (up, down) in zip(rates, result["measured"], strict=True)
    ]
    facts = machine() | {
        "links": f"[200]*4 + [100]*4 + [50]*4 Mb/s x {options.scale:g}, one network namespace with tbf each way per peer",
        "values": f"{options.shaped_elements} fp32 per peer",
        "timed": f"median of {options.rounds} rounds after {WARM_UP}",
        "prediction": "the linear program's round time with the configured rates, without protocol headers",
    }
    tables = {"Rounds": rows, "Gain of shares by bandwidth": gains, "Links as the peers measured them": links}

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        places = range(len(rows))
        axes.bar([x - 0.2 for x in places], [row["predicted s"] for row in rows], 0.4, label="predicted", color="0.6")
        axes.bar([x + 0.2 for x in places], [row["measured s"] for row in rows], 0.4, label="measured")
        axes.set_xticks(list(places), [row["shares"] for row in rows])
        axes.set_ylabel("seconds per round")
        axes.legend()

    publish("allreduce_shaped", facts=facts, tables=tables, details=result, draw=draw)
