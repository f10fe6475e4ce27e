"""One slice of a butterfly all-reduce: all members' chunks of it come in, and their sums go back.

Two words: a *slice* is the range of the vector that one member reduces; a *chunk* is a piece of one slice, coded, as it
travels: one from each member, and their sum back. (How large the slices are is decided in `policy/shares.py`.)

Sums are taken in the order of the members, so they do not depend on who comes first. With a lossy code a sum is encoded
once, and its reducer keeps what the others decode. A member reduces its own slice, and sends its chunks of the other
slices besides (`butterfly.py`). An auxiliary has nothing to average and needs no result: it only reduces. Owns the chunks
under way; must not know how they travel.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from swarm.averaging.robust import centered_clip
from swarm.base.errors import SwarmError
from swarm.policy.shares import hagenbach_bischoff, slice_bounds
from swarm.stage.accumulator import is_finite
from swarm.stage.flat import empty_flat
from swarm.wire.compression import decode_tensor, encode_sparse, encode_tensor
from swarm.wire.framing import Buffer
from swarm.wire.messages import BLOCK_SIZE, SPARSE_CODECS, Codec, Member, TensorSpec

#: The largest slice travels in about so many chunks, unless they would be small. The more there are, the longer the way out
#: and the way back overlap.
NUM_CHUNKS = 16
#: A chunk should take `CHUNK_S` seconds: on fast lines there are fewer chunks, since each is a request, which takes half a
#: millisecond of CPU. There are never fewer than `MIN_CHUNKS`.
CHUNK_S, MIN_CHUNKS = 0.16, 4
#: An auxiliary's slice travels in more chunks: its line carries chunks in, and sums out, only while both are under way.
NUM_AUXILIARY_CHUNKS = 128
MIN_CHUNK_ELEMENTS, MAX_CHUNK_ELEMENTS = 2**14, 2**20
#: About so many chunks of a member are under way at once. They share its line: were there more, the first would come back
#: later, and the way back would be idle until then.
UNDER_WAY = 28
#: Chunks under way for each pair of members, at most and at least.
WINDOW, MIN_WINDOW = 4, 2
#: Chunks under way for each pair of a member and an auxiliary: half of them are sums on their way back.
AUXILIARY_WINDOW = 2 * WINDOW

CodedChunk = tuple[TensorSpec, Buffer]
#: Runs a job off the event loop.
RunJob = Callable[[Callable[[], Any]], Awaitable[Any]]


async def at_once(job: Callable[[], Any]) -> Any:
    """Run `job` on the event loop: a `RunJob` for small vectors."""
    return job()


class RoundFailed(SwarmError):
    """This member could not complete the round; `suspects` are those it could not exchange slices with."""

    def __init__(self, reason: str, suspects: Sequence[Member] = ()) -> None:
        super().__init__(reason)
        self.suspects = tuple(suspects)


@dataclass(frozen=True)
class Code:
    """The code that chunks travel in: a codec, and for a sparse one the fraction of the elements that it keeps."""

    codec: Codec = "raw"
    kept: float = 1.0

    @property
    def is_lossy(self) -> bool:
        """Whether decoded numbers may differ from the encoded ones."""
        return self.codec != "raw"

    @property
    def is_sparse(self) -> bool:
        """Whether only the largest elements travel, and the others become 0."""
        return self.codec in SPARSE_CODECS

    def _num_kept(self, num_elements: int) -> int | None:
        return math.ceil(self.kept * num_elements) if self.is_sparse else None

    def encode(self, chunk: torch.Tensor) -> CodedChunk:
        """Code a chunk [n]."""
        num_kept = self._num_kept(chunk.numel())
        if num_kept is not None:
            return encode_sparse("slice", chunk, self.codec, num_kept, "state")
        return encode_tensor("slice", chunk, self.codec, "state")

    def spec(self, num_elements: int, dtype: torch.dtype) -> TensorSpec:
        """The spec of a chunk of so many elements."""
        return TensorSpec(
            name="slice",
            dtype=str(dtype).removeprefix("torch."),
            shape=(num_elements,),
            codec=self.codec,
            role="state",
            num_kept=self._num_kept(num_elements),
        )


@dataclass(frozen=True)
class Robust:
    """CenteredClip of means, weighted by each member's tokens; `radius` is that of the whole vector."""

    tokens: tuple[int, ...]
    radius: float

    def sum(self, chunks: Sequence[tuple[int, torch.Tensor]], num_elements: int) -> torch.Tensor:
        """Sum `chunks` robustly: (index of a member, its chunk [n]). A chunk's radius is smaller, by its length."""
        counted = [(self.tokens[i], chunk) for i, chunk in chunks if self.tokens[i]]
        if not counted:
            return torch.zeros_like(chunks[0][1])
        points = torch.stack([chunk.double() / tokens for tokens, chunk in counted])
        weights = [float(tokens) for tokens, _ in counted]
        radius = self.radius * math.sqrt(points.shape[1] / num_elements)
        return centered_clip(points, weights, radius) * sum(weights)


