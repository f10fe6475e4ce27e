"""Butterfly all-reduce of one attempt inside one stage (Moshpit SGD, arXiv 2103.03239, section 3).

Member j reduces slice j of everyone: each pair exchanges one request, with a slice out and the reduced slice back. Sums
are taken in the order of the members, so every member ends on the same bits. Owns one round's data; the shell moves it.

Invariant: a contribution is the accumulator as it was sealed for this attempt; what is accumulated later is not in it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from swarm.base.errors import LinkError, RemoteError, SwarmError
from swarm.policy.shares import bounds, hagenbach_bischoff
from swarm.stage.digest import digest_and_squares
from swarm.stage.flat import empty_flat
from swarm.wire.messages import Member, Seal, Term


class RoundFailed(SwarmError):
    """This member could not complete the round; `suspects` are those it could not exchange slices with."""

    def __init__(self, reason: str, suspects: Sequence[Member] = ()) -> None:
        super().__init__(reason)
        self.suspects = tuple(suspects)


@dataclass(frozen=True)
class Average:
    """The summed gradient of one attempt: flat [N] on the CPU, its digest, and its sum of squares (fp64)."""

    term: Term
    seals: tuple[Seal, ...]
    flat: torch.Tensor
    digest: str
    sum_squares: float


#: Runs a job off the event loop.
RunJob = Callable[[Callable[[], Any]], Awaitable[Any]]


async def _at_once(job: Callable[[], Any]) -> Any:
    return job()


#: Sends slice `j` (None if this member contributes nothing) to member j and returns the reduced slice.
Exchange = Callable[[int, torch.Tensor | None], Awaitable[torch.Tensor]]


class Round:
    """One member's part in one attempt."""

    def __init__(
        self, term: Term, seals: Sequence[Seal], me: tuple[str, str], contribution: torch.Tensor | None, *,
        num_elements: int, dtype: torch.dtype, shares: Sequence[int] = (), run_job: RunJob = _at_once,
    ) -> None:  # fmt: skip
        """
        Raises:
            ValueError: if `shares` (elements that each member reduces; equal if empty) do not fit the members.
        """
        shares = shares or hagenbach_bischoff(num_elements, [1.0] * len(seals))
        if len(shares) != len(seals) or sum(shares) != num_elements:
            raise ValueError(f"{len(shares)} shares of {sum(shares)} elements for {len(seals)} members and {num_elements}")
        self.term = term
        self.seals = tuple(seals)
        self.members = [seal.member for seal in seals]
        self.me = next(i for i, member in enumerate(self.members) if member.key == me)
        self._contribution = contribution
        self._num_elements = num_elements
        self._dtype = dtype
        self._run_job = run_job
        self._summing: asyncio.Task[None] | None = None
        self._bounds = bounds(shares)
        self._parts: dict[int, torch.Tensor | None] = {self.me: self._part(self.me)}
        self._reduced: asyncio.Future[torch.Tensor] = asyncio.get_running_loop().create_future()
        self._reduced.add_done_callback(lambda f: f.cancelled() or f.exception())  # failure may have no waiter
        self._try_reduce()

    def _part(self, j: int) -> torch.Tensor | None:
        start, end = self._bounds[j]
        return None if self._contribution is None else self._contribution[start:end]

    @property
    def num_parts(self) -> int:
        """Slices received so far: what a waiting caller sees advance."""
        return len(self._parts)

    @property
    def slice_elements(self) -> int:
        start, end = self._bounds[self.me]
        return end - start

    def index_of(self, member: Member) -> int | None:
        return next((i for i, known in enumerate(self.members) if known.key == member.key), None)

    async def reduce(self, index: int, part: torch.Tensor | None) -> torch.Tensor:
        """Member `index`'s part of my slice came in; returns the reduced slice when all have.

        Raises:
            RoundFailed: if the round ended meanwhile.
        """
        self._parts.setdefault(index, part)
        self._try_reduce()
        return await asyncio.shield(self._reduced)

    def _try_reduce(self) -> None:
        if len(self._parts) == len(self.members) and self._summing is None and not self._reduced.done():
            self._summing = asyncio.get_running_loop().create_task(self._reduce(), name="reduce a slice")

    async def _reduce(self) -> None:
        parts = [part for _, part in sorted(self._parts.items()) if part is not None]
        self._parts = dict.fromkeys(self._parts)  # let go of what was received

        def job() -> torch.Tensor:
            if len(parts) == 1:
                return parts[0]
            total = empty_flat(self.slice_elements, dtype=self._dtype).zero_()
            for part in parts:
                total += part
            return total

        try:
            total = await self._run_job(job)
        except Exception as error:
            self.fail(RoundFailed(f"the sum failed: {error}"))
        else:
            if not self._reduced.done():
                self._reduced.set_result(total)

    def fail(self, error: RoundFailed) -> None:
        """End the round: waiting callers get an error at once instead of a time-out."""
        if not self._reduced.done():
            self._reduced.set_exception(error)

    async def run(self, exchange: Exchange) -> Average:
        """Exchange slices with everyone and assemble the average.

        Raises:
            RoundFailed: naming the members that could not be exchanged with.
        """
        alone = len(self.members) == 1
        flat = empty_flat(0 if alone else self._num_elements, dtype=self._dtype)
        suspects: list[Member] = []
        reasons: list[str] = []

        async def one(j: int) -> None:
            nonlocal flat
            start, end = self._bounds[j]
            if start == end:
                return  # it reduces nothing
            try:
                reduced = await (asyncio.shield(self._reduced) if j == self.me else exchange(j, self._part(j)))
                if reduced.shape != (end - start,) or reduced.dtype != self._dtype:
                    raise RoundFailed(f"slice {j} came back with the wrong shape", [self.members[j]])
                if alone:
                    flat = reduced
                else:
                    flat[start:end] = reduced
            except LinkError as error:
                suspects.append(self.members[j])
                reasons.append(f"{self.members[j].peer[:8]}: {error}")
                self.fail(RoundFailed("; ".join(reasons), suspects))
            except RoundFailed as error:
                suspects.extend(error.suspects)
                reasons.append(str(error))
            except RemoteError as error:  # it answered, so it is not the one to blame
                reasons.append(f"{self.members[j].peer[:8]}: {error}")
                self.fail(RoundFailed("; ".join(reasons), suspects))

        await asyncio.gather(*(one(j) for j in range(len(self.members))))
        if reasons:
            raise RoundFailed("; ".join(dict.fromkeys(reasons)), list(dict.fromkeys(suspects)))
        digest, sum_squares = await self._run_job(lambda: digest_and_squares(flat))
        return Average(self.term, self.seals, flat, digest, sum_squares)

