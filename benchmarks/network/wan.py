"""GPU utilisation over slow links: one Transformer layer per stage, two stages, all traffic through a shaping proxy.

The link is scaled to the card: the published figures (SWARM, arXiv 2301.11913, table 1) are of V100s at 500 Mb/s, so a card
with N times the peak of a V100 (125 TFLOP/s) gets N times 500 Mb/s in each direction, and the same bytes per floating-point
operation. The delay is added in each direction. Utilisation: tokens/s through the swarm over tokens/s of one stage's
forward and backward in a loop on the same card (`alone`). With one card the two stages share it: each has half the card,
half the link, and the card's utilisation is the sum of both. Activations are 8-bit; the optimizer is off (one long step).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.network.wan_shapes import SHAPES, alone, config_of
from benchmarks.report import machine, publish
from launch.status import ask
from swarm.base.config import RunConfig
from swarm.base.errors import SwarmError
from swarm.base.ids import Address
from swarm.net.http.transport import HttpTransport
from swarm.testing.launched import Launched
from swarm.testing.processes import free_port
from swarm.testing.shaped_proxy import Line, Shaper

DELAYS_MS = (0, 10, 50, 100, 200)
PUBLISHED = {
    "base": (18.0, 11.8, 4.9, 2.8, 1.5),
    "xxlarge": (32.1, 28.9, 20.1, 14.9, 10.1),
    "gpt3": (82.1, 79.3, 70.3, 60.2, 48.5),
    "gpt3-bottleneck": (89.5, 87.2, 79.5, 71.5, 59.2),
}
V100_FLOPS, V100_LINK = 125e12, 500e6 / 8
#: Dense bf16 peak of cards, in floating-point operations per second.
PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "V100": 125e12}
START_TIMEOUT_S = 240.0
#: Bytes for each parameter that a peer counts for applying steps, which these never do.
UNUSED_BYTES = 22


class Swarm:
    """A backbone, one peer of each of two stages and a trainer, each on a loopback address behind the proxy."""

    def __init__(
        self, directory: Path, config: RunConfig, num_parameters: int, devices: Sequence[str], first_host: int, port: int
    ) -> None:
        self._port = port
        self._num_parameters = num_parameters
        (directory / "run.json").write_bytes(config.to_bytes())
        rng = random.Random(0)
        (directory / "data.txt").write_text("".join(chr(rng.randrange(32, 127)) for _ in range(2**21)))
        self.hosts = [(f"127.0.5.{first_host + i}", f"127.0.6.{first_host + i}") for i in range(4)]
        self._directory = directory
        self._devices = devices
        self._processes: list[Launched] = []

    def lines(self, rate: float) -> list[Line]:
        """The stage peers' lines have the rate; the trainer and the backbone send little."""
        return [Line(*hosts, *((rate, rate) if i in (1, 2) else (None, None))) for i, hosts in enumerate(self.hosts)]

    def start(self) -> None:
        card = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 64 * 2**30
        memory = int(0.86 * card / stages_per_card() + UNUSED_BYTES * self._num_parameters)
        self._launch(0, "backbone", run=self._directory / "run.json")
        time.sleep(8)
        for stage, device in zip((0, 1), self._devices, strict=True):
            self._launch(1 + stage, "stage", join=self._join, stage=stage, device=device, memory_limit=memory, threads=1)

    def train(self, in_flight: str) -> None:
        """Begin; the cards were used for nothing so far."""
        self._launch(3, "trainer", join=self._join, data=self._directory / "data.txt", in_flight=in_flight)

    @property
    def _join(self) -> str:
        return f"{self.hosts[0][1]}:{self._port}"

    def _launch(self, index: int, role: str, **options: object) -> None:
        inside, outside = self.hosts[index]
        own = self._directory / f"{role}-{index}"
        log = own.with_suffix(".log")
        self._processes.append(
            Launched(f"launch.{role}", log, **options, host=inside, public_host=outside, port=self._port, state_dir=own)
        )

    async def counts(self, transport: HttpTransport) -> tuple[float, int, int, int]:
        """Now, micro-batches done at the first stage, those in flight, and the trainer's limit.

        Raises:
            SwarmError: somebody does not answer yet.
        """
        stage = (await ask(transport, Address(self.hosts[1][0], self._port), timeout_s=5.0)).detail
        trainer = (await ask(transport, Address(self.hosts[3][0], self._port), timeout_s=5.0)).detail
        return time.monotonic(), int(stage["accumulated"]), int(trainer["in_flight"]), int(trainer["in_flight_limit"])

    def check(self) -> None:
        for process in self._processes:
            if process.ended:
                raise process.fail("it was to go on")

    def close(self) -> None:
        for process in self._processes:
            process.kill()