@dataclass(frozen=True)
class GroupVector:
    """A vector that a group sums, as one member of it sees it."""

    num_elements: int
    #: This member's [num_elements]; None: it adds nothing.
    values: torch.Tensor | None
    code: Code = Code()
    #: [num_elements]; added to the sums that this member makes.
    carry: torch.Tensor | None = None
    #: Makes the sum that of a robust mean, in which no member counts beyond a distance; None: the plain sum.
    robust: Robust | None = None


def num_chunks_of(seconds: float | None) -> int:
    """Chunks of a slice, if the round before took `seconds`; None if there was none."""
    return NUM_CHUNKS if seconds is None else min(max(math.ceil(seconds / CHUNK_S), MIN_CHUNKS), NUM_CHUNKS)


def chunk_elements_of(num_elements: int, num_chunks: int) -> int:
    """Elements of a chunk, if a slice of `num_elements` travels in about `num_chunks`: whole blocks of the 8-bit codes."""
    chunk = min(max(-(-num_elements // num_chunks), MIN_CHUNK_ELEMENTS), MAX_CHUNK_ELEMENTS)
    return -(-chunk // BLOCK_SIZE) * BLOCK_SIZE


def window_of(num_members: int, num_chunks: int) -> int:
    """Chunks under way at once for each pair of members, in a group of `num_members` with `num_chunks` chunks a slice."""
    return max(MIN_WINDOW, min(WINDOW, math.ceil(UNDER_WAY / (num_members - 1)), num_chunks // 4))


def bytes_under_way(code: Code, num_elements: int, dtype: torch.dtype, num_senders: int) -> int:
    """The most bytes that a `Reduction` by an auxiliary holds, whatever slice of `num_elements` it reduces.

    Each sender has `AUXILIARY_WINDOW` requests open at most, and each of these holds a chunk or the sum that answers it, or
    both for a moment; besides, one chunk is being summed.
    """
    chunk = chunk_elements_of(num_elements, NUM_AUXILIARY_CHUNKS)
    num_bytes = code.spec(chunk, dtype).num_bytes
    return 2 * num_senders * AUXILIARY_WINDOW * num_bytes + (num_senders + 1) * chunk * dtype.itemsize


@dataclass(eq=False)
class _Chunk:
    """One chunk of the slice: what came from members, then the reduced payload, and the members that have taken it."""

    start: int
    end: int
    reduced: asyncio.Future[CodedChunk]
    received: dict[int, CodedChunk | None] = field(default_factory=dict)
    summing: asyncio.Task[None] | None = None
    taken_by: set[int] = field(default_factory=set)


class Reduction:
    """The slice that one of a group reduces in one exchange."""

    #: Whether sums stay, to be asked for again. If not, a chunk is dropped once everyone has taken it.
    keeps_sums: ClassVar[bool] = False

    def __init__(
        self,
        members: Sequence[Member],
        me: int,
        vector: GroupVector,
        *,
        dtype: torch.dtype,
        slice_sizes: Sequence[int] = (),
        num_auxiliaries: int = 0,
        num_chunks: int = NUM_CHUNKS,
        chunk_elements: int | None = None,
        run_job: RunJob = at_once,
    ) -> None:
        """Wait for chunks.

        Args:
            members: the members of the group; auxiliaries come last.
            me: the index of this one.
            vector: this member's vector, which is summed with the others' vectors.
            dtype: the dtype of the sum.
            slice_sizes: elements that each member reduces; equal ones if empty.
            num_auxiliaries: so many of `members`, the last ones, have no vector and do not ask for the sum.
            num_chunks: about so many chunks make the largest slice of a member; the same number for all.
            chunk_elements: elements of a chunk of each slice, instead of `num_chunks`.
            run_job: runs what takes time.

        Raises:
            ValueError: if `slice_sizes` do not fit the members.
        """
        num_elements = vector.num_elements
        slice_sizes = slice_sizes or hagenbach_bischoff(num_elements, [1.0] * len(members))
        if len(slice_sizes) != len(members) or sum(slice_sizes) != num_elements:
            raise ValueError(
                f"{len(slice_sizes)} slices of {sum(slice_sizes)} elements for {len(members)} members and {num_elements}"
            )
        if num_auxiliaries and len(members) - num_auxiliaries < 2:
            raise ValueError(f"auxiliaries help two members or more, not {len(members) - num_auxiliaries}")
        self.members = list(members)
        self.me = me
        self._num_senders = len(members) - num_auxiliaries
        self._vector = vector
        self._dtype = dtype
        self._run_job = run_job
        #: [num_elements], of which this slice's sums are written; empty where sums are not kept, or nothing travels.
        self._flat = empty_flat(num_elements if self.keeps_sums and len(members) > 1 else 0, dtype=dtype)
        own = chunk_elements or chunk_elements_of(max(slice_sizes[: self._num_senders]), num_chunks)
        sizes = [own] * self._num_senders
        sizes += [chunk_elements or chunk_elements_of(size, NUM_AUXILIARY_CHUNKS) for size in slice_sizes[self._num_senders :]]
        #: Elements of a chunk of each slice.
        self._chunk_elements = sizes
        self._window = window_of(self._num_senders, num_chunks) if len(members) > 1 else 0
        self._bounds = slice_bounds(slice_sizes)
        is_sparse = vector.code.is_sparse
        self._counted = torch.zeros(num_elements, dtype=dtype) if is_sparse and vector.values is not None else None
        self._lost = torch.zeros(slice_sizes[me], dtype=dtype) if is_sparse else None
        self._failure: RoundFailed | None = None
        self._num_chunks = -(-slice_sizes[me] // sizes[me])
        #: The chunks that have begun and were not let go of.
        self._chunks: dict[int, _Chunk] = {}
        self._reduced: set[int] = set()
        self._over = self._quiet_future()
        if not self._num_chunks:
            self._over.set_result(None)
        #: Chunks received so far: what a waiting caller sees advance.
        self.num_received = 0
        #: Members that sent NaN, infinities or numbers as good as infinite, and what.
        self.blamed: dict[tuple[str, str], str] = {}

    def _quiet_future(self) -> asyncio.Future[Any]:
        """Return a future whose failure nobody need look at."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda f: f.cancelled() or f.exception())
        return future

    def _spec(self, num_elements: int) -> TensorSpec:
        return self._vector.code.spec(num_elements, self._dtype)

    async def reduce(self, index: int, number: int, payload: CodedChunk | None) -> CodedChunk:
        """Take member `index`'s chunk `number` of this slice; return the sum once those of all members are there.

        One that comes twice counts once.

        Raises:
            ValueError: if the chunk does not belong to this slice.
            RoundFailed: if the round ended meanwhile.
        """
        if index >= self._num_senders:
            raise ValueError("an auxiliary adds nothing to the sum")
        if number >= self._num_chunks:
            raise ValueError(f"this slice has {self._num_chunks} chunks, not {number + 1}")
        chunk = self._chunks.get(number) or self._begin(number)
        if payload is not None and payload[0] != self._spec(chunk.end - chunk.start):
            raise ValueError(f"a chunk of {chunk.end - chunk.start} elements came as {payload[0].dtype} {payload[0].shape}")
        if not chunk.reduced.done() and chunk.summing is None:
            self.num_received += index not in chunk.received
            chunk.received.setdefault(index, payload)
            own = self.me < self._num_senders  # this member's own chunk does not travel
            if len(chunk.received) == self._num_senders - own:
                chunk.summing = asyncio.get_running_loop().create_task(self._sum(chunk, number), name="reduce a chunk")
        reduced = await asyncio.shield(chunk.reduced)
        chunk.taken_by.add(index)
        if not self.keeps_sums and len(chunk.taken_by) == self._num_senders:
            self._chunks.pop(number, None)
        return reduced

    def _begin(self, number: int) -> _Chunk:
        if self._failure is not None:
            raise self._failure
        if number in self._reduced:
            raise ValueError(f"everyone has taken chunk {number} already")
        chunk = self._chunks[number] = _Chunk(*self._span(self.me, number), self._quiet_future())
        return chunk

    def _span(self, j: int, number: int) -> tuple[int, int]:
        """Where chunk `number` of slice `j` lies."""
        start, end = self._bounds[j]
        return start + number * self._chunk_elements[j], min(start + (number + 1) * self._chunk_elements[j], end)

    @property
    def awaited(self) -> list[Member]:
        """Members that owe a chunk which others have sent."""
        missing = {
            index
            for chunk in self._chunks.values()
            if chunk.summing is None
            for index in range(self._num_senders)
            if index != self.me and index not in chunk.received
        }
        return [self.members[index] for index in sorted(missing)]

    async def _sum(self, chunk: _Chunk, number: int) -> None:
        received = sorted(chunk.received.items())
        chunk.received = {}  # let go of what was received
        span = slice(chunk.start, chunk.end)

        def job() -> CodedChunk:
            own, carry = self._vector.values, self._vector.carry
            chunks = [] if own is None else [(self.me, own[span])]
            for index, payload in received:
                if payload is not None:
                    chunks.append((index, decode_tensor(*payload)))
            chunks.sort(key=lambda indexed: indexed[0])
            total = self._flat[span] if self.keeps_sums else torch.empty(chunk.end - chunk.start, dtype=self._dtype)
            if self._vector.robust is not None and chunks and all(is_finite(values) for _, values in chunks):
                total.copy_(self._vector.robust.sum(chunks, self._vector.num_elements))
            elif len(chunks) > 1:
                torch.add(chunks[0][1], chunks[1][1], out=total)
                for _, values in chunks[2:]:
                    total += values
            elif chunks:
                total.copy_(chunks[0][1])
            else:
                total.zero_()
            if not is_finite(total):  # then a chunk is not; only now is it worth to look which
                bad = next((i for i, values in chunks if i != self.me and not is_finite(values)), self.me)
                raise self._not_finite("a slice", bad)
            if carry is not None:
                total += carry[span]
            payload = self._vector.code.encode(total)
            if self._vector.code.is_lossy and self.keeps_sums:  # what this member keeps is what the others decode
                first = self._bounds[self.me][0]
                lost = None if self._lost is None else self._lost[chunk.start - first : chunk.end - first].copy_(total)
                decode_tensor(*payload, out=total)
                if lost is not None:
                    lost.sub_(total)
            if self._counted is not None and own is not None:
                self._counted[span] = own[span]
            return payload

        try:
            payload = await self._run_job(job)
        except RoundFailed as failure:
            self.fail(failure)
        except Exception as error:
            self.fail(RoundFailed(f"the sum failed: {error}"))
        else:
            if not chunk.reduced.done():
                chunk.reduced.set_result(payload)
            self._reduced.add(number)
            if len(self._reduced) == self._num_chunks and not self._over.done():
                self._over.set_result(None)

    def _not_finite(self, what: str, index: int) -> RoundFailed:
        member = self.members[index]
        self.blamed[member.key] = f"{what} from {member.peer[:8]} is not finite"
        return RoundFailed(self.blamed[member.key], [member])

    def fail(self, error: RoundFailed) -> None:
        """End the exchange: waiting callers get an error at once instead of a time-out."""
        self._failure = self._failure or error
        for future in (self._over, *(chunk.reduced for chunk in self._chunks.values())):
            if not future.done():
                future.set_exception(error)

    async def all_reduced(self) -> None:
        """Wait until every chunk of this slice is reduced.

        Raises:
            RoundFailed: the exchange ended before.
        """
        await asyncio.shield(self._over)
