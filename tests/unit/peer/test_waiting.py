"""When an operator is told what the run waits for."""

from __future__ import annotations

import asyncio

from swarm.peer.waiting import TOLD_AGAIN_S, WAITING_TOLD_S, Lasting
from swarm.testing.virtual_time import run_virtual


def told(texts: list[tuple[str, float]], every_s: float = 0.5) -> list[tuple[float, str]]:
    """What is told, and when, where each text is the case for so many seconds."""

    async def main() -> list[tuple[float, str]]:
        lasting, loop, found = Lasting(), asyncio.get_running_loop(), []
        for text, for_s in texts:
            until = loop.time() + for_s
            while loop.time() < until:
                if lasting.note_news(text):
                    found.append((loop.time(), text))
                await asyncio.sleep(every_s)
        return found

    return run_virtual(main())


def test_what_lasts_is_told_once_and_again_when_it_becomes_another():
    assert told([("a", 20.0), ("b", 20.0)]) == [(WAITING_TOLD_S, "a"), (20.0 + WAITING_TOLD_S, "b")]


def test_nothing_that_is_soon_over_is_told():
    assert told([("a", 2.0), ("b", 2.0), ("", 10.0), ("c", 2.0)]) == []


def test_two_that_alternate_are_told_once_each():
    assert [text for _, text in told([("a", 5.0), ("b", 5.0)] * 60)] == ["a", "b"]


def test_what_comes_back_for_good_is_told_again():
    assert told([("a", 10.0), ("b", 10.0), ("a", 100.0)])[2:] == [(20.0 + TOLD_AGAIN_S, "a")]