async def measure(swarm: Swarm, shaper: Shaper, tokens: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    transport = HttpTransport()
    cells = []
    try:
        until = time.monotonic() + START_TIMEOUT_S
        while True:
            swarm.check()
            try:
                if (await swarm.counts(transport))[1] > 20:
                    break
            except SwarmError:
                pass
            if time.monotonic() > until:
                raise SystemExit("the swarm did not start")
            await asyncio.sleep(0.5)
        for delay_ms in options.delays:
            shaper.set_delay(delay_ms / 1e3)
            await asyncio.sleep(options.settle_s)
            began, done, *_ = await swarm.counts(transport)
            carried = shaper.set_delay(delay_ms / 1e3)
            await asyncio.sleep(options.measure_s)
            ended, done_then, in_flight, limit = await swarm.counts(transport)
            carried_then = shaper.set_delay(delay_ms / 1e3)
            swarm.check()
            host = swarm.hosts[2][1]
            cells.append(
                {
                    "delay_ms": delay_ms,
                    "tokens_per_s": (done_then - done) * tokens / (ended - began),
                    "in_flight": in_flight,
                    "limit": limit,
                    "link_bytes_per_s": (carried_then[host][0] - carried[host][0]) / (ended - began),
                }
            )
            print(json.dumps(cells[-1]), flush=True)
    finally:
        await transport.close()
    return cells


def stages_per_card() -> int:
    return 2 if torch.cuda.device_count() == 1 else 1


def link_of(options: argparse.Namespace) -> tuple[str, float]:
    """Name of the card and the scaled rate in bytes per second."""
    card = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"
    peak = next((peak for name, peak in PEAKS.items() if name in card), None)
    if options.link is not None:
        return card, options.link
    if peak is None:
        raise SystemExit(f"the peak of {card!r} is not known: name the link with --link BYTES_PER_S")
    return card, V100_LINK * peak / V100_FLOPS / stages_per_card()


def one_shape(name: str, options: argparse.Namespace, rate: float, cards: Sequence[int], first_host: int) -> dict[str, Any]:
    shape = SHAPES[name]
    has_cuda = torch.cuda.is_available()
    config = config_of(shape, "bf16" if has_cuda else "fp32")
    tokens = shape.sequence * shape.micro_batch
    devices = [f"cuda:{card}" if has_cuda else "cpu" for card in cards]
    with tempfile.TemporaryDirectory() as text:
        directory = Path(text)
        port = free_port()
        swarm = Swarm(directory, config, shape.num_parameters, devices, first_host, port)
        with Shaper(swarm.lines(rate), port) as shaper:
            try:
                swarm.start()
                reference = float(
                    subprocess.run(
                        [sys.executable, "-m", __spec__.name, "--alone", str(directory / "run.json"), devices[-1]],
                        check=True,
                        text=True,
                        stdout=subprocess.PIPE,
                        timeout=START_TIMEOUT_S,
                    ).stdout.splitlines()[-1]
                )
                print(f"{name}: alone {reference:.0f} tokens/s", flush=True)
                swarm.train(options.in_flight)
                cells = asyncio.run(measure(swarm, shaper, tokens, options))
            finally:
                swarm.close()
    # Per token and direction: a byte for each hidden unit, and an fp32 scale for each 4,096 of them.
    bound = stages_per_card() * rate / (shape.width * (1 + 4 / 4096)) / reference
    return {"shape": name, "alone_tokens_per_s": reference, "link_bound_percent": 100 * bound, "cells": cells}


def draw(results: Sequence[dict[str, Any]]) -> Any:
    def on(figure: Any) -> None:
        axes = figure.subplots()
        for index, result in enumerate(results):
            delays = [cell["delay_ms"] for cell in result["cells"]]
            axes.plot(delays, [cell["utilisation"] for cell in result["cells"]], f"C{index}o-", label=result["shape"])
            if result["shape"] in PUBLISHED:
                axes.plot(DELAYS_MS, PUBLISHED[result["shape"]], f"C{index}x--", label=f"{result['shape']}, published")
        axes.set_xlabel("delay each way, ms")
        axes.set_ylabel("utilisation, per cent of the stage alone")
        axes.legend()

    return on


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="base,xxlarge,gpt3,gpt3-bottleneck", help=f"of {','.join(SHAPES)}")
    parser.add_argument("--delays", type=lambda s: [int(x) for x in s.split(",")], default=list(DELAYS_MS), help="ms each way")
    parser.add_argument("--settle-s", type=float, default=12.0, help="seconds at each delay before it is measured")
    parser.add_argument("--measure-s", type=float, default=8.0, help="seconds measured")
    parser.add_argument("--in-flight", default="auto", help="micro-batches, or auto, which needs --settle-s 40 at long delays")
    parser.add_argument("--name", default="wan", help="of the JSON and the plot")
    parser.add_argument("--link", type=float, help="bytes per second each way (default: scaled to the card)")
    parser.add_argument("--first-card", type=int, default=0, help="the stages' cards are this one and the next")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--alone", nargs=2, metavar=("RUN", "DEVICE"), help=argparse.SUPPRESS)
    return parser.parse_args()


