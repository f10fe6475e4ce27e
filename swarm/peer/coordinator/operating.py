"""What an operator has asked of the run, at its coordinator. The rules are in `lifecycle/order.py`; records carry the order."""

from __future__ import annotations

import logging

from swarm.lifecycle.order import changed, fault_of, is_stopped
from swarm.peer.coordinator.run_leadership import RunLeadership
from swarm.peer.link import Refuse
from swarm.wire import messages as m

logger = logging.getLogger(__name__)


class Operating:
    """The order that holds under one coordinator; `order` is that of the record with which it was elected."""

    def __init__(self, leadership: RunLeadership, order: m.Order) -> None:
        self._leadership = leadership
        self.order = order

    @property
    def is_paused(self) -> bool:
        """The step in which an operator asked for a pause has committed."""
        record = self._leadership.record
        return self.order.paused and record is not None and record.order.paused

    @property
    def is_stopped(self) -> bool:
        """As many steps have committed as an operator asked for."""
        record = self._leadership.record
        return record is not None and is_stopped(record, self.order)

    def take(self, message: m.Operate, remote: str) -> m.Operated:
        """Take an operator's order. Only who can run programs on this machine is one: the connection comes from here.

        Raises:
            Refuse: it comes from elsewhere, or asks for what cannot be.
        """
        here = self._leadership.context.advertise_host
        if remote != here and remote != "::1" and not remote.startswith("127."):
            raise Refuse("not_member", f"the run is operated from the machine of its coordinator, {here}, not from {remote}")
        num_commits = self._leadership.record.step + 1 if self._leadership.record is not None else 0
        fault = fault_of(message, num_commits, self._leadership.config.total_steps)
        if fault:
            raise Refuse("bad_request", fault)
        self.order, text = changed(self.order, message, num_commits, is_paused=self.is_paused)
        logger.warning("operator: %s: %s", message.action, text)
        return m.Operated(step=num_commits, text=text)
