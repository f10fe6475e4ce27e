"""What every peer of a run has: configuration, identity, transport and DHT. Owns DHT key names; holds no protocol state."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass
from pathlib import Path

from swarm.base.config import RunConfig, run_id_of
from swarm.base.ids import Address, Incarnation, PeerId, RunId
from swarm.net.dht import Dht
from swarm.net.identity import Identity
from swarm.net.transport import Transport
from swarm.wire.messages import Member


def stage_key(run: RunId, stage: int) -> str:
    """Return the DHT key under which the peers of a stage announce themselves."""
    return f"{run}/stage/{stage}"


def coordinator_key(run: RunId) -> str:
    """Return the DHT key under which coordinators announce themselves."""
    return f"{run}/coordinator"


def aggregator_key(run: RunId) -> str:
    """Return the DHT key under which backbones announce that they reduce slices of averages."""
    return f"{run}/aggregator"


@dataclass(frozen=True, kw_only=True)
class PeerContext:
    """A peer's surroundings, built once by a launcher or a simulation for a `StagePeer`, `Trainer` or `Backbone`.

    `transport` and `dht` are not started yet. `bootstrap` are addresses of peers that are in the swarm already.
    """

    config: RunConfig
    config_bytes: bytes
    identity: Identity
    incarnation: Incarnation
    transport: Transport
    dht: Dht
    rng: random.Random
    advertise_host: str
    #: Where it is not the port that `transport` listens at, since a router or container maps it; else 0.
    advertise_port: int = 0
    bootstrap: tuple[Address, ...] = ()
    #: Where a stage peer's checkpoints go; None keeps none.
    state_dir: Path | None = None

    @functools.cached_property
    def run(self) -> RunId:
        """The run's name: a hash of its configuration."""
        return run_id_of(self.config_bytes)

    @property
    def peer(self) -> PeerId:
        """The peer's name: a hash of its public key."""
        return self.identity.peer_id

    @property
    def address(self) -> Address:
        """Where others reach this peer; valid once `transport` has started."""
        return Address(self.advertise_host, self.advertise_port or self.transport.address.port)

    def member(self, *, ready: bool = True) -> Member:
        """Return this peer as others see it."""
        return Member(
            peer=self.peer,
            incarnation=self.incarnation,
            host=self.address.host,
            port=self.address.port,
            ready=ready,
            keeps_checkpoints=self.state_dir is not None,
        )
