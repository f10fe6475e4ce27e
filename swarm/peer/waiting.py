"""What a peer waits for, as its operator is told it: once it lasts, and again once it has become another that lasts.

Owns when a line is told, not what it says.
"""

from __future__ import annotations

import asyncio

#: Who waits for so long, in seconds, tells its operator what for, in the coordinator's words.
WAITING_TOLD_S = 3.0
#: How these begin for what every slow step waits for: that is no news.
USUAL_WAITS = ("tickets", "seals", "averages", "nothing")
#: What was told before is told again only once it has lasted so long, in seconds: two that alternate are told once each.
TOLD_AGAIN_S = 60.0
MAX_TOLD = 64


class Lasting:
    """Tells when an operator has to be told what a peer waits for."""

    def __init__(self) -> None:
        self._text = ""
        self._since = 0.0
        #: What was told, the latest last.
        self._told: dict[str, None] = {}

    def note_news(self, text: str) -> bool:
        """Note what it is now, "" for nothing; True if it is to be told now."""
        now = asyncio.get_running_loop().time()
        if text != self._text:
            self._text, self._since = text, now
        lasts_s = TOLD_AGAIN_S if text in self._told else WAITING_TOLD_S
        if not text or next(reversed(self._told), "") == text or now - self._since < lasts_s:
            return False
        self._told.pop(text, None)
        self._told[text] = None
        if len(self._told) > MAX_TOLD:
            del self._told[next(iter(self._told))]
        return True
