"""State of a stage from one peer to another: a snapshot pinned at a head, served in ranges, verified by digest.

A version's tensors are never modified, so a pin is a reference: it copies nothing and locks nothing. Owns pins and
downloads; must not decide when a peer needs state (`membership` does).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from swarm.base.errors import LinkError, RemoteError
from swarm.net.transport import Progress
from swarm.peer.link import Link, Refuse
from swarm.peer.stage_member import CHUNK_ELEMENTS, StageMember
from swarm.stage.digest import digest_of
from swarm.stage.executor import Priority
from swarm.stage.optimizer import OptimizerState
from swarm.stage.versions import StageState, make_version
from swarm.wire import messages as m
from swarm.wire.compression import decode_tensor, encode_tensor
from swarm.wire.framing import Frame

#: Snapshots that one donor keeps pinned at once, and for how long after the last request.
MAX_PINS = 2
PIN_S = 60.0

_DTYPES = {"float32": torch.float32, "float64": torch.float64}


def _tensors(state: StageState) -> dict[str, torch.Tensor]:
    tensors = {"masters": state.version.masters, "first": state.optimizer.first, "second": state.optimizer.second}
    if state.previous is not None:
        tensors["previous"] = state.previous.masters
    return tensors


@dataclass
class _Pin:
    tensors: dict[str, torch.Tensor]
    manifest: m.StateManifest
    until: float


class StateDonor:
    """Serves `StateOffer` and `StateRange`."""

    def __init__(self, link: Link, member: StageMember) -> None:
        self._member = member
        self._pins: dict[str, _Pin] = {}
        link.register(m.StateOffer, self._on_offer)
        link.register(m.StateRange, self._on_range)

    def _expire(self, now: float) -> None:
        for head in [h for h, pin in self._pins.items() if pin.until <= now]:
            del self._pins[head]

    async def _on_offer(self, message: m.StateOffer, frame: Frame, progress: Progress) -> m.StateManifest:
        member = self._member
        member.require_stage(message.stage)
        now = asyncio.get_running_loop().time()
        self._expire(now)
        if not member.up_to_date or member.versions.newest.record.step < message.min_step:
            raise Refuse("behind", f"this peer holds step {member.versions.newest.record.step}")
        state = member.versions.state()
        pin = self._pins.get(state.version.head)
        if pin is None:
            if len(self._pins) >= MAX_PINS:
                raise Refuse("busy", f"{MAX_PINS} snapshots are being served; ask another member")
            progress.follow(lambda: member.background.finished)
            entries = []
            for name, tensor in _tensors(state).items():
                digest = await member.background.run(lambda t=tensor: digest_of([t]), Priority.CONTROL)  # type: ignore[misc]
                entries.append((name, str(tensor.dtype).removeprefix("torch."), tensor.numel(), digest.value))
            manifest = m.StateManifest(
                record=state.version.record, previous=state.previous.record if state.previous else None,
                entries=tuple(entries), num_updates=state.optimizer.num_updates,
            )  # fmt: skip
            pin = self._pins[state.version.head] = _Pin(_tensors(state), manifest, 0.0)
        pin.until = now + PIN_S
        return pin.manifest

    async def _on_range(self, message: m.StateRange, frame: Frame, progress: Progress) -> Frame:
        self._member.require_stage(message.stage)
        now = asyncio.get_running_loop().time()
        self._expire(now)
        pin = self._pins.get(message.head)
        if pin is None:
            raise Refuse("unknown", "no such snapshot is pinned here")
        pin.until = now + PIN_S
        if message.name not in pin.tensors:
            raise Refuse("unknown", f"the snapshot has no tensor {message.name!r}")
        part = pin.tensors[message.name][message.offset : message.offset + min(message.length, CHUNK_ELEMENTS)]
        spec, buffer = encode_tensor(message.name, part.detach().cpu(), "raw", "state")
        return Frame(m.StateChunk(tensors=(spec,)), (buffer,))


async def download(
    link: Link, member: StageMember, donors: Sequence[m.Member], *, min_step: int
) -> StageState:
    """A verified snapshot of step `min_step` or newer from one of `donors`.

    Raises:
        RemoteError: none of them gave one; says what each answered.
    """
    reasons = []
    for donor in donors:
        try:
            return await _download_from(link, member, donor, min_step=min_step)
        except (LinkError, RemoteError) as error:
            reasons.append(f"{donor.peer[:8]}: {error}")
    raise RemoteError(f"no state for stage {member.stage}: {'; '.join(reasons) or 'nobody to ask'}")


async def _download_from(
    link: Link, member: StageMember, donor: m.Member, *, min_step: int
) -> StageState:
    run, stage = link.context.run, member.stage
    timing = link.context.config.timing
    offer = m.StateOffer(run=run, stage=stage, min_step=min_step)
    manifest, _ = await link.ask(donor, offer, m.StateManifest, stall_s=timing.stall_s)
    if manifest.record.step < min_step:
        raise RemoteError(f"offered step {manifest.record.step}, {min_step} was asked for")
    num_elements, dtype = member.compute.layout.num_elements, member.compute.master_dtype
    tensors: dict[str, torch.Tensor] = {}
    for name, dtype_name, length, digest in manifest.entries:
        if length != num_elements or _DTYPES.get(dtype_name) != dtype:
            raise RemoteError(f"{name} has {length} elements of {dtype_name}, this stage {num_elements} of {dtype}")
        flat = torch.empty(num_elements, dtype=dtype)
        for offset in range(0, length, CHUNK_ELEMENTS):
            ask = m.StateRange(
                run=run, stage=stage, head=manifest.record.head, name=name, offset=offset, length=CHUNK_ELEMENTS
            )
            _, frame = await link.ask(donor, ask, m.StateChunk, stall_s=timing.stall_s)
            part = decode_tensor(frame.message.tensors[0], frame.buffers[0])
            if part.shape != flat[offset : offset + CHUNK_ELEMENTS].shape:
                raise RemoteError(f"{name}: a range came back with the wrong length")
            flat[offset : offset + CHUNK_ELEMENTS] = part
        found = (await member.background.run(lambda f=flat: digest_of([f]), Priority.CONTROL)).value  # type: ignore[misc]
        if found != digest:
            raise RemoteError(f"{name}: the digest differs from the one announced")
        tensors[name] = flat.to(member.compute.device)
    if set(tensors) - {"previous"} != {"masters", "first", "second"}:
        raise RemoteError(f"the snapshot has entries {sorted(tensors)}")
    layout, compute_dtype = member.compute.layout, member.compute.dtype
    previous = None
    if manifest.previous is not None and "previous" in tensors:
        previous = make_version(manifest.previous, layout, tensors["previous"], compute_dtype)
    version = make_version(manifest.record, layout, tensors["masters"], compute_dtype)
    return StageState(version, OptimizerState(tensors["first"], tensors["second"], manifest.num_updates), previous)
