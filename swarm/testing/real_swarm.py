"""A swarm of real processes that a test or a benchmark holds in its hands: start, signal, kill and start again each of them.

All are children of one fork server, so that a start takes a moment; each has a state directory that outlives it.
"""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

from launch.processes.children import Child, Children
from launch.run.run_files import DataPaths, create_run
from swarm.base.config import RunConfig
from swarm.base.ids import Address

#: A process serves within this time, in seconds, on a loaded machine.
START_S = 180.0


def tiny_config(**changes: Any) -> RunConfig:
    """So small that a step takes a moment, in fp64 without compression: losses can be compared to the last digits."""
    base: dict[str, Any] = {
        "name": "tiny",
        "model": "llama-tiny",
        "model_options": {"hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 32, "num_attention_heads": 2},
        "num_stages": 2,
        "sequence_length": 16,
        "micro_batch_size": 2,
        "target_batch_size": 16,
        "precision": "fp64",
        "compression": "none",
        "eval_samples": 0,
        "lr_schedule": "constant",
    }
    return RunConfig(**{**base, **changes})


class RealSwarm:
    """Backbone, stage peers and trainers on 127.0.0.1."""

    def __init__(self, directory: Path, config: RunConfig, *, data: str | None = None) -> None:
        self._data = data
        self._logs = directory / "logs"
        self._logs.mkdir(parents=True)
        self._children = Children(self._logs, self._on_report, argument=config.to_bytes().decode())
        self._serving: dict[str, asyncio.Future[Address]] = {}
        self._num_started = 0
        self.children: dict[str, Child] = {}
        #: What trainers reported of committed steps, since the last `begin`.
        self.steps: list[dict[str, Any]] = []
        self._stepped = asyncio.Event()
        self.take_up(directory, config)

    def take_up(self, directory: Path, config: RunConfig) -> None:
        """Another run of the same model, in another directory; nobody runs now."""
        self.config = create_run(config, DataPaths(data=self._data))
        self.state_root = directory / "state"
        self.metrics = directory / "metrics.jsonl"
        self._run_file = directory / "run.json"
        self._run_file.write_bytes(self.config.to_bytes())
        self._first_log = self._num_started

    async def __aenter__(self) -> RealSwarm:
        await self._children.start()
        await self._children.ready()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._children.close(grace_s=0.0)

    async def begin(self, *, peers_per_stage: int = 2, trainers: int = 1) -> None:
        """Start everyone; returns once the backbone serves and the others have a pid."""
        self.steps.clear()
        await self.spawn("backbone", "backbone")
        await self.serving("backbone")
        for stage in range(self.config.num_stages):
            for index in range(peers_per_stage):
                await self.spawn(f"stage-{stage}-{index}", "stage", "--stage", stage)
        for index in range(trainers):
            await self.spawn(f"trainer-{index}", "trainer", *(["--metrics", self.metrics] if index == 0 else []))

    async def spawn(self, name: str, role: str, *words: object, entry: str | None = None, join: Address | None = None) -> Child:
        """Start `name`, for the first time or again with the same state directory; `entry` in place of the launcher.

        It joins through `join`, which need not be up, or through the backbone; the backbone creates the run.
        """
        argv = ["--host", "127.0.0.1", "--port", "0", "--state-dir", str(self.state_root / name), *map(str, words)]
        if join is None and role != "backbone":
            join = await self.serving("backbone")
        argv += ["--run", str(self._run_file)] if join is None else ["--join", str(join)]
        if role == "stage":
            argv += ["--device", "cpu", "--threads", "1", "--memory-limit", "256MiB"]
            argv += [word for name in self.config.imports.values() for word in ("--allow-import", name)]
        if role == "trainer" and self._data is not None:
            argv += ["--data", self._data]
        self._num_started += 1
        life = f"{name}.{self._num_started}"
        self._serving[name] = asyncio.get_running_loop().create_future()
        child = await self._children.spawn(life, entry or f"launch.{role}:main", argv, title=f"launch_{role} {' '.join(argv)}")
        self.children[name] = child
        return child

    async def serving(self, name: str) -> Address:
        """Wait until `name` serves, and say where."""
        async with asyncio.timeout(START_S):
            return await asyncio.shield(self._serving[name])

    def _on_report(self, life: str, report: dict[str, Any]) -> None:
        name = life.rpartition(".")[0]
        if report["event"] == "serving" and not self._serving[name].done():
            self._serving[name].set_result(Address(report["host"], report["port"]))
        elif report["event"] == "step":
            self.steps.append(report)
            self._stepped.set()

    async def step(self, number: int, *, within_s: float = START_S) -> None:
        """Wait until a trainer has told of step `number`."""
        async with asyncio.timeout(within_s):
            while not any(line["step"] >= number for line in self.steps):
                self._stepped.clear()
                await self._stepped.wait()

    async def kill_all(self) -> None:
        """SIGKILL to every process, and wait until all are gone."""
        alive = [child for child in self.children.values() if child.alive]
        for child in alive:
            child.signal(signal.SIGKILL)
        for child in alive:
            await child.ended
        self.children.clear()

    async def terminate(self, name: str, *, within_s: float) -> int:
        """SIGTERM to one process; its exit code.

        Raises:
            TimeoutError: it goes on for longer than `within_s`.
        """
        child = self.children[name]
        child.signal(signal.SIGTERM)
        async with asyncio.timeout(within_s):
            return await asyncio.shield(child.ended)

    def log(self, name: str) -> str:
        """What all lives of `name` in this run have written."""
        lives = {int(path.stem.rpartition(".")[2]): path for path in self._logs.glob(f"{name}.*.log")}
        return "".join(lives[number].read_text() for number in sorted(lives) if number > self._first_log)
