"""One attempt to average inside a stage: the exchanges that its compression asks for, one after another, and the average.

Every member runs the same compression (see `compressors/`), so their exchanges meet: exchange `phase` of one member is
that of all others in its group. Owns one attempt's data; the shell moves it.

Invariant: a contribution is the accumulator as it was sealed for this attempt; what is accumulated later is not in it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from swarm.averaging.butterfly import Butterfly, Sum
from swarm.averaging.compressors.interface import Compressed, Compression
from swarm.averaging.grid import groups_of, num_levels
from swarm.averaging.reduction import NUM_CHUNKS, Code, CodedChunk, GroupVector, RoundFailed, RunJob, at_once
from swarm.averaging.tied import Tied
from swarm.policy.shares import hagenbach_bischoff
from swarm.stage.digest import digest_of, squares_of
from swarm.wire.messages import Attempt, Member, Seal


@dataclass(frozen=True)
class StageSum:
    """The summed gradient of one attempt: flat [N] on the CPU, tied sums included, its digest, and its sum of squares.

    The squares (fp64) are without buffers, and without tied parameters that another stage owns; `tied` has each tie's name and
    digest. `state` is what this member's compressor keeps if the attempt is committed.
    """

    attempt: Attempt
    seals: tuple[Seal, ...]
    flat: torch.Tensor
    digest: str
    sum_squares: float
    tied: tuple[tuple[str, str], ...] = ()
    state: Any = None


#: Sends chunk `number` of slice `j` in exchange `phase` to member j: `(phase, j, number, payload) -> reduced chunk`.
PhaseExchange = Callable[[int, int, int, CodedChunk | None], Awaitable[CodedChunk]]
#: Adds other stages' sums of tied parameters to this stage's flat sum, in place.
AddTied = Callable[[torch.Tensor], Awaitable[Tied]]


class Round:
    """One member's side of one attempt."""

    def __init__(
        self,
        attempt: Attempt,
        seals: Sequence[Seal],
        me: tuple[str, str],
        compression: Compression,
        *,
        dtype: torch.dtype,
        slice_sizes: Sequence[int] = (),
        auxiliaries: Sequence[Member] = (),
        uncounted: Sequence[tuple[int, int]] = (),
        max_group: int = 2**30,
        num_chunks: int = NUM_CHUNKS,
        chunk_elements: int | None = None,
        run_job: RunJob = at_once,
    ) -> None:
        """Wait for `run`.

        Args:
            attempt: the attempt.
            seals: of all members.
            me: key of this member.
            compression: of this member's contribution, not begun.
            dtype: of the sums.
            slice_sizes: elements of the average that each member, and then each auxiliary, reduces; the exchanges are
                divided alike. Equal slices if empty.
            auxiliaries: peers that only reduce. All are in one group with the members.
            uncounted: elements `start:end` that are no gradient, and so not in the sum of squares.
            max_group: more members than that sum in groups, level by level; see `grid.py`.
            num_chunks, chunk_elements: see `Reduction`.
            run_job: runs what takes time.

        Raises:
            ValueError: if `slice_sizes` are not one for each.
        """
        if slice_sizes and len(slice_sizes) != len(seals) + len(auxiliaries):
            raise ValueError(f"{len(slice_sizes)} slice_sizes for {len(seals)} members and {len(auxiliaries)} auxiliaries")
        self.attempt = attempt
        self.seals = tuple(seals)
        self.members = [*(seal.member for seal in seals), *auxiliaries]
        self._num_auxiliaries = len(auxiliaries)
        self.me = next(i for i, member in enumerate(self.members) if member.key == me)
        self._compression = compression
        self._dtype = dtype
        self._slice_sizes = tuple(slice_sizes)
        self._uncounted = tuple(uncounted)
        self._max_group = max_group
        self._num_phases = 0
        self._num_chunks = num_chunks
        self._chunk_elements = chunk_elements
        self._run_job = run_job
        #: The exchange of each phase; one that has ended still answers.
        self._exchanges: dict[int, Butterfly] = {}
        self._failure: RoundFailed | None = None
        self._is_complete = False
        self._changed = asyncio.Event()

    @property
    def num_received(self) -> int:
        """Chunks received so far: what a waiting caller sees advance."""
        return sum(exchange.num_received for exchange in self._exchanges.values())

    @property
    def blamed(self) -> dict[tuple[str, str], str]:
        """Members that sent NaN, infinities or numbers as good as infinite, and what."""
        return {key: what for exchange in self._exchanges.values() for key, what in exchange.blamed.items()}

    def index_of(self, member: Member) -> int | None:
        """The place of `member` among the members and auxiliaries; None if it is none of them."""
        return next((i for i, known in enumerate(self.members) if known.key == member.key), None)

    async def reduce(self, member: Member, phase: int, number: int, chunk: CodedChunk | None) -> CodedChunk:
        """`member`'s chunk `number` of my slice came in; returns the reduced chunk when those of all members have.

        Raises:
            ValueError: if the chunk has no place here.
            RoundFailed: if the round ended meanwhile.
        """
        while phase not in self._exchanges:  # the sender is faster
            if self._failure is not None:
                raise self._failure
            if self._is_complete:
                raise ValueError(f"this round has no exchange {phase}")
            self._changed.clear()
            await self._changed.wait()
        exchange = self._exchanges[phase]
        index = next((i for i, known in enumerate(exchange.members) if known.key == member.key), None)
        if index is None or index == exchange.me:
            raise ValueError("the sender is not in this member's group")
        return await exchange.reduce(index, number, chunk)

    def fail(self, error: RoundFailed) -> None:
        """End the round: waiting callers get an error at once instead of a time-out."""
        self._failure = self._failure or error
        for exchange in self._exchanges.values():
            exchange.fail(error)
        self._changed.set()

    async def run(self, exchange: PhaseExchange, add_tied: AddTied | None = None) -> StageSum:
        """Exchange what the compression asks for and assemble the average; with `add_tied` it is none without tied sums.

        Raises:
            RoundFailed: naming the members that could not be exchanged with.
        """
        result = await self._advance(None)
        while isinstance(result, GroupVector):
            result = await self._advance(await self._sum(result, exchange))
        self._is_complete = True
        self._changed.set()
        flat = result.flat
        tied = Tied(flat)
        if add_tied is not None:
            # Into a copy: chunks of the sum are still on their way to others, or it is the accumulator itself.
            tied = await add_tied(await self._run_job(flat.clone))
        uncounted = (*tied.uncounted, *self._uncounted)
        digest, sum_squares = await self._run_job(lambda: (digest_of([tied.flat]), squares_of(tied.flat, uncounted)))
        return StageSum(self.attempt, self.seals, tied.flat, digest, sum_squares, tied.digests, result.state)

    async def _advance(self, total: Sum | None) -> GroupVector | Compressed:
        """The compression's next vector, or its result."""

        def job() -> GroupVector | Compressed:
            try:
                return next(self._compression) if total is None else self._compression.send(total)
            except StopIteration as end:
                return end.value

        return await self._run_job(job)

    async def _sum(self, vector: GroupVector, exchange: PhaseExchange) -> Sum:
        """The sum over everyone: in one group, or level by level if they are too many for one.

        What a sparse code leaves out, and who is far from whom, is known for one group only, and auxiliaries help in one
        only: it holds everyone then.
        """
        needs_all = vector.code.is_sparse or vector.robust is not None or self._num_auxiliaries > 0
        max_group = max(2, len(self.members)) if needs_all else self._max_group
        first, count = self._num_phases, num_levels(len(self.members), max_group)
        self._num_phases += count
        total = Sum(torch.empty(0))
        for level, group, adds in groups_of(len(self.members), self.me, max_group):
            if count > 1 and level == count - 1:  # the result is handed on, not rounded again
                vector = replace(vector, code=Code())
            total = await self._sum_in(first + level, group, vector if adds else replace(vector, values=None), exchange)
            vector = replace(vector, values=total.total)
        return total

    async def _sum_in(self, phase: int, group: Sequence[int], vector: GroupVector, exchange: PhaseExchange) -> Sum:
        weights = [self._slice_sizes[i] for i in group] if self._slice_sizes else [1.0] * len(group)
        if not sum(weights):
            weights = [1.0] * len(group)
        butterfly = Butterfly(
            [self.members[i] for i in group],
            group.index(self.me),
            vector,
            dtype=self._dtype,
            slice_sizes=hagenbach_bischoff(vector.num_elements, weights),
            num_auxiliaries=self._num_auxiliaries,
            num_chunks=self._num_chunks,
            chunk_elements=self._chunk_elements,
            run_job=self._run_job,
        )
        self._exchanges[phase] = butterfly
        if self._failure is not None:
            butterfly.fail(self._failure)
        self._changed.set()
        return await butterfly.run(lambda j, number, payload: exchange(phase, group[j], number, payload))