def in_parallel(options: argparse.Namespace) -> list[dict[str, Any]]:
    """As many shapes at once as there are pairs of cards, each in a process of its own."""
    pairs = max(1, torch.cuda.device_count() // 2)
    waiting, running, results = options.shapes.split(","), {}, {}
    with tempfile.TemporaryDirectory() as text:
        while waiting or running:
            while waiting and len(running) < pairs:
                name = waiting.pop()  # the largest first
                pair = next(i for i in range(pairs) if i not in {p for p, _ in running.values()})
                words = [
                    sys.executable,
                    "-m",
                    __spec__.name,
                    "--shapes",
                    name,
                    "--part",
                    str(Path(text) / name),
                    "--first-card",
                    str(2 * pair),
                    "--delays",
                    ",".join(map(str, options.delays)),
                    "--settle-s",
                    str(options.settle_s),
                    "--measure-s",
                    str(options.measure_s),
                    "--in-flight",
                    options.in_flight,
                    *(["--link", str(options.link)] if options.link else []),
                ]
                running[name] = (pair, subprocess.Popen(words))
            time.sleep(0.5)
            for name, (_, process) in list(running.items()):
                if process.poll() is not None:
                    del running[name]
                    if process.returncode:
                        print(f"{name} failed", file=sys.stderr)
                    else:
                        results[name] = json.loads((Path(text) / name).read_text())
    return [results[name] for name in options.shapes.split(",") if name in results]


def main() -> None:
    options = parse()
    if options.alone:
        print(alone(Path(options.alone[0]), options.alone[1], 3.0))
        return
    card, rate = link_of(options)
    if options.part:
        cards = [options.first_card, min(options.first_card + 1, max(0, torch.cuda.device_count() - 1))]
        result = one_shape(options.shapes, options, rate, cards, 4 * options.first_card + 1)
        Path(options.part).write_text(json.dumps(result))
        return
    results = in_parallel(options)
    if not results:
        raise SystemExit("no shape was measured; what was there before stays")
    rows = []
    for result in results:
        published = dict(zip(DELAYS_MS, PUBLISHED.get(result["shape"], ()), strict=False))
        for cell in result["cells"]:
            cell["utilisation"] = 100 * stages_per_card() * cell["tokens_per_s"] / result["alone_tokens_per_s"]
            rows.append(
                {
                    "shape": result["shape"],
                    "delay ms": cell["delay_ms"],
                    "utilisation %": cell["utilisation"],
                    "published %": published.get(cell["delay_ms"], float("nan")),
                    "link allows %": result["link_bound_percent"],
                    "tokens/s": cell["tokens_per_s"],
                    "alone": result["alone_tokens_per_s"],
                    "link used MB/s": cell["link_bytes_per_s"] / 1e6,
                    "in flight": cell["in_flight"],
                }
            )
    facts = machine() | {
        "cards": f"{torch.cuda.device_count()} x {card}",
        "link": f"{rate * 8 / 1e9:.2f} Gb/s each way for a stage's {rate / V100_LINK * V100_FLOPS / 1e12:.0f} TFLOP/s at peak "
        f"(published: 0.5 Gb/s for 125 TFLOP/s); the delay is added each way",
        "model": "; ".join(
            f"{name}: hidden {s.hidden}, ffn {s.ffn}, micro-batch {s.micro_batch} x {s.sequence} tokens"
            for name, s in SHAPES.items()
            if name in options.shapes.split(",")
        ),
        "affinity": f"{os.cpu_count()} cores",
    }
    publish(options.name, facts=facts, tables={"GPU utilisation": rows}, details=results, draw=draw(results))


if __name__ == "__main__":
    main()
