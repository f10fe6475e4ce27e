"""Where the time of micro-batches went: what a committed step's line says of it."""

from __future__ import annotations

import pytest

from swarm.peer.trainer.reports import RoundTrips
from swarm.wire.messages import Hop


def test_means_are_over_the_micro_batches_that_came_back() -> None:
    hop = Hop(stage=0, peer="0" * 40, accumulated=True, queue_s=0.1, forward_s=0.2, backward_s=0.4)
    trips = RoundTrips()
    assert trips.json_fields() == {"round_trip_s": 0.0, "queue_s": 0.0, "compute_s": 0.0}
    trips.add(2.0, (hop, hop))
    trips.add(1.0, (hop,))
    assert trips.json_fields() == pytest.approx({"round_trip_s": 1.5, "queue_s": 0.15, "compute_s": 0.9})
