"""State of a stage from one peer to another: a snapshot pinned at a version, served in ranges, verified by digest.

A version's tensors are never modified, so a pin is a reference: it copies nothing and locks nothing. Owns pins and
downloads; must not decide when a peer needs state (`membership` does).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from swarm.base.errors import LinkError, RemoteError
from swarm.lifecycle.commit_record import fault_of
from swarm.net.transport import Progress
from swarm.peer.link import Refuse, together
from swarm.peer.stage.committed_state import CommittedState
from swarm.peer.stage.ranges import put_range
from swarm.peer.stage.stage_context import StageContext
from swarm.stage.digest import digest_of
from swarm.stage.executor import Priority
from swarm.stage.moments import OptimizerState
from swarm.stage.versions import StageState, make_version
from swarm.wire import messages as m
from swarm.wire.compression import encode_tensor
from swarm.wire.framing import Frame

logger = logging.getLogger(__name__)

#: Elements of a snapshot that one request moves.
RANGE_ELEMENTS = 2**20
#: Newcomers that one donor serves at once; a reader that asks for nothing for `READER_STALLS` stalls has gone.
MAX_READERS = 4
READER_STALLS = 2.0
#: While another snapshot is wanted, the pinned one goes unless it moves at this pace, in bytes per second.
CONTENDED_BYTES_PER_S = 2**20

_DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "uint8": torch.uint8,
    "int32": torch.int32,
}
#: Entries of parameters that are not trained: never changed, and only asked for by a peer that has no files.
_FROZEN = "frozen/"
#: Entries of parameters; the others are those of the optimizer's state.
MASTERS, _PREVIOUS = "masters", "previous"


def _tensors(state: StageState) -> dict[str, torch.Tensor]:
    tensors = {MASTERS: state.version.masters, **state.optimizer.tensors}
    if state.previous is not None:
        tensors[_PREVIOUS] = state.previous.masters
    return tensors


@dataclass
class _Pin:
    """The snapshot that is being served."""

    tensors: dict[str, torch.Tensor]
    manifest: m.StateManifest
    since: float
    num_bytes: int = 0
    #: Those that it was offered to and that have not let it go, with the time of their last word.
    readers: dict[str, float] = field(default_factory=dict)


class StateDonor:
    """Serves `StateOffer` and `StateRange`: one snapshot at a time, to a few readers; others are sent elsewhere."""

    def __init__(self, context: StageContext, committed: CommittedState) -> None:
        self._context = context
        self._committed = committed
        self._pin: _Pin | None = None
        self._pinning = asyncio.Lock()
        #: Entries of the manifest for what never changes.
        self._frozen_entries: list[tuple[str, str, int, str]] | None = None
        context.link.register(m.StateOffer, self._on_offer)
        context.link.register(m.StateRange, self._on_range)

    @property
    def num_pins(self) -> int:
        """Snapshots that are pinned: 0 or 1."""
        return int(self._pin is not None)

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    @property
    def _lease_s(self) -> float:
        return READER_STALLS * self._context.config.timing.stall_s

    def _pinned(self) -> _Pin | None:
        """Return the pinned snapshot, unless all its readers have gone."""
        pin = self._pin
        if pin is not None:
            pin.readers = {reader: seen for reader, seen in pin.readers.items() if self._now - seen < self._lease_s}
            if not pin.readers:
                self._pin = None
        return self._pin

    async def _on_offer(self, message: m.StateOffer, frame: Frame, progress: Progress) -> m.StateManifest | m.Ack:
        context, committed, reader = self._context, self._committed, message.reader or progress.remote
        context.require_stage(message.stage)
        if message.release is not None:
            pin = self._pinned()
            if pin is not None and pin.manifest.record.version_id == message.release:
                pin.readers.pop(reader, None)
                self._pinned()
            return m.Ack()
        progress.follow(lambda: context.storage.finished + context.background.finished + context.executor.finished)
        if not committed.is_copying:  # that may take long, and other donors may have what is asked for
            async with committed.settled():
                pass
        async with self._pinning:  # making one takes a while, and there is never a second
            if not committed.up_to_date or committed.versions.newest.record.step < message.min_step:
                raise Refuse("behind", f"this peer holds step {committed.versions.newest.record.step}")
            pin = self._pinned()
            if pin is not None and pin.manifest.record.step < message.min_step:
                self._require_stuck(pin)
                pin = self._pin = None
            if pin is not None and reader not in pin.readers and len(pin.readers) >= MAX_READERS:
                raise Refuse("busy", f"{MAX_READERS} newcomers are being served; ask another member")
            if pin is None:
                pin = self._pin = await self._make_pin()
            pin.readers[reader] = self._now
            return pin.manifest

    def _require_stuck(self, pin: _Pin) -> None:
        """Make room for a snapshot that is wanted, if the pinned one hardly moves; its readers start again.

        Raises:
            Refuse: it moves.
        """
        in_use_s = self._now - pin.since - self._lease_s
        if in_use_s * CONTENDED_BYTES_PER_S <= pin.num_bytes:
            raise Refuse("busy", f"the snapshot of step {pin.manifest.record.step} is being served; ask another member")

    async def _make_pin(self) -> _Pin:
        context, committed = self._context, self._committed
        state = committed.versions.state()
        frozen = {_FROZEN + name: tensor.detach().view(-1) for name, tensor in context.compute.frozen.items()}
        if self._frozen_entries is None:
            self._frozen_entries = await self._entries(frozen)
        manifest = m.StateManifest(
            record=state.version.record,
            previous=state.previous.record if state.previous else None,
            entries=(*await self._entries(_tensors(state)), *self._frozen_entries),
            num_updates=state.optimizer.num_updates,
        )
        return _Pin(_tensors(state) | frozen, manifest, self._now)

    async def _entries(self, tensors: dict[str, torch.Tensor]) -> list[tuple[str, str, int, str]]:
        entries, storage = [], self._context.storage
        for name, tensor in tensors.items():
            digest = await storage.run(lambda t=tensor: digest_of([t], tick=storage.tick), Priority.CONTROL)  # type: ignore[misc]
            entries.append((name, str(tensor.dtype).removeprefix("torch."), tensor.numel(), digest.value))
        return entries

    async def _on_range(self, message: m.StateRange, frame: Frame, progress: Progress) -> Frame:
        self._context.require_stage(message.stage)
        pin, reader = self._pinned(), message.reader or progress.remote
        if pin is None or pin.manifest.record.version_id != message.version_id or reader not in pin.readers:
            raise Refuse("unknown", "no such snapshot is pinned here for this peer")
        pin.readers[reader] = self._now
        if message.name not in pin.tensors:
            raise Refuse("unknown", f"the snapshot has no tensor {message.name!r}")
        # A copy: a view would hold the whole tensor for as long as a slow link takes, also after the pin has gone.
        part = pin.tensors[message.name][message.offset : message.offset + min(message.length, RANGE_ELEMENTS)]
        spec, buffer = encode_tensor(message.name, part.detach().to("cpu", copy=True), "raw", "state")
        pin.num_bytes += spec.num_bytes
        self._context.bytes_moved.sent_state(spec.num_bytes)
        return Frame(m.StateChunk(tensors=(spec,)), (buffer,))


class _Incoming:
    """One snapshot on its way in, in ranges, from several donors at once; a donor that fails gives its range back."""

    def __init__(self, context: StageContext, manifest: m.StateManifest) -> None:
        self._context = context
        self._link = context.link
        self.manifest = manifest
        compute = context.compute
        #: Name, dtype, length and digest of what is wanted.
        self._wanted = [entry for entry in manifest.entries if not (entry[0].startswith(_FROZEN) and compute.has_frozen)]
        missing = {_FROZEN + name for name in compute.frozen} - {name for name, *_ in self._wanted}
        if missing and not compute.has_frozen:
            raise RemoteError(f"the snapshot lacks {len(missing)} parameters that are not trained, first {min(missing)}")
        self._tensors = {}
        for name, dtype_name, length, _ in self._wanted:
            target = compute.frozen.get(name.removeprefix(_FROZEN)) if name.startswith(_FROZEN) else None
            if target is not None:
                num_elements, dtype = target.numel(), target.dtype
            elif name in (MASTERS, _PREVIOUS):
                num_elements, dtype = compute.layout.num_elements, compute.master_dtype
            elif name in context.moments.entries:
                dtype, layout = context.moments.entries[name]
                num_elements = layout.num_elements
            else:
                raise RemoteError(f"{name} is nothing that this stage has")
            if length != num_elements or _DTYPES.get(dtype_name) != dtype:
                raise RemoteError(f"{name} has {length} elements of {dtype_name}, this stage {num_elements} of {dtype}")
            self._tensors[name] = torch.empty(num_elements, dtype=dtype) if target is None else target.detach().view(-1)
        self._pending = deque(
            (name, offset) for name, tensor in self._tensors.items() for offset in range(0, tensor.numel(), RANGE_ELEMENTS)
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
            run=self._link.context.run,
            stage=self._context.stage,
            version_id=self.manifest.record.version_id,
            name=name,
            offset=offset,
            length=RANGE_ELEMENTS,
            reader=self._link.context.incarnation,
        )
        stall_s = self._link.context.config.timing.stall_s
        _, frame = await self._link.ask(donor, ask, m.StateChunk, stall_s=stall_s)
        put_range(self._tensors[name][offset : offset + RANGE_ELEMENTS], frame, what=name)
        self._context.bytes_moved.received_state(frame.body_bytes)

    async def verified(self) -> StageState:
        """Return the state, once every tensor has the digest that was announced.

        Raises:
            RemoteError: naming the tensor that has another.
        """
        compute = self._context.compute
        tensors = {}
        for name, _, _, digest in self._wanted:
            flat = self._tensors[name]
            found = await self._context.storage.run(lambda f=flat: digest_of([f]), Priority.CONTROL)  # type: ignore[misc]
            if found.value != digest:
                raise RemoteError(f"{name}: the digest differs from the one announced")
            if not name.startswith(_FROZEN):
                is_moment = name in self._context.moments.entries
                tensors[name] = flat.to(self._context.moments.home if is_moment else compute.device)
        compute.received_frozen()
        moments = self._context.moments.entries
        if set(tensors) - {_PREVIOUS} != {MASTERS, *moments}:
            raise RemoteError(f"the snapshot has entries {sorted(tensors)}")
        previous = None
        if self.manifest.previous is not None and _PREVIOUS in tensors:
            previous = make_version(self.manifest.previous, compute.layout, tensors[_PREVIOUS], compute.dtype)
        version = make_version(self.manifest.record, compute.layout, tensors[MASTERS], compute.dtype)
        optimizer = OptimizerState({name: tensors[name] for name in moments}, self.manifest.num_updates)
        return StageState(version, optimizer, previous)


async def download(context: StageContext, donors: Sequence[m.Member], *, min_step: int) -> StageState:
    """Download a verified snapshot of step `min_step` or newer, from as many of `donors` as offer the same version.

    Raises:
        RemoteError: none of them gave one; says what each answered.
    """
    reasons: list[str] = []
    link, stall_s = context.link, context.config.timing.stall_s

    async def offer(donor: m.Member) -> m.StateManifest | None:
        ask = m.StateOffer(run=link.context.run, stage=context.stage, min_step=min_step, reader=link.context.incarnation)
        try:
            manifest, _ = await link.ask(donor, ask, m.StateManifest, stall_s=stall_s)
        except (LinkError, RemoteError) as error:
            reasons.append(f"{donor.peer[:8]}: {error}")
            return None
        fault = fault_of(link.context.config, manifest.record)
        if fault or manifest.record.run != link.context.run:
            reasons.append(f"{donor.peer[:8]}: its record is none of this run: {fault or 'another run'}")
            return None
        return manifest if manifest.record.step >= min_step else None

    offers = list(zip(donors, await asyncio.gather(*(offer(donor) for donor in donors)), strict=True))
    given = [(donor, manifest) for donor, manifest in offers if manifest is not None]
    state = await _from_offers(context, given, reasons) if given else None
    await asyncio.gather(*(_let_go(context, donor, manifest) for donor, manifest in given))
    if state is None:
        raise RemoteError(f"no state for stage {context.stage}: {'; '.join(reasons) or 'nobody to ask'}")
    return state


async def _from_offers(
    context: StageContext, given: list[tuple[m.Member, m.StateManifest]], reasons: list[str]
) -> StageState | None:
    """Download the newest of the offered snapshots; if none is had, `reasons` grows by what each donor answered."""
    newest = max((manifest for _, manifest in given), key=lambda x: (x.record.era, x.record.step, x.record.version_id))
    incoming = _Incoming(context, newest)
    sources = [d for d, x in given if (x.record.version_id, x.entries) == (newest.record.version_id, newest.entries)]

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
            logger.warning("stage %d: no state from %s: %s", context.stage, names, error)
            reasons.append(f"{names}: {error}")
    for donor in sources if incoming.complete else []:  # one of them is to blame: each alone
        incoming = _Incoming(context, newest)
        try:
            await incoming.fetch_from(donor)
            return await incoming.verified()
        except (LinkError, RemoteError) as error:
            logger.warning("stage %d: no state from %s: %s", context.stage, donor.peer[:8], error)
            reasons.append(f"{donor.peer[:8]}: {error}")
    return None


async def _let_go(context: StageContext, donor: m.Member, manifest: m.StateManifest) -> None:
    """Tell `donor` that its snapshot is not needed any more; else it turns other newcomers away for a while."""
    release = m.StateOffer(
        run=context.run, stage=context.stage, release=manifest.record.version_id, reader=context.link.context.incarnation
    )
    with contextlib.suppress(LinkError, RemoteError, TimeoutError):
        async with asyncio.timeout(context.config.timing.heartbeat_s):  # a donor that is gone is not waited for
            await context.link.ask(donor, release, m.Ack)
