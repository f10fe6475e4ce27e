"""Which stage a newcomer serves: the one where it raises predicted throughput most (SWARM, arXiv 2301.11913). Pure."""

from __future__ import annotations

from swarm.policy.throughput import Swarm, Worker


def best_stage(swarm: Swarm, newcomer: Worker) -> tuple[int | None, str]:
    """Choose the stage, or None if no stage's state fits into the newcomer's memory; and give the reason.

    Where several stages are the slowest no single newcomer raises the throughput; it then raises one of them, so that the
    next newcomers do. The snapshot should hold those who were placed and do not serve yet: newcomers who ask at once then
    spread out.

    Args:
        swarm: with everyone but the newcomer.
        newcomer: its `stage` is not looked at.
    """
    rates = swarm.stage_rates({})
    before = min(rates)
    num_peers = [sum(worker.stage == stage for worker in swarm.workers) for stage in range(len(rates))]
    best: tuple[tuple[list[float], int, int], int, float] | None = None
    for stage in range(len(rates)):
        if not swarm.fits(newcomer, stage):
            continue
        gained = swarm.rate(newcomer, stage).tickets_per_s
        after = sorted([*rates[:stage], rates[stage] + gained, *rates[stage + 1 :]])
        rank = (after, -num_peers[stage], -stage)
        if best is None or rank > best[0]:
            best = (rank, stage, gained)
    if best is None:
        smallest = min(work.held_bytes for work in swarm.stages)
        return None, f"no stage fits: the smallest needs {smallest} bytes, {newcomer.room_bytes} are free"
    (after, _, _), stage, gained = best
    if not num_peers[stage]:
        return stage, f"nobody serves stage {stage}"
    swarm_wide = f"the swarm goes from {before:.3g} to {after[0]:.3g}"
    return stage, f"stage {stage} at {rates[stage]:.3g} tickets/s gets {gained:.3g} more; {swarm_wide}"
