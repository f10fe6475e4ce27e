"""What a peer's link carries, measured on its transport while averages move. The meters are `policy/bandwidth.py`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from swarm.net.transport import Transport
from swarm.policy.bandwidth import WINDOW_S, Meter


class LinkMeters:
    """Measures both directions of one peer's link."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._num_rounds = 0
        self.upload, self.download = Meter(), Meter()

    @property
    def is_measuring(self) -> bool:
        """A round is being measured."""
        return self._num_rounds > 0

    @contextlib.asynccontextmanager
    async def measured(self) -> AsyncIterator[None]:
        """Measure a round; rounds that overlap, of an aggregator, are measured as one. What fails tells nothing."""
        if self._num_rounds == 0:
            self._each(Meter.begin_round)
        self._num_rounds += 1
        sampling = asyncio.ensure_future(self._sample())
        try:
            yield
            if self._num_rounds == 1:
                self._each(Meter.end_round)
        finally:
            self._num_rounds -= 1
            sampling.cancel()

    async def _sample(self) -> None:
        while True:
            await asyncio.sleep(WINDOW_S / 2)
            self._each(Meter.sample)

    def _each(self, what: Callable[[Meter, float, int], None]) -> None:
        now = asyncio.get_running_loop().time()
        for meter, total in zip((self.upload, self.download), self._transport.carried(), strict=True):
            what(meter, now, total)
