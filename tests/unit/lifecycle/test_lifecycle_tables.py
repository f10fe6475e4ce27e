"""Lifecycles are tables: what is not listed raises, every state can be reached, and an end is an end."""

from __future__ import annotations

import itertools

import pytest

from swarm.base.errors import InternalError
from swarm.lifecycle.micro_batch import MICRO_BATCH
from swarm.lifecycle.peer import PEER
from swarm.lifecycle.step import STEP
from swarm.lifecycle.table import Table

TABLES = pytest.mark.parametrize("table", [MICRO_BATCH, PEER, STEP], ids=lambda table: table.name)
ENDS = {"micro-batch": {"accumulated", "passed", "evaluated", "failed", "cancelled"}, "peer": set(), "step": {"committed"}}


def reachable(table: Table, start: str) -> set[str]:
    seen, todo = {start}, [start]
    while todo:
        state = todo.pop()
        for (before, _), after in table.transitions.items():
            if before == state and after not in seen:
                seen.add(after)
                todo.append(after)
    return seen


@TABLES
def test_every_unlisted_pair_raises_and_says_which(table: Table) -> None:
    events = {event for _, event in table.transitions} | {"never_heard_of"}
    unlisted = [pair for pair in itertools.product(table.states, events) if pair not in table.transitions]
    assert len(unlisted) > len(table.states)
    for state, event in unlisted:
        assert not table.allows(state, event)
        with pytest.raises(InternalError) as raised:
            table.next(state, event)
        assert table.name in str(raised.value)
        assert repr(state) in str(raised.value)
        assert repr(event) in str(raised.value)


@TABLES
def test_every_listed_pair_moves(table: Table) -> None:
    for (state, event), after in table.transitions.items():
        assert table.allows(state, event)
        assert table.next(state, event) == after


@TABLES
def test_every_state_can_be_reached(table: Table) -> None:
    assert reachable(table, table.initial) == table.states


@TABLES
def test_only_ends_have_no_way_on(table: Table) -> None:
    without_exit = {state for state in table.states if not any(before == state for before, _ in table.transitions)}
    assert without_exit == ENDS[table.name]


def test_a_micro_batch_can_fail_or_be_cancelled_until_it_ends() -> None:
    for state in MICRO_BATCH.states - ENDS["micro-batch"]:
        assert MICRO_BATCH.next(state, "fail") == "failed"
        assert MICRO_BATCH.next(state, "cancel") == "cancelled"


def test_only_a_backward_accumulates() -> None:
    assert {state for state in MICRO_BATCH.states if MICRO_BATCH.allows(state, "accumulate")} == {"backward"}


def test_a_step_can_be_reopened_until_it_commits_and_never_afterwards() -> None:
    for state in STEP.states - {"committed"}:
        assert STEP.next(state, "open") == "open"
        assert STEP.next(state, "freeze") == "frozen"
        assert STEP.next(state, "commit") == "committed"
    assert reachable(STEP, "committed") == {"committed"}


def test_an_average_is_held_only_after_a_freeze() -> None:
    assert not STEP.allows("open", "reduce")
    assert {state for (state, _), after in STEP.transitions.items() if after == "prepared"} == {"averaging"}


def test_a_draining_peer_never_serves_again() -> None:
    assert reachable(PEER, "draining") == {"draining"}


def test_a_peer_serves_only_with_state() -> None:
    assert {pair for pair, after in PEER.transitions.items() if after == "serving"} == {
        ("waiting", "listed_ready"),
        ("syncing", "synced"),
        ("moving", "listed_ready"),
    }
