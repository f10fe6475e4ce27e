"""Which version a run goes on from when a stage was lost, or when everyone starts again. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple


class Holding(NamedTuple):
    """A version that some peer holds; versions are ordered by (era, step)."""

    version_id: str
    era: int
    step: int


def newest_complete(stages: Sequence[Mapping[Any, Sequence[Holding]]]) -> tuple[Holding | None, str]:
    """Find the newest version of which every stage has a peer that holds it.

    Args:
        stages: for each stage, what each peer holds.

    Returns:
        The version, or None if only the initial values are complete; and the reason.
    """
    newest: dict[str, Holding] = {}
    complete: set[str] | None = None
    for peers in stages:
        held = [holding for holdings in peers.values() for holding in holdings]
        for holding in held:  # a version may have been restored in a later era than its checkpoint says
            newest[holding.version_id] = max(newest.get(holding.version_id, holding), holding, key=lambda h: h.era)
        version_ids = {holding.version_id for holding in held}
        complete = version_ids if complete is None else complete & version_ids
    if not complete:
        short = [k for k, peers in enumerate(stages) if not any(peers.values())]
        where = f"stages {short} hold nothing" if short else "no version is held by every stage"
        return None, f"{where}: back to the initial values"
    best = max((newest[version_id] for version_id in complete), key=lambda h: (h.era, h.step, h.version_id))
    return best, f"step {best.step + 1} is the newest that every stage holds"


def worth_waiting_for(
    present: Sequence[Mapping[str, Collection[str]]], version_ids: Sequence[str], writers: Mapping[str, Sequence[Collection[str]]]
) -> tuple[str, tuple[str, ...]]:
    """Find the newest version that peers who are not here may complete, and who they are; ("", ()) if there is none.

    Args:
        present: for each stage, the versions that each peer that is here holds.
        version_ids: the versions newer than the newest complete one, newest first.
        writers: for each of them, the peers of each stage that were to write it to disk.
    """
    for version_id in version_ids:
        absent: list[str] = []
        hopeless = False
        for peers, wrote in zip(present, writers[version_id], strict=True):
            if any(version_id in held for held in peers.values()):
                continue
            missing = [peer for peer in wrote if peer not in peers]
            absent += missing
            hopeless = hopeless or not missing
        if not hopeless:
            return version_id, tuple(sorted(absent))
    return "", ()
