"""A stage of peers as processes, led by a driver: what the all-reduce benchmarks measure."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any

import torch

from benchmarks.averages.allreduce_peer import config_of, context_of
from swarm.base.config import RunConfig
from swarm.base.ids import Ballot
from swarm.peer.link import Link
from swarm.testing.shaped_namespaces import Place
from swarm.wire import messages as m
from swarm.wire.compression import decode_tensor

#: Elements of the average that are compared with the sum of the contributions.
CHECKED = 2**20
#: Rounds that do not count: memory is fresh in the first two, and the number of chunks follows from a round before.
WARM_UP = 3


class Swarm:
    """The peers of one case, and the driver's link to them."""

    def __init__(self, link: Link, config: RunConfig, members: list[m.Member], processes: list[subprocess.Popen[str]]) -> None:
        self.link = link
        self.config = config
        self.members = members
        self.processes = processes
        self._n = 0

    async def seals(self) -> tuple[m.Attempt, tuple[m.Seal, ...]]:
        """Freeze everyone's ledger for a new attempt."""
        self._n += 1
        attempt = m.Attempt(ballot=Ballot(1, self.link.context.peer), n=self._n)
        gather = m.Gather(run=self.link.context.run, stage=0, step=0, attempt=attempt, freeze=True, members=tuple(self.members))
        gathered, _ = await self.link.ask(self.members[0], gather, m.Gathered)
        return attempt, gathered.seals

    async def average(self, attempt: m.Attempt, seals: tuple[m.Seal, ...]) -> m.AllReduced:
        request = m.AllReduce(run=self.link.context.run, stage=0, step=0, attempt=attempt, seals=seals)
        return (await self.link.ask(self.members[0], request, m.AllReduced, stall_s=120.0))[0]

    async def part(self, holder: m.Member, result: m.StageResult) -> torch.Tensor:
        """The first elements of the average that `holder` has."""
        request = m.FetchSum(run=self.link.context.run, stage=0, step=0, digest=result.sum_digest, length=CHECKED)
        _, frame = await self.link.ask(holder, request, m.SumCopy, stall_s=60.0)
        return decode_tensor(frame.message.tensors[0], frame.buffers[0])


def started(command: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


@contextlib.asynccontextmanager
async def swarm_of(
    num_peers: int, num_elements: int, *, places: Sequence[Place] | None = None, driver: str = "127.0.0.1", **fields: Any
) -> AsyncIterator[Swarm]:
    """Started peers; `fields` go into their run's configuration.

    Args:
        num_peers: of the stage.
        num_elements: of the average.
        places: of the peers; this machine's loopback if None.
        driver: the driver's own address.
        fields: of `RunConfig`.
    """
    places = places or [Place("127.0.0.1", ())] * num_peers
    config = config_of(num_peers, **fields)
    processes: list[subprocess.Popen[str]] = []
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    link = Link(context_of(config, 1, driver, host=driver))
    await link.serve()
    try:
        for index in range(num_peers):
            options = {"index": index, "peers": num_peers, "elements": num_elements, "config": fields, "host": places[index].host}
            command = [*places[index].prefix, sys.executable, "-m", "benchmarks.averages.allreduce_peer", json.dumps(options)]
            processes.append(started(command, environment))
        members = [m.Member(**json.loads(process.stdout.readline())) for process in processes]  # type: ignore[union-attr]
        yield Swarm(link, config, members, processes)
    finally:
        await link.context.transport.close()
        for process in processes:
            with contextlib.suppress(OSError):
                process.stdin.close()  # type: ignore[union-attr]
        for process in processes:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
