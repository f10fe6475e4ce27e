"""The routing policies that a trainer may be told to use, by name. Owns the registry."""

from __future__ import annotations

from swarm.base.dotted import import_factory, is_dotted
from swarm.base.errors import ConfigError
from swarm.policy.routing import MakeRouter, StageRouter

ROUTERS: dict[str, MakeRouter] = {"iwrr": StageRouter}


def router_of(name: str) -> MakeRouter:
    """Find what makes the router of each stage: one of `ROUTERS`, or the operator's own `package.module:name`, which is imported.

    Raises:
        ConfigError: there is none of that name.
    """
    if name in ROUTERS:
        return ROUTERS[name]
    if not is_dotted(name):
        raise ConfigError(f"router {name!r} is none of {', '.join(ROUTERS)}, and no package.module:name")
    return import_factory(name, "router")
