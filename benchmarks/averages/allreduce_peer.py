"""One stage peer for `allreduce.py`: the product's member, leader, rounds and HTTP transport with one large parameter.

Started as a process of its own; prints one JSON line when it listens, and ends with its standard input. The tickets'
gradients are drawn by seed, so that the sum is known without asking anyone.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import sys
from typing import Any

import torch

from swarm.base.config import RunConfig
from swarm.base.ids import new_incarnation
from swarm.lifecycle.step import LedgerEntry
from swarm.net.http.transport import HttpTransport
from swarm.net.identity import Identity
from swarm.peer.context import PeerContext
from swarm.peer.link import Link, Tasks
from swarm.peer.stage.committed_state import CommittedState
from swarm.peer.stage.load import LoadMeter
from swarm.peer.stage.rounds import Rounds
from swarm.peer.stage.saved_states import SavedStates
from swarm.peer.stage.stage_context import BytesMoved, StageContext
from swarm.peer.stage.stage_leader import StageLeader
from swarm.peer.stage.stage_member import StageMember
from swarm.peer.stage.step_state import OpenSteps
from swarm.peer.stage.sum_copies import SumCopies
from swarm.stage.compute import StageCompute
from swarm.stage.executor import ThreadExecutor, Threads
from swarm.stage.optimizers.choice import optimizer_of
from swarm.testing.memory_dht import MemoryDht, MemoryDhtNetwork


class OneParameter:
    """A stage factory: nothing but a vector."""

    num_stages = 1

    def __init__(self, num_elements: int) -> None:
        self._num_elements = num_elements

    def build(self, stage: int) -> torch.nn.Module:
        module = torch.nn.Module()
        module.vector = torch.nn.Parameter(torch.zeros(self._num_elements))
        return module


def gradient_of(index: int, num_elements: int) -> torch.Tensor:
    """What peer `index` contributes."""
    return torch.randn(num_elements, generator=torch.Generator().manual_seed(index))


def config_of(num_peers: int, **fields: Any) -> RunConfig:
    """Of every peer: a step has a ticket for each of them."""
    timing = {"stall_s": 60.0, "average_s": 300.0, "request_s": 60.0}
    return RunConfig(
        name="allreduce", num_stages=1, micro_batch_size=1, target_batch_size=num_peers, precision="fp32", timing=timing, **fields
    )


def context_of(config: RunConfig, seed: int, advertise_host: str, **transport: Any) -> PeerContext:
    rng = random.Random(seed)
    http = HttpTransport(**transport)
    dht = MemoryDht(MemoryDhtNetwork(rng), identity=(identity := Identity.ephemeral(rng)), address=http.address)
    return PeerContext(
        config=config,
        config_bytes=config.to_bytes(),
        identity=identity,
        incarnation=new_incarnation(rng),
        transport=http,
        dht=dht,
        rng=rng,
        advertise_host=advertise_host,
    )


async def serve(options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    index, num_elements = options["index"], options["elements"]
    config = config_of(options["peers"], **options["config"])
    context = context_of(config, 1000 + index, options["host"], host=options["host"])
    link = Link(context)
    compute = StageCompute(OneParameter(num_elements), 0, precision=config.precision, seed=0)
    threads = Threads(**{name: ThreadExecutor(name) for name in ("compute", "background", "storage")})
    optimizer = optimizer_of(config, compute.layout, dtype=compute.master_dtype, device="cpu")
    here = StageContext(link, compute, optimizer, threads, Tasks(), BytesMoved())
    steps = OpenSteps(here)
    held = CommittedState(here, steps, SumCopies(here, steps), SavedStates(here, None))
    member = StageMember(here, held, steps, LoadMeter(here, held), lambda: ())
    Rounds(here, held, member)
    StageLeader(here, held, member)
    accumulator = member.step_state(0).accumulator
    accumulator.ledger.grant(index, accumulator.ledger.attempt)
    accumulator.add(index, LedgerEntry(1, 0.0), [gradient_of(index, num_elements)])
    await link.serve()
    gc.freeze()  # as the launchers do
    print(json.dumps(context.member().model_dump(mode="json")), flush=True)
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(None, sys.stdin.read)
    await context.transport.close()


if __name__ == "__main__":
    asyncio.run(serve(json.loads(sys.argv[1])))
