"""Butterfly all-reduce of one attempt inside one stage (Moshpit SGD, arXiv 2103.03239, section 3), in chunks.

Member j reduces slice j of everyone. A slice travels in chunks, each a request that is answered by the reduced chunk, a
few of them under way at once for each pair: chunks come back while later ones are still being sent, and a member holds
no more than that window of what others sent. Sums are taken in the order of the members, so they do not depend on who
comes first. With a lossy codec a sum is encoded once, and its reducer keeps what the others decode. Owns one round's
data; the shell moves it.

Invariant: a contribution is the accumulator as it was sealed for this attempt; what is accumulated later is not in it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from swarm.averaging.tied import Tied
from swarm.base.errors import LinkError, RemoteError, SwarmError
from swarm.policy.shares import bounds, hagenbach_bischoff
from swarm.stage.accumulator import is_finite
from swarm.stage.digest import digest_and_squares
from swarm.stage.flat import empty_flat
from swarm.wire.compression import decode_tensor, encode_tensor
from swarm.wire.framing import Buffer
from swarm.wire.messages import Codec, Member, Seal, TensorSpec, Term

#: The largest slice travels in at least so many chunks, unless they would be small: the more, the more of the way out
#: and the way back overlap.
MIN_CHUNKS = 16
MIN_CHUNK_ELEMENTS = 2**14
MAX_CHUNK_ELEMENTS = 2**19
#: Chunks under way at once for each pair of members.
WINDOW = 4


class RoundFailed(SwarmError):
    """This member could not complete the round; `suspects` are those it could not exchange slices with."""

    def __init__(self, reason: str, suspects: Sequence[Member] = ()) -> None:
        super().__init__(reason)
        self.suspects = tuple(suspects)


@dataclass(frozen=True)
class Average:
    """The summed gradient of one attempt: flat [N] on the CPU, tied sums included, its digest, and its sum of squares.

    The squares (fp64) are without tied parameters that another stage owns; `tied` has each tie's name and digest.
    """

    term: Term
    seals: tuple[Seal, ...]
    flat: torch.Tensor
    digest: str
    sum_squares: float
    tied: tuple[tuple[str, str], ...] = ()


#: Runs a job off the event loop.
RunJob = Callable[[Callable[[], Any]], Awaitable[Any]]


async def _at_once(job: Callable[[], Any]) -> Any:
    return job()


Payload = tuple[TensorSpec, Buffer]
#: Sends chunk `number` of slice `j` (None if this member contributes nothing) to member j and returns the reduced chunk.
Exchange = Callable[[int, int, Payload | None], Awaitable[Payload]]
#: Adds other stages' sums of tied parameters to this stage's flat sum, in place.
AddTied = Callable[[torch.Tensor], Awaitable[Tied]]


@dataclass(eq=False)
class _Chunk:
    """One chunk of this member's slice: the parts that came, then the reduced payload."""

    start: int
    end: int
    reduced: asyncio.Future[Payload]
    parts: dict[int, Payload | None] = field(default_factory=dict)
    summing: asyncio.Task[None] | None = None


