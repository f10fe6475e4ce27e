"""`package.module:factory`: a user's own code by name. Owns the syntax and its errors; must not know what it makes.

Importing runs code: a name is only ever taken from this machine's command line or files, unless its owner agreed.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any

from swarm.base.errors import ConfigError

_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def is_dotted(text: str) -> bool:
    """Whether `text` has the form `package.module:factory`."""
    return _DOTTED.fullmatch(text) is not None


def import_factory(dotted: str, what: str) -> Callable[..., Any]:
    """The callable that `dotted` names; `what` says in errors what it is for.

    Raises:
        ConfigError: if there is no such module, it cannot be imported, or it has no such callable.
    """
    module_name, _, attribute = dotted.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), attribute, None)
    except ImportError as error:
        raise ConfigError(f"{what} {dotted}: {error}") from None
    if not callable(found):
        raise ConfigError(f"{what} {dotted}: module {module_name} has no callable {attribute!r}")
    return found
