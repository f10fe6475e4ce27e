"""A newcomer asks for the run, and says what it waits for."""

from __future__ import annotations

import asyncio
import random

import pytest

from swarm.base.config import RunConfig, parse_config_bytes, run_id_of
from swarm.base.errors import ConfigError, UnknownHost
from swarm.base.ids import ZERO_BALLOT, Address
from swarm.net.transport import Progress
from swarm.peer.joining import Contacts, fetch_run, require_alone
from swarm.testing.memory_transport import MemoryNetwork, MemoryTransport
from swarm.testing.virtual_time import run_virtual
from swarm.wire.framing import Frame
from swarm.wire.messages import CommitRecord, Member, RunInfo, StatusReply

WHERE = Address("192.0.2.1", 4000)


async def ask(*, up_at: float, slow_s: float = 0.0) -> RunInfo:
    """Nobody listens before the loop's time `up_at`; then one who takes `slow_s` to answer."""
    network = MemoryNetwork(random.Random(1))
    newcomer, peer = MemoryTransport(network, Address("192.0.2.2", 1)), MemoryTransport(network, WHERE)

    async def answer(frame: Frame, progress: Progress) -> Frame:
        await asyncio.sleep(slow_s)
        return Frame(RunInfo(config=RunConfig().to_bytes().decode()))

    async def come_up() -> None:
        await asyncio.sleep(up_at)
        await peer.start(answer)

    coming = asyncio.create_task(come_up())
    try:
        return await fetch_run(newcomer, WHERE, deadline_s=20.0)
    finally:
        coming.cancel()
        await asyncio.gather(coming, return_exceptions=True)
        await peer.close()
        await newcomer.close()


@pytest.mark.parametrize(("up_at", "slow_s", "told"), [(1.0, 0.0, 0), (9.0, 0.0, 1), (0.0, 9.0, 1)])
def test_a_newcomer_says_after_two_seconds_that_nobody_answers_yet(
    up_at: float, slow_s: float, told: int, caplog: pytest.LogCaptureFixture
) -> None:
    info = run_virtual(ask(up_at=up_at, slow_s=slow_s))
    assert info.config == RunConfig().to_bytes().decode()
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["nobody answers at 192.0.2.1:4000 yet; trying for 20 s in all"] * told


def test_where_nobody_answers_in_time_it_says_so_once_more(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match=r"nobody answers at 192\.0\.2\.1:4000 \(waited 20 s\); is a peer of the run"):
        run_virtual(ask(up_at=99.0))
    assert len(caplog.records) == 1


OWN, FOREIGN = RunConfig(seed=1), RunConfig(seed=2)


async def ask_those_known_from_before(*, named: RunConfig | None, contacts: list[RunConfig | str]) -> tuple[RunConfig, float]:
    """`named` and each of the contacts serves a run, is "silent" or away. Who is heeded, and after how many seconds."""
    network = MemoryNetwork(random.Random(1))
    newcomer = MemoryTransport(network, Address("192.0.2.2", 1))
    addresses = [Address(WHERE.host, WHERE.port + number) for number in range(len(contacts) + 1)]
    served = []
    for address, what in zip(addresses, [named or "away", *contacts], strict=True):
        if what == "away":
            continue

        async def answer(frame: Frame, progress: Progress, what: RunConfig | str = what) -> Frame:
            if not isinstance(what, RunConfig):
                await asyncio.sleep(1000.0)
                raise AssertionError("nobody waits for so long")
            return Frame(RunInfo(config=what.to_bytes().decode()))

        served.append(MemoryTransport(network, address))
        await served[-1].start(answer)
    loop = asyncio.get_running_loop()
    began = loop.time()
    try:
        info = await fetch_run(
            newcomer, WHERE, contacts=Contacts(run=run_id_of(OWN.to_bytes()), addresses=addresses[1:]), deadline_s=20.0
        )
        return parse_config_bytes(info.config.encode()), loop.time() - began
    finally:
        for transport in (newcomer, *served):
            await transport.close()


