"""Where this machine keeps tokens. Owns the place; must not know what is kept."""

from __future__ import annotations

import os
from pathlib import Path

from swarm.feed.token_files import TokenCache


def token_cache() -> TokenCache:
    """`swarm/tokens` in the user's cache directory: `$XDG_CACHE_HOME`, by default `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return TokenCache((Path(base) if os.path.isabs(base) else Path("~/.cache").expanduser()) / "swarm" / "tokens")
