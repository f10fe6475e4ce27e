"""What an operator asked of a run: pause, resume, stop at a step. Pure; commit records carry it to the next coordinator."""

from __future__ import annotations

from swarm.wire.messages import CommitRecord, Operate, Order


def changed(order: Order, wanted: Operate, num_commits: int, *, is_paused: bool) -> tuple[Order, str]:
    """Return the order that follows from `wanted`, and what will happen, in words.

    A step under way is always ended first, so whatever is ordered begins with a committed step. A paused run has none: it
    stops where it stands.

    Args:
        order: what holds now.
        wanted: what the operator asks.
        num_commits: steps that have committed.
        is_paused: the last of them was the one to pause after.
    """
    if wanted.action == "pause" and is_paused:
        return order, f"the run is paused after step {num_commits} already"
    if wanted.action == "stop" and wanted.at_step is None and order.stop_at is not None and order.stop_at <= num_commits:
        return order, f"the run has stopped after step {num_commits} already"
    if wanted.action == "resume":
        return Order(), f"the run goes on after step {num_commits}"
    if wanted.action == "pause":
        text = f"the run pauses after step {num_commits + 1}; its state is written to disk"
        return Order(paused=True, stop_at=order.stop_at), text
    stop_at = max(num_commits if is_paused else num_commits + 1, wanted.at_step or 0)
    return Order(stop_at=stop_at), f"the run stops after step {stop_at}; its state is written to disk"


def fault_of(wanted: Operate, num_commits: int, total_steps: int) -> str:
    """Tell why `wanted` asks for what cannot be, or ""."""
    if num_commits >= total_steps:
        return f"the run is over: all {total_steps} steps (total_steps) have committed"
    if wanted.at_step is not None and wanted.at_step <= num_commits:
        passed = f"step {wanted.at_step} has passed: {num_commits} steps have committed"
        return f"{passed}; without --at-step the run stops as soon as it can"
    if wanted.at_step is not None and wanted.at_step > total_steps:
        return f"step {wanted.at_step} never comes: the run ends after step {total_steps} (total_steps)"
    return ""


def is_stopped(record: CommitRecord, order: Order | None = None) -> bool:
    """Tell whether no step follows `record`, by its own order or a later one, until an operator has the run go on."""
    stop_at = (order or record.order).stop_at
    return stop_at is not None and record.step + 1 >= stop_at
