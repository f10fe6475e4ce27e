"""Unequal peers of one stage: how much of their summed speed a trainer gets out of them, and what a peer that hangs costs.

One stage of four real peers whose compute threads are occupied for 1, 2, 4 and 8 times as long (`timed_model.py`; the cores
stay idle), and a second stage that takes no time. The same swarm is used by one trainer after another: this product's
interleaved weighted round robin; uniform random choice; and the same round robin with speeds that only successes update (what
failed neither counts as slow nor is left alone). Then, for each, the fastest peer is stopped (SIGSTOP): it is recovered when
no two seconds have less than nine tenths of the others' speed any more; 0 if none had.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Container
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.process_cpu import busy_machine_s
from benchmarks.report import machine, publish
from benchmarks.scheduling.routing_links import links, real
from benchmarks.timed_model import DATA, MODEL, SPEED_VARIABLE, WIDTH
from launch.arguments import LaunchParser
from launch.options import (
    DataOptions,
    PeerOptions,
    add_data_options,
    add_model_option,
    add_network_options,
    add_output_options,
    add_run_options,
)
from launch.processes.runner import main_of, run_peer
from launch.run.composing import compose
from launch.status import ask
from swarm.base.config import RunConfig
from swarm.base.errors import SwarmError
from swarm.base.ids import Address, MemberKey
from swarm.feed.feed import open_feed
from swarm.net.http.transport import HttpTransport
from swarm.peer.trainer.trainer import Trainer
from swarm.policy.routing import StageRouter
from swarm.testing.launched import Launched
from swarm.testing.processes import free_port

SPEEDS = (1.0, 0.5, 0.25, 0.125)
START_S = 120.0
POLL_S = 0.1
WINDOW_S = 2.0
RECOVERED = 0.9


class UniformRouter(StageRouter):
    """Any peer, whatever is known of it; those that failed are left alone for a while."""

    def candidates(
        self, num_samples: int, *, now: float, first: MemberKey | None = None, limit: int = 4, without: Container[MemberKey] = ()
    ) -> list[MemberKey]:
        order = super().candidates(num_samples, now=now, first=None, limit=len(self._peers), without=without)
        self._rng.shuffle(order)
        return order[:limit]


class SuccessOnlyRouter(StageRouter):
    """Failures teach it nothing."""

    def failed(self, key: MemberKey, *, now: float, waited_s: float = 0.0, num_samples: int = 1) -> None:
        return


SCHEDULERS = {"swarm": StageRouter, "uniform random": UniformRouter, "successes only": SuccessOnlyRouter}


# ---------------------------------------------------------------------------------------------------- a trainer


@dataclass(frozen=True, kw_only=True)
class TrainOptions(PeerOptions, DataOptions):
    """What this trainer was told."""

    in_flight: int | None


def train(argv: list[str]) -> int:
    """What `launch_trainer` does, with the scheduler that the first word names."""
    scheduler = SCHEDULERS[argv.pop(0)]

    def parse(words: Any) -> TrainOptions:
        parser = LaunchParser("routing_trainer", "A trainer with another scheduler.")
        add_run_options(parser)
        add_data_options(parser)
        add_model_option(parser)
        parser.add_argument("--in-flight", type=int)
        add_network_options(parser)
        add_output_options(parser)
        return parser.parse(words, TrainOptions)

    def serve(options: TrainOptions, words: list[str], reports: Any) -> int:
        async def build() -> Any:
            context, run = await compose(options, max_inflight_bytes=2**30)
            paths = run.paths.overridden_by(options)
            feed = open_feed(context.config, paths.data, None, None)
            return Trainer(context, feed=feed, in_flight=options.in_flight, router=scheduler), lambda: None

        return run_peer(build, serves_until_stopped=True)

    return main_of("routing_trainer", parse, serve, argv)


# ---------------------------------------------------------------------------------------------------- the swarm


def config_of(options: argparse.Namespace) -> RunConfig:
    return RunConfig(
        name="routing",
        model=MODEL,
        num_stages=2,
        sequence_length=WIDTH,
        micro_batch_size=1,
        target_batch_size=20_000,
        model_options={"forward_s": [options.occupation / 3, 0.0], "backward_s": [options.occupation * 2 / 3, 0.0]},
        total_steps=2,
        eval_samples=0,
        checkpoint_every=0,
        compression="none",
    )


class Meter:
    """Counts what each peer of stage 0 has done."""

    def __init__(self, transport: HttpTransport, peers: list[Address]) -> None:
        self._transport = transport
        self._peers = peers
        self._last = [0] * len(peers)
        #: The peer that is stopped now: it is not asked, and what it had done counts.
        self.stopped: int | None = None
        self.samples: list[tuple[float, int]] = []

    async def _one(self, index: int) -> int:
        if index == self.stopped:
            return self._last[index]
        return int((await ask(self._transport, self._peers[index], timeout_s=10.0)).detail["accumulated"])

    async def look(self) -> list[int]:
        self._last = list(await asyncio.gather(*(self._one(index) for index in range(len(self._peers)))))
        self.samples.append((time.monotonic(), sum(self._last)))
        return self._last

    async def watch(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            await self.look()
            await asyncio.sleep(POLL_S)


def rate_after(samples: list[tuple[float, int]], at: float) -> float | None:
    """Micro-batches a second in the window that begins at `at`."""
    inside = [sample for sample in samples if at <= sample[0] <= at + WINDOW_S]
    if len(inside) < 2 or samples[-1][0] < at + WINDOW_S:
        return None
    return (inside[-1][1] - inside[0][1]) / (inside[-1][0] - inside[0][0])


async def addresses(transport: HttpTransport, backbone: Address, count: int) -> list[Address]:
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        try:
            stages = (await ask(transport, backbone, timeout_s=2.0)).stages
        except SwarmError:
            stages = ()
        if stages and len(stages[0]) == count and stages[1]:
            return [Address(member.host, member.port) for member in stages[0]]
        await asyncio.sleep(0.3)
    raise SystemExit("the swarm did not start")


async def measure(options: argparse.Namespace, directory: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    run = directory / "run.json"
    run.write_bytes(config_of(options).to_bytes())
    rows, details = [], {}
    transport = HttpTransport()
    with ExitStack() as swarm:

        def launched(module: str, name: str, **words: Any) -> Launched:
            return Launched(module, directory / f"{name}.log", **words, host="127.0.0.1", quiet=True)

        def stage(number: int, port: int, speed: float) -> Launched:
            words = {"join": backbone, "stage": number, "port": port, "device": "cpu", "threads": 1, "join_timeout": 60}
            speeds = {SPEED_VARIABLE: str(speed)}
            child = launched("launch.stage", f"stage-{port}", **words, allow_import=MODEL, environment=speeds)
            return swarm.enter_context(child)

        backbone = Address("127.0.0.1", free_port())
        swarm.enter_context(launched("launch.backbone", "backbone", run=run, port=backbone.port))
        ports = [free_port() for _ in SPEEDS]
        fast, *_ = [stage(0, port, speed) for port, speed in zip(ports, SPEEDS, strict=True)]
        stage(1, free_port(), 1.0)
        for name in SCHEDULERS:
            trainer = {"as_trainer": name, "join": backbone, "data": DATA, "in_flight": options.in_flight}
            with launched(__spec__.name, name.replace(" ", "-"), **trainer):
                peers = sorted(await addresses(transport, backbone, len(SPEEDS)), key=lambda x: ports.index(x.port))
                meter = Meter(transport, peers)
                rows.append(await observe(name, meter, fast.process, options))
            details[name] = [(at - meter.samples[0][0], done) for at, done in meter.samples]
            print("  " + json.dumps(rows[-1]), file=sys.stderr, flush=True)
    await transport.close()
    return rows, details


async def observe(name: str, meter: Meter, fast: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Steady throughput; then the fastest peer is stopped for a while."""
    fastest = 1 / options.occupation
    begun = (await meter.look())[:]
    until = time.monotonic() + START_S
    while sum(await meter.look()) < sum(begun) + 20:
        if time.monotonic() > until:
            raise SystemExit(f"{name}: no micro-batch came back")
        await asyncio.sleep(POLL_S)
    await meter.watch(options.learn)
    before, cpu, at = (await meter.look())[:], busy_machine_s(), time.monotonic()
    await meter.watch(options.seconds)
    after, elapsed = (await meter.look())[:], time.monotonic() - at
    done = [b - a for a, b in zip(before, after, strict=True)]
    cores = (busy_machine_s() - cpu) / elapsed
    meter.stopped = 0
    fast.send_signal(signal.SIGSTOP)
    stopped_at = time.monotonic()
    await meter.watch(options.stopped)
    fast.send_signal(signal.SIGCONT)
    meter.stopped = None
    rest = fastest * sum(SPEEDS[1:])
    windows = [(at, rate_after(meter.samples, at)) for at, _ in meter.samples if at >= stopped_at]
    rates = [(at, rate) for at, rate in windows if rate is not None]
    below = [at for at, rate in rates if rate < RECOVERED * rest]
    recovered = f"{below[-1] + WINDOW_S - stopped_at:.1f}" if below else "0"
    if below and below[-1] > rates[-1][0] - WINDOW_S:
        recovered = f"not in {options.stopped:g}"
    await meter.watch(options.learn)
    return {
        "scheduler": name,
        "micro-batches/s": sum(done) / elapsed,
        "of the sum": sum(done) / elapsed / fastest / sum(SPEEDS),
        "share of each peer": " ".join(f"{x / sum(done):.2f}" for x in done),
        "cores busy": cores,
        "hang: recovered after s": recovered,
        "hang: of the others' sum meanwhile": statistics.mean(rate for _, rate in rates) / rest,
        "hang: in the worst 2 s": min(rate for _, rate in rates) / rest,
    }


