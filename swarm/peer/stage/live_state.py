"""The parameters of all stages of a live run at one version, for someone who is no peer of it. Owns the asking; stores nothing.

One member of each stage is asked for its snapshot, all at once: between two commits they offer the same version, and each
keeps what it offered. If a commit came between, the snapshots are let go and all are asked again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import tempfile
from pathlib import Path
from typing import TypeVar

import torch

from swarm.base.config import RunConfig
from swarm.base.errors import ConfigError, LinkError, RemoteError, RemoteProtocolError, StorageError
from swarm.base.ids import Address, new_incarnation
from swarm.net.transport import Transport
from swarm.peer.link import together
from swarm.peer.stage.ranges import fetch_ranges
from swarm.peer.stage.state_transfer import MASTERS, RANGE_ELEMENTS
from swarm.stage.compute import MASTER_DTYPES
from swarm.stage.digest import digest_of
from swarm.stage.frozen import stage_module
from swarm.stage.module import StageFactory
from swarm.stage.state_buffers import stage_layout
from swarm.wire import messages as m
from swarm.wire.framing import Frame

M = TypeVar("M", bound=m.Message)


class _Asker:
    """Asks the members of one run, without being one."""

    def __init__(self, transport: Transport, config: RunConfig, run: str, reader: str) -> None:
        self._transport = transport
        self._stall_s = config.timing.stall_s
        self.run = run
        #: Of this export: a donor counts others from the same host by themselves.
        self.reader = reader

    async def ask(self, member: m.Member, message: m.Message, expect: type[M]) -> tuple[M, Frame]:
        reply = await self._transport.call(Address(member.host, member.port), Frame(message), stall_s=self._stall_s)
        if isinstance(reply.message, m.Refusal):
            raise RemoteError(f"{member.peer[:8]}: {reply.message.code}: {reply.message.reason}")
        if not isinstance(reply.message, expect):
            raise RemoteProtocolError(f"{member.peer[:8]} answered with {reply.message.kind}")
        return reply.message, reply


async def fetch_parameters(
    transport: Transport,
    info: m.RunInfo,
    config: RunConfig,
    factory: StageFactory,
    *,
    deadline_s: float,
    rng: random.Random,
    directory: Path,
) -> tuple[m.CommitRecord, dict[str, torch.Tensor]]:
    """Fetch the newest record that all stages hold, and every trained parameter and changing buffer at it, in the masters' dtype.

    Args:
        info: what a peer of the run says of it.
        config: of the run.
        factory: gives the names and shapes of each stage's parameters.
        deadline_s: for the stages to offer one version.
        rng: chooses among members.
        directory: on a disk with room for all of it: what is fetched lies there, in files without a name, and need not stay
            in memory.

    Raises:
        ConfigError: the run has not begun.
        RemoteError: the stages did not offer one version in time, or a download failed; says which stage and why.
        StorageError: the disk has no room.
    """
    if info.record is None:
        raise ConfigError("the run has not begun: there is nothing to export yet")
    asker = _Asker(transport, config, info.record.run, new_incarnation(rng))
    offers = await _one_version_id(asker, info.record, deadline_s, rng)
    try:
        stages = [stage_layout(factory, stage_module(factory, stage, config.frozen)) for stage in range(config.num_stages)]
        dtype = MASTER_DTYPES[config.precision]
        flats = await together(
            *(
                _download(asker, stage, member, manifest, _on_disk(layout.num_elements, dtype, directory))
                for stage, ((member, manifest), layout) in enumerate(zip(offers, stages, strict=True))
            )
        )
    finally:
        await _let_go(asker, dict(enumerate(offers)))
    parameters = {name: value for layout, flat in zip(stages, flats, strict=True) for name, value in layout.named(flat).items()}
    return offers[0][1].record, parameters


Offer = tuple[m.Member, m.StateManifest]


async def _one_version_id(asker: _Asker, record: m.CommitRecord, deadline_s: float, rng: random.Random) -> list[Offer]:
    """Ask for a snapshot of every stage until all are of one version."""
    members = [[x for x in stage if x.ready] for stage in record.members]
    problem = "no answer"

    async def offer(stage: int) -> Offer | str:
        why = "it has no member"
        for member in rng.sample(members[stage], len(members[stage])):
            try:
                wanted = m.StateOffer(run=asker.run, stage=stage, reader=asker.reader)
                manifest, _ = await asker.ask(member, wanted, m.StateManifest)
                return member, manifest
            except (LinkError, RemoteError) as error:
                why = str(error)
        return f"stage {stage}: {why}"

    try:
        async with asyncio.timeout(deadline_s):
            while True:
                answers = await asyncio.gather(*(offer(stage) for stage in range(len(members))))
                offers = {stage: answer for stage, answer in enumerate(answers) if not isinstance(answer, str)}
                if len(offers) == len(members) and len({manifest.record.version_id for _, manifest in offers.values()}) == 1:
                    return [offers[stage] for stage in range(len(members))]
                refused = [answer for answer in answers if isinstance(answer, str)]
                steps = sorted({manifest.record.step + 1 for _, manifest in offers.values()})
                problem = refused[0] if refused else f"the stages are at steps {steps}"
                await _let_go(asker, offers)
                await asyncio.sleep(rng.uniform(0.05, 0.5))
    except TimeoutError:
        raise RemoteError(f"the stages did not offer one version within {deadline_s:g} s; {problem}") from None


async def _download(asker: _Asker, stage: int, member: m.Member, manifest: m.StateManifest, flat: torch.Tensor) -> torch.Tensor:
    num_elements, dtype = len(flat), flat.dtype
    [(_, dtype_name, length, digest)] = [entry for entry in manifest.entries if entry[0] == MASTERS] or [("", "", -1, "")]
    if length != num_elements or dtype_name != str(dtype).removeprefix("torch."):
        raise RemoteError(f"stage {stage}: {length} elements of {dtype_name or 'nothing'} are offered, {num_elements} expected")

    async def fetch(offset: int) -> Frame:
        wanted = m.StateRange(
            run=asker.run,
            stage=stage,
            version_id=manifest.record.version_id,
            name=MASTERS,
            offset=offset,
            length=RANGE_ELEMENTS,
            reader=asker.reader,
        )
        return (await asker.ask(member, wanted, m.StateChunk))[1]

    await fetch_ranges(flat, RANGE_ELEMENTS, fetch, what=f"stage {stage}")
    if digest_of([flat]) != digest:
        raise RemoteError(f"stage {stage}: {member.peer[:8]} sent other bytes than it announced")
    return flat


def _on_disk(num_elements: int, dtype: torch.dtype, directory: Path) -> torch.Tensor:
    """An empty tensor in a file that goes when the tensor does. Its room is taken now: a write to memory cannot be refused."""
    if not num_elements:
        return torch.empty(0, dtype=dtype)
    try:
        with tempfile.NamedTemporaryFile(dir=directory) as file:
            os.posix_fallocate(file.fileno(), 0, num_elements * dtype.itemsize)
            return torch.from_file(file.name, shared=True, size=num_elements, dtype=dtype)
    except OSError as error:
        raise StorageError(f"{directory}: {error.strerror}") from None


async def _let_go(asker: _Asker, offers: dict[int, Offer]) -> None:
    """Tell donors that they need not keep what they offered."""

    async def one(stage: int, member: m.Member, manifest: m.StateManifest) -> None:
        with contextlib.suppress(LinkError, RemoteError):
            release = m.StateOffer(run=asker.run, stage=stage, release=manifest.record.version_id, reader=asker.reader)
            await asker.ask(member, release, m.Ack)

    await asyncio.gather(*(one(stage, *offer) for stage, offer in offers.items()))
