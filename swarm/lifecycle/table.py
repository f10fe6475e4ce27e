"""A transition table: `(state, event) -> state`. Owns nothing else; an unlisted pair raises."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from swarm.base.errors import InternalError


@dataclass(frozen=True, slots=True)
class Table:
    """A named set of allowed transitions."""

    name: str
    initial: str
    transitions: Mapping[tuple[str, str], str]

    def next(self, state: str, event: str) -> str:
        """Return the state after `event`.

        Raises:
            InternalError: if the table does not list the pair.
        """
        try:
            return self.transitions[state, event]
        except KeyError:
            raise InternalError(f"{self.name}: event {event!r} is not allowed in state {state!r}") from None

    def allows(self, state: str, event: str) -> bool:
        """Tell whether the table lists the pair."""
        return (state, event) in self.transitions

    @property
    def states(self) -> frozenset[str]:
        """All states that the table names."""
        return frozenset({self.initial, *(s for s, _ in self.transitions), *self.transitions.values()})
