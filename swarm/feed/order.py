"""Ticket -> sample indices. Owns the run's one global data order; must not know what a sample is or who trains it.

Position counts samples over the whole run: ticket `(step, index)` covers the positions
`step * target_batch_size + index * micro_batch_size + [0, micro_batch_size)`. Position p is element `p % n` of epoch
`p // n`, and every epoch is a permutation of all n samples, seeded by (run seed, epoch). Nothing is dropped at the end
of an epoch: a micro-batch that reaches over it goes on with the next epoch's first samples, so it may hold one sample
twice, and every sample has been seen equally often whenever the position is a multiple of n.

The order is a promise between peers, so it uses raw draws only: numpy keeps the streams of its bit generators and of
`SeedSequence` over versions, but not those of `Generator.permutation`.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from swarm.base.config import RunConfig
from swarm.base.ids import Ticket


def sample_indices(ticket: Ticket, config: RunConfig, num_samples: int) -> np.ndarray:
    """Which samples `ticket` holds: int64 [micro_batch_size], each in `[0, num_samples)`.

    Raises:
        ValueError: if the ticket is not one of the run's, or there are no samples.
    """
    if num_samples < 1:
        raise ValueError("there are no samples")
    if ticket.step < 0 or not 0 <= ticket.index < config.tickets_per_step:
        raise ValueError(f"{ticket} is not one of {config.tickets_per_step} tickets of a step")
    first = ticket.step * config.target_batch_size + ticket.index * config.micro_batch_size
    positions = range(first, first + config.micro_batch_size)
    indices = [epoch_order(config.seed, p // num_samples, num_samples)[p % num_samples] for p in positions]
    return np.array(indices, dtype=np.int64)


@lru_cache(maxsize=2)
def epoch_order(seed: int, epoch: int, num_samples: int) -> np.ndarray:
    """The permutation of one epoch: read-only int64 [num_samples]."""
    keys = np.random.PCG64(np.random.SeedSequence((seed, epoch))).random_raw(num_samples)
    order = np.argsort(keys, kind="stable").astype(np.int64, copy=False)
    order.flags.writeable = False
    return order
