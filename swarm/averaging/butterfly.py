"""Butterfly all-reduce of one vector inside a group (Moshpit SGD, arXiv 2103.03239, section 3), in chunks.

Member j reduces slice j of everyone. A slice travels in chunks, each a request that is answered by the reduced chunk, a
few of them under way at once for each pair: chunks come back while later ones are still being sent, and a member holds
no more than that window of what others sent. Auxiliaries may reduce slices too (DeDLOC, arXiv 2106.10207). Owns one
member's side of one exchange, its own slice included (`reduction.py`); `all_reduce.py` makes rounds of them, the shell
moves the bytes.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from swarm.averaging.reduction import AUXILIARY_WINDOW, CodedChunk, Reduction, RoundFailed
from swarm.base.errors import LinkError, RemoteError
from swarm.stage.accumulator import is_finite
from swarm.wire.compression import decode_tensor
from swarm.wire.messages import Member

#: Sends chunk `number` of slice `j` (None if this member contributes nothing) to member j and returns the reduced chunk.
SliceExchange = Callable[[int, int, CodedChunk | None], Awaitable[CodedChunk]]


@dataclass(frozen=True)
class Sum:
    """The outcome of one exchange: everyone's `total` [n], the same bits at each member of the group.

    With a sparse code also `counted` [n], what the total holds of this member's values, and `lost`, what the code lost of
    the sums that this member made, elements `own` of the total. None with other codes: what they lose is noise.
    """

    total: torch.Tensor
    counted: torch.Tensor | None = None
    own: tuple[int, int] = (0, 0)
    lost: torch.Tensor | None = None


class Butterfly(Reduction):
    """One member's side of one exchange: its own slice, and its chunks of everyone else's."""

    keeps_sums = True

    def _spans(self, j: int) -> list[tuple[int, int]]:
        """The chunks of slice `j`."""
        start, end = self._bounds[j]
        return [self._span(j, number) for number in range(-(-(end - start) // self._chunk_elements[j]))]

    def _encode(self, start: int, end: int) -> CodedChunk | None:
        """This member's chunk of another one's slice."""
        if self._vector.values is None:
            return None
        payload = self._vector.code.encode(self._vector.values[start:end])
        if self._counted is not None:
            decode_tensor(*payload, out=self._counted[start:end])
        return payload

    async def run(self, exchange: SliceExchange) -> Sum:
        """Exchange slices with everyone.

        Raises:
            RoundFailed: naming the members that could not be exchanged with.
        """
        if len(self.members) > 1:
            await self._exchange_all(exchange)
            return Sum(self._flat, self._counted, self._bounds[self.me], self._lost)
        values, carry = self._vector.values, self._vector.carry
        total = torch.zeros(self._vector.num_elements, dtype=self._dtype) if values is None else values
        if carry is not None:
            total = total + carry
        if self._lost is None:
            return Sum(total)
        return Sum(total, values, self._bounds[self.me], self._lost)  # nothing travels, so nothing is lost

    async def _exchange_all(self, exchange: SliceExchange) -> None:
        suspects: list[Member] = []
        reasons: list[str] = []

        async def guarded(j: int, work: Callable[[], Awaitable[None]]) -> None:
            try:
                await work()
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

        tasks = [asyncio.ensure_future(guarded(self.me, self.all_reduced))]
        for j in range(len(self.members)):
            if j != self.me:
                numbers = iter(enumerate(self._spans(j)))
                streams = range(self._num_streams(j))
                tasks += [asyncio.ensure_future(guarded(j, partial(self._stream, j, numbers, exchange))) for _ in streams]
        try:
            await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        if reasons:
            raise RoundFailed("; ".join(dict.fromkeys(reasons)), list(dict.fromkeys(suspects)))

    def _num_streams(self, j: int) -> int:
        """Streams of a pair. They share this member's line alike: small slices have fewer beside a large one of an auxiliary."""
        if self._num_senders == len(self.members):
            return self._window
        sizes = [end - start for start, end in self._bounds]
        most = self._window if j < self._num_senders else AUXILIARY_WINDOW
        return min(math.ceil(AUXILIARY_WINDOW * sizes[j] / max(1, *sizes)), most)

    async def _stream(self, j: int, numbers: Iterator[tuple[int, tuple[int, int]]], exchange: SliceExchange) -> None:
        """One of the streams of a pair: sends the next chunk when the one before has come back reduced."""
        arrived: tuple[int, int, CodedChunk] | None = None
        for number, (start, end) in numbers:
            if self._failure is not None:
                raise self._failure
            if arrived is None and not self._vector.code.is_lossy:
                chunk = self._encode(start, end)
            else:
                chunk = await self._run_job(partial(self._take_and_encode, j, arrived, start, end))
            arrived = start, end, await exchange(j, number, chunk)
        if arrived is not None:
            await self._run_job(partial(self._take, j, *arrived))

    def _take_and_encode(self, j: int, arrived: tuple[int, int, CodedChunk] | None, start: int, end: int) -> CodedChunk | None:
        """One job for what could be two: handing a job to another thread takes as long as a small chunk's work."""
        if arrived is not None:
            self._take(j, *arrived)
        return self._encode(start, end)

    def _take(self, j: int, start: int, end: int, payload: CodedChunk) -> None:
        """A reduced chunk of slice `j` came back.

        Raises:
            RoundFailed: it is none.
        """
        if payload[0] != self._spec(end - start):
            raise RoundFailed(f"slice {j} came back with the wrong shape", [self.members[j]])
        reduced = decode_tensor(*payload, out=self._flat[start:end])
        if not is_finite(reduced):
            raise self._not_finite("a reduced slice", j)
