"""Roles change where the plan says that it pays, and nowhere else."""

from __future__ import annotations

import random

import pytest

from swarm.policy.role_changes import Colleague, revise_roles
from swarm.policy.roles import Work
from swarm.policy.shares import AGGREGATE_WORTH, Report, choose_shares

#: Steps that take as long to compute, by four peers, as lines of 100 take to carry an average.
WORK = Work(tickets=40, average_bytes=100)


def peer(name: str, upload: float | None = 100.0, role: str = "both", **rest: float | None) -> Colleague:
    known = {"tickets_per_s": 10.0, "best_upload": upload, "best_download": 100.0, **rest}
    return Colleague(name=name, role=role, upload=upload, **known)  # type: ignore[arg-type]


FAST = [peer(name) for name in "abc"]


def test_a_slow_uploader_only_aggregates_and_says_why() -> None:
    roles, reason = revise_roles([*FAST, peer("d", 10.0)], WORK)
    assert roles == ("both", "both", "both", "aggregate")
    assert reason.startswith("steps of 11 s should take 2.96 s with d aggregate")


def test_it_computes_again_once_its_line_is_good() -> None:
    assert revise_roles([*FAST, peer("d", role="aggregate")], Work(tickets=160, average_bytes=100))[0] == ("both",) * 4


def test_one_that_is_paced_by_a_slow_line_goes_on_computing() -> None:
    """While the slow one sets the pace, the others show less than they carry, and not all the same."""
    fast = [peer("a", 30.0, best_upload=90.0), peer("b", 24.0, best_upload=75.0), peer("c", 39.0, best_upload=95.0)]
    assert revise_roles([*fast, peer("d", 10.0)], WORK)[0] == ("both", "both", "both", "aggregate")


def test_where_compute_is_scarce_a_slow_uploader_computes_and_reduces_nothing() -> None:
    work = Work(tickets=4000, average_bytes=100)
    roles, _ = revise_roles([*FAST, peer("d", 10.0, role="aggregate")], work)
    assert roles == ("both", "both", "both", "compute")


def test_a_stage_that_waits_for_another_has_compute_to_spare() -> None:
    colleagues = [*FAST, peer("d", 40.0)]
    slow = Work(tickets=200, average_bytes=100)
    assert revise_roles(colleagues, slow)[0] == ("both",) * 4
    waits = Work(tickets=200, average_bytes=100, others_s=10.0)
    assert revise_roles(colleagues, waits)[0] == ("both", "both", "both", "aggregate")


@pytest.mark.parametrize("unknown", [{"upload": None}, {"best_download": None}, {"tickets_per_s": None}])
def test_nothing_changes_before_all_is_measured(unknown: dict[str, None]) -> None:
    others = [peer(name, tickets_per_s=None) for name in "abc"] if "tickets_per_s" in unknown else FAST
    roles, reason = revise_roles([*others, peer("d", **{"upload": 10.0, **unknown})], WORK)  # type: ignore[arg-type]
    assert roles == ("both",) * 4
    assert "measured" in reason


def test_an_hour_of_noise_changes_nothing() -> None:
    rng = random.Random(7)
    colleagues = [*FAST, peer("d", 70.0)]
    for _ in range(12):
        noisy = [
            peer(x.name, (x.upload or 0.0) * rng.uniform(0.8, 1.2), x.role, tickets_per_s=10 * rng.uniform(0.8, 1.2))
            for x in colleagues
        ]
        roles, reason = revise_roles(noisy, WORK)
        assert roles == ("both",) * 4, reason


def test_two_slow_uploaders_of_twelve_are_found() -> None:
    """More than are enumerated; without either the other one is as slow."""
    colleagues = [peer(f"{k}", 5.0 if k in (3, 8) else 100.0) for k in range(12)]
    roles, _ = revise_roles(colleagues, WORK)
    assert [k for k, role in enumerate(roles) if role == "aggregate"] == [3, 8]


def test_nobody_is_called_back_by_the_figures_that_stopped_it() -> None:
    rng = random.Random(11)
    for _ in range(40):
        colleagues = [peer(f"{k}", rng.choice([5.0, 20.0, 60.0, 100.0])) for k in range(rng.randint(2, 5))]
        work = Work(tickets=rng.choice([10, 100, 400]), average_bytes=100, overlaps=rng.random() < 0.5)
        roles, _ = revise_roles(colleagues, work)
        after = [peer(x.name, x.upload, role) for x, role in zip(colleagues, roles, strict=True)]
        if roles != ("both",) * len(colleagues):
            assert "aggregate" in roles
            assert revise_roles(after, work)[0].count("aggregate") >= roles.count("aggregate")


def test_who_only_computes_gets_no_slice() -> None:
    reports = [Report(name, 100.0, 100.0, reduces=name != "d") for name in "abcd"]
    assert choose_shares(reports)[0] == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0.0])
    assert choose_shares(reports, [0.25] * 4)[0][3] == 0.0, "not even for the sake of the last shares"
    nobody = [Report(name, 100.0, 100.0, reduces=False) for name in "abc"]
    assert choose_shares(nobody)[0] == pytest.approx([1 / 3] * 3)


def test_who_only_aggregates_reduces_where_that_pays() -> None:
    fast = [Report(name, 100.0, 100.0) for name in "abc"]
    slow, _ = choose_shares([*fast, Report("d", 10.0, 100.0, computes=False)])
    assert slow[3] == 0.0, f"it would gain less than {AGGREGATE_WORTH:.0%}"
    good, _ = choose_shares([*fast, Report("d", 300.0, 300.0, computes=False)])
    assert good[3] > 0.25
    tried, _ = choose_shares([*fast, Report("d", 200.0, 200.0, computes=False)], slow)
    assert tried[3] > 0.25, "taken for twice as good as the best, it has to show what it carries"


def test_of_two_the_one_without_gradients_reduces_nothing() -> None:
    assert choose_shares([Report("a", 100.0, 100.0), Report("b", 10.0, 100.0, computes=False)])[0] == pytest.approx([1.0, 0.0])
