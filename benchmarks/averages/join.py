"""A peer joins a big stage during training: how long until it serves, and what does it cost those who train?

One stage of three peers whose state (parameters and both moments) is about 200 MB, real processes on the loopback,
compute as timed occupation of the compute thread (`big_stage`). After a while a newcomer joins and takes the state from
all three donors at once; then the same once more, and one donor is killed when half of the state has arrived; and for
comparison one peer is killed while nobody joins. Memory of donors is their resident size, sampled.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.averages.big_stage import DATA, MODEL
from benchmarks.report import machine, publish
from launch.control import operate
from launch.status import ask
from swarm.base.config import RunConfig
from swarm.base.errors import SwarmError
from swarm.net.http.transport import HttpTransport
from swarm.testing.real_swarm import RealSwarm
from swarm.wire.messages import StatusReply

DONORS = ("stage-0-0", "stage-0-1", "stage-0-2")
POLL_S = 0.02
TIMEOUT_S = 240.0
MIB = 2**20


def configuration(num_elements: int) -> RunConfig:
    return RunConfig(
        name="join",
        model=MODEL,
        model_options={"num_elements": num_elements},
        num_stages=1,
        micro_batch_size=1,
        target_batch_size=12,
        total_steps=10**6,
        lr_schedule="constant",
        precision="fp32",
        compression="none",
        eval_samples=0,
        checkpoint_every=0,
    )


class Observed:
    """A swarm with what is polled of it."""

    def __init__(self, swarm: RealSwarm) -> None:
        self.swarm = swarm
        self._transport = HttpTransport(connect_s=1.0)
        self.resident: dict[str, list[tuple[float, float]]] = {}
        self._sampling = asyncio.ensure_future(self._sample())

    async def _sample(self) -> None:
        while True:
            for name, child in self.swarm.children.items():
                if name.startswith("stage") and child.alive:
                    self.resident.setdefault(name, []).append((time.monotonic(), resident_mib(child.pid)))
            await asyncio.sleep(POLL_S)

    def most(self, name: str, since: float, until: float) -> float:
        return max((mib for at, mib in self.resident[name] if since <= at <= until), default=0.0)

    async def close(self) -> None:
        self._sampling.cancel()
        await asyncio.gather(self._sampling, return_exceptions=True)
        await self._transport.close()

    async def status(self, name: str) -> StatusReply | None:
        try:
            return await ask(self._transport, await self.swarm.serving(name), timeout_s=2.0)
        except SwarmError:
            return None

    async def until(self, name: str, condition: Callable[[StatusReply], bool], what: str) -> float:
        """The time at which `condition` was first seen to hold of `name`."""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                reply = await self.status(name)
                if reply is not None and condition(reply):
                    return time.monotonic()
                if not self.swarm.children[name].alive:
                    raise SystemExit(f"{name} ended before: {what}: {self.swarm.log(name)[-2000:]}")
                await asyncio.sleep(POLL_S)

    @property
    def num_steps(self) -> int:
        return self.swarm.steps[-1]["step"]

    async def more_steps(self, count: int) -> None:
        await self.swarm.step(self.num_steps + count, within_s=TIMEOUT_S)


def resident_mib(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    line = next((x for x in fields.splitlines() if x.startswith("VmRSS")), "VmRSS: 0 kB")
    return int(line.split()[1]) / 1024


async def join(seen: Observed, name: str, state_bytes: int, kill: str | None) -> dict[str, Any]:
    """One newcomer, from its start until it has served for some steps."""
    swarm = seen.swarm
    calm_from = time.monotonic()
    await seen.more_steps(8)
    first_step, began = seen.num_steps, time.monotonic()
    await swarm.spawn(name, "stage", "--stage", 0)
    await swarm.serving(name)
    await seen.until(name, lambda s: s.detail["state_bytes_received"] > 0, "the state begins to arrive")
    moving_from = time.monotonic()
    if kill is not None:
        await seen.until(name, lambda s: s.detail["state_bytes_received"] >= state_bytes / 2, "half of the state is there")
        swarm.children[kill].signal(signal.SIGKILL)
    arrived_at = await seen.until(name, lambda s: s.detail["state_bytes_received"] >= state_bytes, "the state is there")
    arrived_step = seen.num_steps
    await seen.until(name, lambda s: s.detail["accumulated"] > 0, "it has computed its first micro-batch")
    served_step, served_at = seen.num_steps, time.monotonic()
    await seen.more_steps(6)
    donors = [donor for donor in DONORS if donor != kill]
    return {
        "joined": name,
        "killed": kill or "nobody",
        "transfer (s)": arrived_at - moving_from,
        "start to first micro-batch (s)": served_at - began,
        "steps from transfer's end to serving": served_step - arrived_step,
        "first step": first_step,
        "last step": seen.num_steps,
        "donors' memory rises by (MiB)": max(
            seen.most(d, began, time.monotonic()) - seen.most(d, calm_from, began) for d in donors
        ),
    }


async def measure(directory: Path, num_elements: int) -> dict[str, Any]:
    config = configuration(num_elements)
    state_bytes = 3 * 4 * num_elements
    async with RealSwarm(directory, config, data=DATA) as swarm:
        await swarm.begin(peers_per_stage=3)
        await swarm.step(4, within_s=TIMEOUT_S)
        seen = Observed(swarm)
        try:
            joins = [await join(seen, "stage-0-3", state_bytes, None)]
            joins.append(await join(seen, "stage-0-4", state_bytes, DONORS[1]))
            killed_from = seen.num_steps
            await seen.more_steps(4)
            swarm.children["stage-0-3"].signal(signal.SIGKILL)
            await seen.more_steps(6)
            killed_to = seen.num_steps
            await operate(await swarm.serving("backbone"), "pause")
            left = ("stage-0-0", "stage-0-2", "stage-0-4")
            digests = await same_state(seen, left)
        finally:
            await seen.close()
        lines = {line["step"]: line for line in swarm.steps}
    return {"joins": joins, "kill": (killed_from, killed_to), "lines": lines, "digests": digests}


async def same_state(seen: Observed, names: tuple[str, ...]) -> dict[str, str]:
    """Digests of the paused peers' states, once they are all at one step."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            await asyncio.sleep(2.0)
            replies = {name: await seen.status(name) for name in names}
            known = {name: reply for name, reply in replies.items() if reply is not None and reply.detail["state_digest"]}
            if len(known) == len(names) and len({reply.version_id for reply in known.values()}) == 1:
                return {name: str(reply.detail["state_digest"]) for name, reply in known.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=17_500_000, help="weights of the stage (default 17.5 million: 210 MB)")
    options = parser.parse_args()
    facts: dict[str, Any] = {**machine(), "state (MB)": round(12 * options.elements / 1e6)}
    with tempfile.TemporaryDirectory() as directory:
        seen = asyncio.run(measure(Path(directory), options.elements))
    lines = seen["lines"]
    calm = [x["seconds"] for step, x in lines.items() if 4 < step <= seen["joins"][0]["first step"]]
    median = statistics.median(calm)
    rows = []
    for one in seen["joins"]:
        during = [lines[s] for s in range(one.pop("first step") + 1, one.pop("last step") + 1)]
        slowest = max(during, key=lambda x: x["seconds"])
        rows.append({**one, "slowest step (s)": slowest["seconds"], "against the median": slowest["seconds"] / median})
    killed = [lines[s]["seconds"] for s in range(seen["kill"][0] + 1, seen["kill"][1] + 1)]
    same = len(set(seen["digests"].values())) == 1
    whole = all(x["tickets"] == [12] for x in lines.values())
    facts |= {
        "median step before anyone joins (s)": round(median, 2),
        "slowest of them against the median": round(max(calm) / median, 2),
        "slowest step when a peer is killed and nobody joins, against the median": round(max(killed) / median, 2),
        "states have one digest": same,
        "every step has its tickets once": whole,
    }

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        axes.plot(list(lines), [x["seconds"] for x in lines.values()], ".-")
        axes.axhline(1.5 * median, color="0.6", ls="--", label="1.5 x the median")
        axes.set(xlabel="step", ylabel="seconds", title="seconds of each step; two peers join, two are killed")
        axes.legend()

    steps = [{key: x[key] for key in ("step", "seconds", "peers", "reopened")} for x in lines.values()]
    publish("join", facts=facts, tables={"joins": rows}, details={"steps": steps}, draw=draw)
    return 0 if same and whole else 1


if __name__ == "__main__":
    raise SystemExit(main())