def draw(details: dict[str, Any], most: float) -> Any:
    def on(figure: Any) -> None:
        axes = figure.subplots()
        for name, samples in details.items():
            points = [(at, rate_after(samples, at)) for at, _ in samples[::3]]
            points = [(at + WINDOW_S, rate) for at, rate in points if rate is not None]
            axes.plot([at for at, _ in points], [100 * rate / most for _, rate in points], label=name)
        axes.set_xlabel("seconds from the trainer's first micro-batch; the fastest peer is stopped on the way")
        axes.set_ylabel("per cent of the peers' summed speed")
        axes.set_ylim(bottom=0)
        axes.legend()

    return on


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--occupation", type=float, default=0.06, help="seconds of the fastest peer for a micro-batch")
    parser.add_argument("--in-flight", type=int, default=16, help="micro-batches under way, of every scheduler")
    parser.add_argument("--learn", type=float, default=6.0, help="seconds that a scheduler gets before it is measured")
    parser.add_argument("--seconds", type=float, default=12.0, help="of each measured throughput")
    parser.add_argument("--stopped", type=float, default=24.0, help="seconds that the fastest peer is stopped")
    parser.add_argument("--links", action="store_true", help="equal peers behind slow lines instead, see routing_links.py")
    parser.add_argument("--real", action="store_true", help="with --links: real processes in network namespaces (needs root)")
    parser.add_argument("--tickets", type=int, default=256, help="of a step, with --links")
    parser.add_argument("--steps", type=int, default=4, help="with --links; the first is not measured")
    options = parser.parse_args()
    if options.links:
        (real if options.real else links)(options)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that no process is left behind
    facts = machine()
    with tempfile.TemporaryDirectory() as name:
        rows, details = asyncio.run(measure(options, Path(name)))
    facts["peers"] = f"speeds {', '.join(map(str, SPEEDS))}; the fastest takes {options.occupation * 1e3:g} ms"
    facts["in flight"] = options.in_flight
    facts["deadline of a silent peer"] = f"{config_of(options).timing.stall_s:g} s"
    publish(
        "routing",
        facts=facts,
        tables={"Four unequal peers": rows},
        details=details,
        draw=draw(details, sum(SPEEDS) / options.occupation),
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as-trainer"]:
        sys.exit(train(sys.argv[2:]))
    main()
