"""`package.module:name`: a user's own code by name. Owns the syntax and its errors; must not know what it makes.

Importing runs code: a name is only ever taken from this machine's command line or files, unless its owner agreed. That is
asked once, where a process begins with a run (`models/registry.py`), which imports what the configuration names; deeper code
calls `imported`, which imports nothing.
"""

from __future__ import annotations

import importlib
import re
import sys
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
    try:
        importlib.import_module(dotted.partition(":")[0])
    except ImportError as error:
        raise ConfigError(f"{what} {dotted}: {error}") from None
    return imported(dotted, what)


def imported(dotted: str, what: str) -> Callable[..., Any]:
    """The callable that `dotted` names in a module that this process has imported.

    Raises:
        ConfigError: the module was not imported, or it has no such callable.
    """
    module_name, _, attribute = dotted.partition(":")
    module = sys.modules.get(module_name)
    if module is None:
        raise ConfigError(f"{what} {dotted}: this process has not imported {module_name}")
    found = getattr(module, attribute, None)
    if not callable(found):
        raise ConfigError(f"{what} {dotted}: module {module_name} has no callable {attribute!r}")
    return found
