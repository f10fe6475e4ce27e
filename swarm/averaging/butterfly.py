"""Butterfly all-reduce of one vector inside a group (Moshpit SGD, arXiv 2103.03239, section 3), in chunks.

Member j reduces slice j of everyone. A slice travels in chunks, each a request that is answered by the reduced chunk, a
few of them under way at once for each pair: chunks come back while later ones are still being sent, and a member holds
no more than that window of what others sent. Sums are taken in the order of the members, so they do not depend on who
comes first. With a lossy code a sum is encoded once, and its reducer keeps what the others decode. Owns one exchange;
`all_reduce.py` makes rounds of them, the shell moves the bytes.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from swarm.averaging.robust import centered_clip
from swarm.base.errors import LinkError, RemoteError, SwarmError
from swarm.policy.shares import bounds, hagenbach_bischoff
from swarm.stage.accumulator import is_finite
from swarm.stage.flat import empty_flat
from swarm.wire.compression import decode_tensor, encode_sparse, encode_tensor
from swarm.wire.framing import Buffer
from swarm.wire.messages import Codec, Member, TensorSpec

#: The largest slice travels in at least so many chunks, unless they would be small: the more, the more of the way out
#: and the way back overlap.
MIN_CHUNKS = 16
MIN_CHUNK_ELEMENTS = 2**14
MAX_CHUNK_ELEMENTS = 2**19
#: Chunks under way at once for each pair of members.
WINDOW = 4

Payload = tuple[TensorSpec, Buffer]
#: Sends chunk `number` of slice `j` (None if this member contributes nothing) to member j and returns the reduced chunk.
Exchange = Callable[[int, int, Payload | None], Awaitable[Payload]]
#: Runs a job off the event loop.
RunJob = Callable[[Callable[[], Any]], Awaitable[Any]]


async def at_once(job: Callable[[], Any]) -> Any:
    return job()


class RoundFailed(SwarmError):
    """This member could not complete the round; `suspects` are those it could not exchange slices with."""

    def __init__(self, reason: str, suspects: Sequence[Member] = ()) -> None:
        super().__init__(reason)
        self.suspects = tuple(suspects)


@dataclass(frozen=True)
class Code:
    """How chunks travel: a codec, and for the sparse one the part of the elements that it keeps."""

    codec: Codec = "raw"
    kept: float = 1.0

    @property
    def is_lossy(self) -> bool:
        return self.codec != "raw"

    def _num_kept(self, num_elements: int) -> int | None:
        return math.ceil(self.kept * num_elements) if self.codec == "sparse4" else None

    def encode(self, chunk: torch.Tensor) -> Payload:
        num_kept = self._num_kept(chunk.numel())
        if num_kept is not None:
            return encode_sparse("slice", chunk, num_kept, "state")
        return encode_tensor("slice", chunk, self.codec, "state")

    def spec(self, num_elements: int, dtype: torch.dtype) -> TensorSpec:
        """How a chunk of so many elements is described."""
        return TensorSpec(
            name="slice", dtype=str(dtype).removeprefix("torch."), shape=(num_elements,), codec=self.codec, role="state",
            num_kept=self._num_kept(num_elements),
        )  # fmt: skip


@dataclass(frozen=True)
class Robust:
    """CenteredClip of means with weights: tokens of each member, and the radius for a vector of the part's length."""

    tokens: tuple[int, ...]
    radius: float

    def sum(self, parts: Sequence[tuple[int, torch.Tensor]], num_elements: int) -> torch.Tensor:
        """In place of the sum of `parts`, chunks of the members of these indexes; each chunk has its part of the radius."""
        counted = [(self.tokens[i], part) for i, part in parts if self.tokens[i]]
        if not counted:
            return torch.zeros_like(parts[0][1])
        points = torch.stack([part.double() / tokens for tokens, part in counted])
        weights = [float(tokens) for tokens, _ in counted]
        radius = self.radius * math.sqrt(points.shape[1] / num_elements)
        return centered_clip(points, weights, radius) * sum(weights)


@dataclass(frozen=True)
class Part:
    """A vector that a group sums, as one member of it sees it."""

    num_elements: int
    #: This member's [num_elements]; None: it adds nothing.
    values: torch.Tensor | None
    code: Code = Code()
    #: [num_elements]; added to the sums that this member makes.
    carry: torch.Tensor | None = None
    #: If not None: the sum is that of a robust mean, in which no member counts beyond this distance.
    robust: Robust | None = None


@dataclass(frozen=True)
class Sum:
    """What became of a part: everyone's `total` [n], the same bits at each member of the group.

    With a sparse code also `counted` [n], what the total holds of this member's values, and `lost`, what the code lost of
    the sums that this member made, elements `own` of the total. None with other codes: what they lose is noise.
    """

    total: torch.Tensor
    counted: torch.Tensor | None = None
    own: tuple[int, int] = (0, 0)
    lost: torch.Tensor | None = None


