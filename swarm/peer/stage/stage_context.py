"""What the parts of a peer that serve one stage have in common: the stage's module, threads, the link, and counters.

Built once for each stage that a peer takes up. Holds nothing of the protocol: what has committed is in `committed_state`, what
is open in `step_state`.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarm.averaging.compressors.choice import compressor_of
from swarm.peer.link import Link, Refuse, Tasks
from swarm.peer.link_meters import LinkMeters
from swarm.stage.compute import StageCompute
from swarm.stage.executor import Threads
from swarm.stage.optimizers.interface import Optimizer
from swarm.wire import messages as m


@dataclass
class BytesMoved:
    """Bytes that one peer has moved since it started, at whatever stages."""

    #: Slices, reduced slices and copies of averages, as coded.
    average_sent: int = 0
    #: States of stages, to newcomers and from donors.
    state_sent: int = 0
    state_received: int = 0

    def sent_average(self, num_bytes: int) -> None:
        """Count a part of an average that leaves."""
        self.average_sent += num_bytes

    def sent_state(self, num_bytes: int) -> None:
        """Count a part of a state that leaves."""
        self.state_sent += num_bytes

    def received_state(self, num_bytes: int) -> None:
        """Count a part of a state that came."""
        self.state_received += num_bytes


class StageContext:
    """One peer at one stage.

    Args:
        link: asks and is asked.
        compute: the stage's module.
        optimizer: shared by the stage's peers.
        threads: compute, and do what must not wait for that.
        tasks: owns what runs in the background for this stage.
        bytes_moved: counts bytes, also over moves between stages.
    """

    def __init__(
        self, link: Link, compute: StageCompute, optimizer: Optimizer, threads: Threads, tasks: Tasks, bytes_moved: BytesMoved
    ) -> None:
        self.link = link
        self.config = link.context.config
        self.run = link.context.run
        self.stage = compute.stage
        self.compute = compute
        self.optimizer = optimizer
        self.moments = optimizer.moments
        self.executor = threads.compute
        self.background = threads.background
        self.storage = threads.storage
        self.tasks = tasks
        self.bytes_moved = bytes_moved
        self.compressor = compressor_of(self.config, compute.layout)
        #: What this peer's link carries, measured while averages move.
        self.carries = LinkMeters(link.context.transport)

    @property
    def me(self) -> m.Member:
        """This peer as others see it."""
        return self.link.context.member()

    def require_stage(self, stage: int) -> None:
        """Return if this peer serves `stage`.

        Raises:
            Refuse: this peer serves another stage.
        """
        if stage != self.stage:
            raise Refuse("wrong_stage", f"this peer serves stage {self.stage}")