def test_the_named_address_is_obeyed_before_those_known_from_before() -> None:
    assert run_virtual(ask_those_known_from_before(named=FOREIGN, contacts=[OWN]))[0] == FOREIGN


@pytest.mark.parametrize("others", [["away"] * 60, ["silent"] * 60, [FOREIGN]], ids=["away", "silent", "of another run"])
def test_of_those_known_from_before_one_of_the_same_run_is_enough(others: list[RunConfig | str]) -> None:
    """However many are off: all are asked at once."""
    found, seconds = run_virtual(ask_those_known_from_before(named=None, contacts=[*others, OWN]))
    assert found == OWN
    assert seconds < 5.0


def test_where_none_of_them_answers_either_it_says_so() -> None:
    with pytest.raises(ConfigError, match=r"at 192\.0\.2\.1:4000, nor at 2 addresses known from before \(waited 2"):
        run_virtual(ask_those_known_from_before(named=None, contacts=["away", FOREIGN]))


def test_a_host_that_nobody_knows_is_called_that(caplog: pytest.LogCaptureFixture) -> None:
    class NoSuchName(MemoryTransport):
        async def call(self, address: Address, *args: object, **more: object) -> Frame:  # type: ignore[override]
            raise UnknownHost(f"hello to {address}: the name {address.host} is not known (Name or service not known)")

    newcomer = NoSuchName(MemoryNetwork(random.Random(1)), Address("192.0.2.2", 1))
    with pytest.raises(ConfigError, match=r"the name nowhere\.test is not known \(Name or service") as refused:
        run_virtual(fetch_run(newcomer, Address("nowhere.test", 4000), deadline_s=4.0))
    assert "listening" not in str(refused.value)
    assert "name nowhere.test is not known" in caplog.text, "it is told while it is waited for"


ME, OTHER = "a" * 40, "b" * 40


async def join_beside(*, answers_as: str | None, hangs: bool = False, own: Address = Address("192.0.2.2", 1)) -> float:
    """A record lists this peer's identity at `WHERE`; who lives there, if anyone. Returns the seconds that asking took."""
    network = MemoryNetwork(random.Random(1))
    newcomer, listed = MemoryTransport(network, Address("192.0.2.2", 1)), MemoryTransport(network, WHERE)
    members = [Member(peer=x, incarnation="1" * 16, host=WHERE.host, port=WHERE.port + n) for n, x in enumerate((ME, OTHER))]
    record = CommitRecord(run="1" * 64, step=3, version_id="2" * 64, ballot=ZERO_BALLOT, members=((members[1],), (members[0],)))

    async def answer(frame: Frame, progress: Progress) -> Frame:
        await asyncio.sleep(99.0 if hangs else 0.0)
        assert answers_as is not None
        return Frame(StatusReply(role="stage", member=members[0].model_copy(update={"peer": answers_as})))

    if answers_as is not None:
        await listed.start(answer)
    try:
        began = asyncio.get_running_loop().time()
        await require_alone(newcomer, ME, record, own=own, deadline_s=2.0)
        await require_alone(newcomer, ME, None, own=own, deadline_s=2.0)
        return asyncio.get_running_loop().time() - began
    finally:
        await listed.close()
        await newcomer.close()


def test_a_copied_state_directory_is_refused_while_the_original_lives() -> None:
    with pytest.raises(ConfigError, match=r"identity aaaaaaaa runs at 192\.0\.2\.1:4000; .* start with an empty one"):
        run_virtual(join_beside(answers_as=ME))


@pytest.mark.parametrize("answers_as", [None, OTHER], ids=["nobody", "somebody else"])
def test_a_peer_that_is_started_again_is_not_kept_waiting(answers_as: str | None) -> None:
    assert run_virtual(join_beside(answers_as=answers_as)) < 1.0


def test_who_does_not_answer_is_taken_for_dead() -> None:
    assert run_virtual(join_beside(answers_as=ME, hangs=True)) == pytest.approx(2.0, abs=0.5)


def test_an_earlier_life_at_the_own_address_is_not_asked() -> None:
    assert run_virtual(join_beside(answers_as=ME, own=WHERE)) == 0.0