class Round:
    """One member's part in one attempt."""

    def __init__(
        self, term: Term, seals: Sequence[Seal], me: tuple[str, str], contribution: torch.Tensor | None, *,
        num_elements: int, dtype: torch.dtype, shares: Sequence[int] = (), codec: Codec = "raw",
        chunk_elements: int | None = None, run_job: RunJob = _at_once,
    ) -> None:  # fmt: skip
        """
        Args:
            term: the attempt.
            seals: of all members.
            me: key of this member.
            contribution: flat [num_elements], or None if its ledger is empty.
            num_elements: of the average.
            dtype: of the sum.
            shares: elements that each member reduces; equal parts if empty.
            codec: of slices and reduced slices on the wire.
            chunk_elements: elements of a chunk, the same for all members; None derives it from the shares.
            run_job: runs what takes time.

        Raises:
            ValueError: if `shares` do not fit the members.
        """
        shares = shares or hagenbach_bischoff(num_elements, [1.0] * len(seals))
        if len(shares) != len(seals) or sum(shares) != num_elements:
            raise ValueError(f"{len(shares)} shares of {sum(shares)} elements for {len(seals)} members and {num_elements}")
        self.term = term
        self.seals = tuple(seals)
        self.members = [seal.member for seal in seals]
        self.me = next(i for i, member in enumerate(self.members) if member.key == me)
        self._contribution = contribution
        self._dtype = dtype
        self._codec: Codec = codec
        self._chunk_elements = chunk_elements or min(
            max(-(-max(shares) // MIN_CHUNKS), MIN_CHUNK_ELEMENTS), MAX_CHUNK_ELEMENTS
        )
        self._run_job = run_job
        self._bounds = bounds(shares)
        self._flat = empty_flat(num_elements if len(seals) > 1 else 0, dtype=dtype)
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

    def _part(self, start: int, end: int) -> Payload | None:
        if self._contribution is None:
            return None
        return encode_tensor("slice", self._contribution[start:end], self._codec, "state")

    def index_of(self, member: Member) -> int | None:
        return next((i for i, known in enumerate(self.members) if known.key == member.key), None)

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
        """How a chunk of so many elements is described."""
        dtype = str(self._dtype).removeprefix("torch.")
        return TensorSpec(name="slice", dtype=dtype, shape=(num_elements,), codec=self._codec, role="state")

    async def _sum(self, chunk: _Chunk) -> None:
        received = sorted(chunk.parts.items())
        chunk.parts = {}  # let go of what was received

        def job() -> Payload:
            parts = [] if self._contribution is None else [(self.me, self._contribution[chunk.start : chunk.end])]
            for index, payload in received:
                if payload is not None:
                    parts.append((index, decode_tensor(*payload)))
            parts.sort(key=lambda part: part[0])
            total = self._flat[chunk.start : chunk.end]
            if len(parts) > 1:
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
            payload = encode_tensor("slice", total, self._codec, "state")
            if self._codec != "raw":  # what this member keeps is what the others decode
                total.copy_(decode_tensor(*payload))
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
        """End the round: waiting callers get an error at once instead of a time-out."""
        self._failure = self._failure or error
        for chunk in self._chunks:
            if not chunk.reduced.done():
                chunk.reduced.set_exception(error)

    # ---------------------------------------------------------------------------------------- the whole round

    async def run(self, exchange: Exchange, add_tied: AddTied | None = None) -> Average:
        """Exchange slices with everyone and assemble the average; with `add_tied` it is none without tied sums.

        Raises:
            RoundFailed: naming the members that could not be exchanged with.
        """
        if len(self.members) == 1:
            flat = self._contribution
            self._flat = torch.zeros(self._bounds[0][1], dtype=self._dtype) if flat is None else flat
        else:
            await self._exchange_all(exchange)
        tied = Tied(self._flat)
        if add_tied is not None:
            # Into a copy: chunks of the sum are still on their way to others, or it is the accumulator itself.
            tied = await add_tied(await self._run_job(self._flat.clone))
        digest, sum_squares = await self._run_job(lambda: digest_and_squares(tied.flat, tied.uncounted))
        return Average(self.term, self.seals, tied.flat, digest, sum_squares, tied.digests)

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
            if self._codec == "raw":
                part = self._part(start, end)
            else:
                part = await self._run_job(partial(self._part, start, end))
            spec, buffer = await exchange(j, number, part)
            if spec != self._spec(end - start):
                raise RoundFailed(f"slice {j} came back with the wrong shape", [self.members[j]])

            def job(spec: TensorSpec = spec, buffer: Buffer = buffer, start: int = start, end: int = end) -> bool:
                reduced = decode_tensor(spec, buffer)
                self._flat[start:end] = reduced
                return is_finite(reduced)

            if not await self._run_job(job):
                raise self._not_finite("a reduced slice", j)

    def _not_finite(self, what: str, index: int) -> RoundFailed:
        member = self.members[index]
        self.blamed[member.key] = f"{what} from {member.peer[:8]} is not finite"
        return RoundFailed(self.blamed[member.key], [member])
