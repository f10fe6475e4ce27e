"""A trainer's routing policy by name."""

from __future__ import annotations

import pytest

from swarm.base.errors import ConfigError
from swarm.policy.routers import router_of
from swarm.policy.routing import StageRouter


def test_a_router_is_found_by_name_or_by_its_dotted_path() -> None:
    assert router_of("iwrr") is StageRouter
    assert router_of("swarm.policy.routing:StageRouter") is StageRouter


def test_an_unknown_router_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match=r"router 'fastest' is none of iwrr, and no package.module:name"):
        router_of("fastest")
