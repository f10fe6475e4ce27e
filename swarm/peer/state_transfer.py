"""State of a stage from one peer to another: a snapshot pinned at a head, served in ranges, verified by digest.

A version's tensors are never modified, so a pin is a reference: it copies nothing and locks nothing. Owns pins and
downloads; must not decide when a peer needs state (`membership` does).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from swarm.base.errors import LinkError, RemoteError
from swarm.net.transport import Progress
from swarm.peer.link import Link, Refuse, together
from swarm.peer.stage_member import CHUNK_ELEMENTS, StageMember
from swarm.stage.digest import digest_of
from swarm.stage.executor import Priority
from swarm.stage.optimizer import OptimizerState
from swarm.stage.versions import StageState, make_version
from swarm.wire import messages as m
from swarm.wire.compression import decode_tensor, encode_tensor
from swarm.wire.framing import Frame

logger = logging.getLogger(__name__)

#: Snapshots that one donor keeps pinned at once, until nobody has asked for `PIN_STALLS` times the time of a stall.
MAX_PINS = 1
PIN_STALLS = 2.0

_DTYPES = {
    "float32": torch.float32, "float64": torch.float64, "float16": torch.float16, "bfloat16": torch.bfloat16,
    "uint8": torch.uint8, "int32": torch.int32,
}  # fmt: skip
#: Entries of parameters that are not trained: never changed, and only asked for by a peer that has no files.
_FROZEN = "frozen/"


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
    #: Newcomers that it was offered to and that have not let it go; of silent ones `until` makes an end.
    users: int = 0


class StateDonor:
    """Serves `StateOffer` and `StateRange`."""

    def __init__(self, link: Link, member: StageMember) -> None:
        self._member = member
        self._pins: dict[str, _Pin] = {}
        #: Entries of the manifest for what never changes.
        self._frozen_entries: list[tuple[str, str, int, str]] | None = None
        link.register(m.StateOffer, self._on_offer)
        link.register(m.StateRange, self._on_range)

    def _expire(self, now: float) -> None:
        for head in [h for h, pin in self._pins.items() if pin.until <= now]:
            del self._pins[head]

    def _release(self, head: str) -> m.Ack:
        pin = self._pins.get(head)
        if pin is not None:
            pin.users -= 1
            if pin.users <= 0:
                del self._pins[head]
        return m.Ack()

    async def _on_offer(self, message: m.StateOffer, frame: Frame, progress: Progress) -> m.StateManifest | m.Ack:
        member = self._member
        member.require_stage(message.stage)
        if message.release is not None:
            return self._release(message.release)
        now = asyncio.get_running_loop().time()
        self._expire(now)
        if not member.up_to_date or member.versions.newest.record.step < message.min_step:
            raise Refuse("behind", f"this peer holds step {member.versions.newest.record.step}")
        state = member.versions.state()
        pinned = [p for p in self._pins.values() if p.manifest.record.step >= message.min_step]
        pin = pinned[0] if pinned else None
        if pin is None:
            if len(self._pins) >= MAX_PINS:
                raise Refuse("busy", f"{MAX_PINS} snapshots are being served; ask another member")
            progress.follow(lambda: member.background.finished)
            frozen = {_FROZEN + name: tensor.detach().view(-1) for name, tensor in member.compute.frozen.items()}
            if self._frozen_entries is None:
                self._frozen_entries = await self._entries(frozen)
            manifest = m.StateManifest(
                record=state.version.record, previous=state.previous.record if state.previous else None,
                entries=(*await self._entries(_tensors(state)), *self._frozen_entries),
                num_updates=state.optimizer.num_updates,
            )  # fmt: skip
            pin = self._pins[state.version.head] = _Pin(_tensors(state) | frozen, manifest, 0.0)
        pin.until = now + PIN_STALLS * member.config.timing.stall_s
        pin.users += 1
        return pin.manifest

    async def _entries(self, tensors: dict[str, torch.Tensor]) -> list[tuple[str, str, int, str]]:
        entries = []
        for name, tensor in tensors.items():
            digest = await self._member.background.run(lambda t=tensor: digest_of([t]), Priority.CONTROL)  # type: ignore[misc]
            entries.append((name, str(tensor.dtype).removeprefix("torch."), tensor.numel(), digest.value))
        return entries

    async def _on_range(self, message: m.StateRange, frame: Frame, progress: Progress) -> Frame:
        self._member.require_stage(message.stage)
        now = asyncio.get_running_loop().time()
        self._expire(now)
        pin = self._pins.get(message.head)
        if pin is None:
            raise Refuse("unknown", "no such snapshot is pinned here")
        pin.until = now + PIN_STALLS * self._member.config.timing.stall_s
        if message.name not in pin.tensors:
            raise Refuse("unknown", f"the snapshot has no tensor {message.name!r}")
        part = pin.tensors[message.name][message.offset : message.offset + min(message.length, CHUNK_ELEMENTS)]
        spec, buffer = encode_tensor(message.name, part.detach().cpu(), "raw", "state")
        return Frame(m.StateChunk(tensors=(spec,)), (buffer,))


class _Incoming:
    """One snapshot on its way in, in ranges, from several donors at once; a donor that fails gives its range back."""

    def __init__(self, link: Link, member: StageMember, manifest: m.StateManifest) -> None:
        self._link = link
        self._member = member
        self.manifest = manifest
        compute = member.compute
        #: Name, dtype, length and digest of what is wanted.
        self._wanted = [
            entry for entry in manifest.entries if not (entry[0].startswith(_FROZEN) and compute.has_frozen)
        ]
        missing = {_FROZEN + name for name in compute.frozen} - {name for name, *_ in self._wanted}
        if missing and not compute.has_frozen:
            raise RemoteError(f"the snapshot lacks {len(missing)} parameters that are not trained, first {min(missing)}")
        self._tensors = {}
        for name, dtype_name, length, _ in self._wanted:
            target = compute.frozen.get(name.removeprefix(_FROZEN)) if name.startswith(_FROZEN) else None
            num_elements, dtype = compute.layout.num_elements, compute.master_dtype
            if name.startswith(_FROZEN) and target is None:
                raise RemoteError(f"{name} is no parameter of this stage")
            if target is not None:
                num_elements, dtype = target.numel(), target.dtype
            if length != num_elements or _DTYPES.get(dtype_name) != dtype:
                raise RemoteError(f"{name} has {length} elements of {dtype_name}, this stage {num_elements} of {dtype}")
            self._tensors[name] = torch.empty(num_elements, dtype=dtype) if target is None else target.detach().view(-1)
        self._pending = deque(
            (name, offset) for name, tensor in self._tensors.items() for offset in range(0, tensor.numel(), CHUNK_ELEMENTS)
        )
        self._under_way = 0
        self._changed = asyncio.Condition()

    @property
    def complete(self) -> bool:
        return not self._pending and not self._under_way

    async def fetch_from(self, donor: m.Member) -> None:
        """Ask `donor` for one range after another until none is left.

        Raises:
            LinkError, RemoteError: it gave no more; what it had is kept.
        """
        while (wanted := await self._next()) is not None:
            try:
                await self._fetch(donor, *wanted)
            except BaseException:
                self._pending.appendleft(wanted)
                raise
            finally:
                self._under_way -= 1
                async with self._changed:
                    self._changed.notify_all()

    async def _next(self) -> tuple[str, int] | None:
        async with self._changed:
            while not self._pending and self._under_way:  # another donor may yet give its range back
                await self._changed.wait()
            if not self._pending:
                return None
            self._under_way += 1
            return self._pending.popleft()

    async def _fetch(self, donor: m.Member, name: str, offset: int) -> None:
        ask = m.StateRange(
            run=self._link.context.run, stage=self._member.stage, head=self.manifest.record.head, name=name,
            offset=offset, length=CHUNK_ELEMENTS,
        )  # fmt: skip
        stall_s = self._link.context.config.timing.stall_s
        _, frame = await self._link.ask(donor, ask, m.StateChunk, stall_s=stall_s)
        target = self._tensors[name][offset : offset + CHUNK_ELEMENTS]
        part = decode_tensor(frame.message.tensors[0], frame.buffers[0])
        if part.shape != target.shape:
            raise RemoteError(f"{name}: a range came back with the wrong length")
        target.copy_(part)

    async def verified(self) -> StageState:
        """The state, once every tensor has the digest that was announced.

        Raises:
            RemoteError: naming the tensor that has another.
        """
        compute = self._member.compute
        tensors = {}
        for name, _, _, digest in self._wanted:
            flat = self._tensors[name]
            found = await self._member.background.run(lambda f=flat: digest_of([f]), Priority.CONTROL)  # type: ignore[misc]
            if found.value != digest:
                raise RemoteError(f"{name}: the digest differs from the one announced")
            if not name.startswith(_FROZEN):
                tensors[name] = flat.to(compute.device)
        compute.has_frozen = True
        if set(tensors) - {"previous"} != {"masters", "first", "second"}:
            raise RemoteError(f"the snapshot has entries {sorted(tensors)}")
        previous = None
        if self.manifest.previous is not None and "previous" in tensors:
            previous = make_version(self.manifest.previous, compute.layout, tensors["previous"], compute.dtype)
        version = make_version(self.manifest.record, compute.layout, tensors["masters"], compute.dtype)
        optimizer = OptimizerState(tensors["first"], tensors["second"], self.manifest.num_updates)
        return StageState(version, optimizer, previous)


async def download(link: Link, member: StageMember, donors: Sequence[m.Member], *, min_step: int) -> StageState:
    """A verified snapshot of step `min_step` or newer, from as many of `donors` as offer the same head.

    Raises:
        RemoteError: none of them gave one; says what each answered.
    """
    reasons: list[str] = []
    stall_s = link.context.config.timing.stall_s

    async def offer(donor: m.Member) -> m.StateManifest | None:
        ask = m.StateOffer(run=link.context.run, stage=member.stage, min_step=min_step)
        try:
            manifest, _ = await link.ask(donor, ask, m.StateManifest, stall_s=stall_s)
        except (LinkError, RemoteError) as error:
            reasons.append(f"{donor.peer[:8]}: {error}")
            return None
        return manifest if manifest.record.step >= min_step else None

    offers = list(zip(donors, await asyncio.gather(*(offer(donor) for donor in donors)), strict=True))
    given = [(donor, manifest) for donor, manifest in offers if manifest is not None]
    state = await _from_offers(link, member, given, reasons) if given else None
    await asyncio.gather(*(_let_go(link, member, donor, manifest) for donor, manifest in given))
    if state is None:
        raise RemoteError(f"no state for stage {member.stage}: {'; '.join(reasons) or 'nobody to ask'}")
    return state


async def _from_offers(
    link: Link, member: StageMember, given: list[tuple[m.Member, m.StateManifest]], reasons: list[str]
) -> StageState | None:
    """The newest of the offered snapshots, or None; then `reasons` grows by what each donor answered."""
    newest = max((manifest for _, manifest in given), key=lambda x: (x.record.era, x.record.step, x.record.head))
    incoming = _Incoming(link, member, newest)
    sources = [d for d, x in given if (x.record.head, x.entries) == (newest.record.head, newest.entries)]

    async def fetch(donor: m.Member) -> None:
        try:
            await incoming.fetch_from(donor)
        except (LinkError, RemoteError) as error:
            reasons.append(f"{donor.peer[:8]}: {error}")

    await together(*(fetch(donor) for donor in sources))
    if incoming.complete:
        try:
            return await incoming.verified()
        except RemoteError as error:
            names = ", ".join(donor.peer[:8] for donor in sources)
            logger.warning("stage %d: no state from %s: %s", member.stage, names, error)
            reasons.append(f"{names}: {error}")
    for donor in sources if incoming.complete else []:  # one of them is to blame: each alone
        incoming = _Incoming(link, member, newest)
        try:
            await incoming.fetch_from(donor)
            return await incoming.verified()
        except (LinkError, RemoteError) as error:
            logger.warning("stage %d: no state from %s: %s", member.stage, donor.peer[:8], error)
            reasons.append(f"{donor.peer[:8]}: {error}")
    return None


async def _let_go(link: Link, member: StageMember, donor: m.Member, manifest: m.StateManifest) -> None:
    """Tell `donor` that its snapshot is not needed any more; else it turns other newcomers away for a while."""
    release = m.StateOffer(run=link.context.run, stage=member.stage, release=manifest.record.head)
    with contextlib.suppress(LinkError, RemoteError):
        await link.ask(donor, release, m.Ack)