@dataclass(eq=False)
class _Chunk:
    """One chunk of this member's slice: the parts that came, then the reduced payload."""

    start: int
    end: int
    reduced: asyncio.Future[Payload]
    parts: dict[int, Payload | None] = field(default_factory=dict)
    summing: asyncio.Task[None] | None = None


class Butterfly:
    """One member's part in one exchange."""

    def __init__(
        self, members: Sequence[Member], me: int, part: Part, *, dtype: torch.dtype, shares: Sequence[int] = (),
        chunk_elements: int | None = None, run_job: RunJob = at_once,
    ) -> None:  # fmt: skip
        """
        Args:
            members: of the group.
            me: index of this member.
            part: what is summed.
            dtype: of the sum.
            shares: elements that each member reduces; equal parts if empty.
            chunk_elements: elements of a chunk, the same for all members; None derives it from the shares.
            run_job: runs what takes time.

        Raises:
            ValueError: if `shares` do not fit the members.
        """
        num_elements = part.num_elements
        shares = shares or hagenbach_bischoff(num_elements, [1.0] * len(members))
        if len(shares) != len(members) or sum(shares) != num_elements:
            raise ValueError(f"{len(shares)} shares of {sum(shares)} elements for {len(members)} members and {num_elements}")
        self.members = list(members)
        self.me = me
        self._part = part
        self._dtype = dtype
        self._chunk_elements = chunk_elements or min(
            max(-(-max(shares) // MIN_CHUNKS), MIN_CHUNK_ELEMENTS), MAX_CHUNK_ELEMENTS
        )
        self._run_job = run_job
        self._bounds = bounds(shares)
        self._total = empty_flat(num_elements if len(members) > 1 else 0, dtype=dtype)
        is_sparse = part.code.codec == "sparse4"
        self._counted = torch.zeros(num_elements, dtype=dtype) if is_sparse and part.values is not None else None
        self._lost = torch.zeros(shares[me], dtype=dtype) if is_sparse else None
        loop = asyncio.get_running_loop()
        self._failure: RoundFailed | None = None
        self._chunks = [_Chunk(start, end, loop.create_future()) for start, end in self._spans(self.me)]
        #: Chunks received so far: what a waiting caller sees advance.
        self.num_parts = 0
        #: Members that sent NaN, infinities or numbers as good as infinite, and what.
        self.blamed: dict[tuple[str, str], str] = {}
        for chunk in self._chunks:
            chunk.reduced.add_done_callback(lambda f: f.cancelled() or f.exception())  # failure may have no waiter

    def _spans(self, j: int) -> list[tuple[int, int]]:
        """The chunks of slice `j`."""
        start, end = self._bounds[j]
        return [(at, min(at + self._chunk_elements, end)) for at in range(start, end, self._chunk_elements)]

    def _encode(self, start: int, end: int) -> Payload | None:
        """This member's part of a chunk of another one's slice."""
        if self._part.values is None:
            return None
        payload = self._part.code.encode(self._part.values[start:end])
        if self._counted is not None:
            self._counted[start:end] = decode_tensor(*payload)
        return payload

    # ---------------------------------------------------------------------------------------- reducing this slice

    async def reduce(self, index: int, number: int, part: Payload | None) -> Payload:
        """Member `index`'s part of chunk `number` of my slice came in; returns the reduced chunk when all parts have.

        Raises:
            ValueError: if the part has no place here.
            RoundFailed: if the round ended meanwhile.
        """
        if number >= len(self._chunks):
            raise ValueError(f"this slice has {len(self._chunks)} chunks, not {number + 1}")
        chunk = self._chunks[number]
        if part is not None and part[0] != self._spec(chunk.end - chunk.start):
            raise ValueError(f"a chunk of {chunk.end - chunk.start} elements came as {part[0].dtype} {part[0].shape}")
        if not chunk.reduced.done() and chunk.summing is None:
            self.num_parts += index not in chunk.parts
            chunk.parts.setdefault(index, part)
            if len(chunk.parts) == len(self.members) - 1:
                chunk.summing = asyncio.get_running_loop().create_task(self._sum(chunk), name="reduce a chunk")
        return await asyncio.shield(chunk.reduced)

    def _spec(self, num_elements: int) -> TensorSpec:
        return self._part.code.spec(num_elements, self._dtype)

    async def _sum(self, chunk: _Chunk) -> None:
        received = sorted(chunk.parts.items())
        chunk.parts = {}  # let go of what was received
        span = slice(chunk.start, chunk.end)

        def job() -> Payload:
            own, carry = self._part.values, self._part.carry
            parts = [] if own is None else [(self.me, own[span])]
            for index, payload in received:
                if payload is not None:
                    parts.append((index, decode_tensor(*payload)))
            parts.sort(key=lambda part: part[0])
            total = self._total[span]
            if self._part.robust is not None and parts and all(is_finite(part) for _, part in parts):
                total.copy_(self._part.robust.sum(parts, self._part.num_elements))
            elif len(parts) > 1:
                torch.add(parts[0][1], parts[1][1], out=total)
                for _, part in parts[2:]:
                    total += part
            elif parts:
                total.copy_(parts[0][1])
            else:
                total.zero_()
            if not is_finite(total):  # then a part is not; only now is it worth to look which
                bad = next((i for i, part in parts if i != self.me and not is_finite(part)), self.me)
                raise self._not_finite("a slice", bad)
            if carry is not None:
                total += carry[span]
            payload = self._part.code.encode(total)
            if self._part.code.is_lossy:  # what this member keeps is what the others decode
                decoded = decode_tensor(*payload)
                if self._lost is not None:
                    first = self._bounds[self.me][0]
                    self._lost[chunk.start - first : chunk.end - first] = total - decoded
                total.copy_(decoded)
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

    def fail(self, error: RoundFailed) -> None:
        """End the exchange: waiting callers get an error at once instead of a time-out."""
        self._failure = self._failure or error
        for chunk in self._chunks:
            if not chunk.reduced.done():
                chunk.reduced.set_exception(error)

    # ---------------------------------------------------------------------------------------- the whole exchange

    async def run(self, exchange: Exchange) -> Sum:
        """Exchange slices with everyone.

        Raises:
            RoundFailed: naming the members that could not be exchanged with.
        """
        if len(self.members) > 1:
            await self._exchange_all(exchange)
            return Sum(self._total, self._counted, self._bounds[self.me], self._lost)
        values, carry = self._part.values, self._part.carry
        total = torch.zeros(self._part.num_elements, dtype=self._dtype) if values is None else values
        if carry is not None:
            total = total + carry
        if self._lost is None:
            return Sum(total)
        return Sum(total, values, self._bounds[self.me], self._lost)  # nothing travels, so nothing is lost

    async def _exchange_all(self, exchange: Exchange) -> None:
        suspects: list[Member] = []
        reasons: list[str] = []

        async def guarded(j: int, work: Awaitable[None]) -> None:
            try:
                await work
            except LinkError as error:
                suspects.append(self.members[j])
                reasons.append(f"{self.members[j].peer[:8]}: {error}")
            except RoundFailed as error:
                if error is not self._failure or not reasons:
                    suspects.extend(error.suspects)
                    reasons.append(str(error))
                return  # others may still complete theirs with this member's slice
            except RemoteError as error:  # it answered, so it is not the one to blame
                reasons.append(f"{self.members[j].peer[:8]}: {error}")
            else:
                return
            self.fail(RoundFailed("; ".join(reasons), suspects))

        tasks = [asyncio.ensure_future(guarded(self.me, self._reduced()))]
        for j in range(len(self.members)):
            if j != self.me:
                numbers = iter(enumerate(self._spans(j)))
                tasks += [asyncio.ensure_future(guarded(j, self._stream(j, numbers, exchange))) for _ in range(WINDOW)]
        try:
            await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        if reasons:
            raise RoundFailed("; ".join(dict.fromkeys(reasons)), list(dict.fromkeys(suspects)))

    async def _reduced(self) -> None:
        for chunk in self._chunks:
            await asyncio.shield(chunk.reduced)

    async def _stream(self, j: int, numbers: Any, exchange: Exchange) -> None:
        """One of the `WINDOW` streams of a pair: sends the next chunk when the one before has come back reduced."""
        for number, (start, end) in numbers:
            if self._failure is not None:
                raise self._failure
            if self._part.code.is_lossy:
                part = await self._run_job(partial(self._encode, start, end))
            else:
                part = self._encode(start, end)
            spec, buffer = await exchange(j, number, part)
            if spec != self._spec(end - start):
                raise RoundFailed(f"slice {j} came back with the wrong shape", [self.members[j]])

            def job(spec: TensorSpec = spec, buffer: Buffer = buffer, start: int = start, end: int = end) -> bool:
                reduced = decode_tensor(spec, buffer)
                self._total[start:end] = reduced
                return is_finite(reduced)

            if not await self._run_job(job):
                raise self._not_finite("a reduced slice", j)

    def _not_finite(self, what: str, index: int) -> RoundFailed:
        member = self.members[index]
        self.blamed[member.key] = f"{what} from {member.peer[:8]} is not finite"
        return RoundFailed(self.blamed[member.key], [member])
