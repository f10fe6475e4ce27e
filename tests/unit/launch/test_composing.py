"""A peer that is started again with its own state directory finds its run again, whoever is away."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from launch.backbone import parse
from launch.processes.logs import Announcer
from launch.processes.reports import NO_REPORTS
from launch.run import composing
from launch.run.composing import announce, compose
from launch.run.kept_run import KEPT_RUN_FILE, KeptRun, kept_run
from swarm.base.config import RunConfig
from swarm.base.errors import ConfigError
from swarm.base.ids import Address
from swarm.net.kademlia.contact_file import ContactFile
from swarm.net.ports import bind_tcp_and_udp
from swarm.peer.backbone import Backbone

CONFIG = RunConfig(name="ring")


@pytest.fixture(autouse=True)
def _in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that lives on never lets go of its directory, and keeps the title that the tests gave it."""
    monkeypatch.setattr(composing, "claim_directory", lambda directory: directory.mkdir(parents=True, exist_ok=True))
    monkeypatch.setattr(composing, "retitle", lambda *_: None)


@asynccontextmanager
async def serving(*words: object) -> AsyncIterator[Backbone]:
    """A backbone, as its launcher starts it."""
    options = parse(["--join-timeout", "0.5", *map(str, words), "--host", "127.0.0.1"])
    context, run = await compose(options, max_inflight_bytes=2**20)
    peer = Backbone(context)
    try:
        await peer.start()
        announce("launch_backbone", [], context, run, "the backbone", Announcer("test", "text", quiet=True), NO_REPORTS)
        yield peer
    finally:
        await peer.close()


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.json"
    path.write_bytes(CONFIG.to_bytes())
    return path


async def until_all_meet(peers: Sequence[Backbone]) -> None:
    async with asyncio.timeout(20.0):
        while any(len(peer.context.dht.contacts()) < len(peers) for peer in peers):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def first_life(run_file: Path, directories: Sequence[Path]) -> list[Address]:
    """All meet, and go with one blow: nothing is kept at the end. Returns where they were."""
    async with serving("--run", run_file, "--state-dir", directories[0]) as first:
        join = first.context.address
        others = [serving("--join", join, "--state-dir", directory) for directory in directories[1:]]
        async with others[0] as second, others[1] as third:
            peers = [first, second, third]
            await until_all_meet(peers)
            for peer in peers:
                peer.context.dht._remember_contacts()  # type: ignore[attr-defined]  # the refresh after half a minute
            kept = [(path, path.read_bytes()) for directory in directories for path in directory.iterdir()]
            where = [peer.context.address for peer in peers]
    for path, content in kept:
        path.write_bytes(content)
    return where


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_machines_that_name_one_another_find_their_run_again_in_any_order(
    order: tuple[int, ...], run_file: Path, tmp_path: Path
) -> None:
    directories = [tmp_path / name for name in "abc"]

    async def scenario() -> None:
        where = await first_life(run_file, directories)
        lives = [serving("--join", where[(n + 1) % 3], "--state-dir", directories[n]) for n in order]
        async with lives[0] as first, lives[1] as second, lives[2] as third:
            peers = [first, second, third]
            assert {peer.context.config_bytes for peer in peers} == {CONFIG.to_bytes()}
            assert [peer.context.address for peer in peers] == [where[n] for n in order], "others knew it there"
            await until_all_meet(peers)

    asyncio.run(scenario())


def test_those_that_are_left_meet_though_the_machine_they_name_never_comes_back(
    run_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directories = [tmp_path / name for name in "abc"]

    async def scenario() -> None:
        gone = (await first_life(run_file, directories))[0]
        lives = [serving("--join", gone, "--state-dir", directory) for directory in directories[1:]]
        async with lives[0] as second, lives[1] as third:
            await until_all_meet([second, third])
        for directory in directories[1:]:  # also once more
            assert gone in ContactFile(directory / composing.CONTACTS_FILE).load(), "it may come back some day"
        with pytest.raises(ConfigError, match="nobody answers"):
            async with serving("--join", gone, "--state-dir", tmp_path / "new"):
                pass

    asyncio.run(scenario())
    said = [record.getMessage() for record in caplog.records]
    assert sum("going on with run" in line for line in said) == 1, "the second is told by the first"
    assert sum("another peer of the run does" in line for line in said) == 1


def test_a_port_of_an_earlier_life_that_is_taken_now_is_replaced(
    run_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        where = (await first_life(run_file, [tmp_path / name for name in "abc"]))[1]
        taken = bind_tcp_and_udp(*where)[:2]
        try:
            async with serving("--run", run_file, "--state-dir", tmp_path / "b") as peer:
                assert peer.context.address.port != where.port
        finally:
            for sock in taken:
                sock.close()

    asyncio.run(scenario())
    assert "others knew this peer at that port" in caplog.text


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"config": "{}"}', '{"config": "x", "port": 1, "seen_host": "", "way_out": "", "stage": 0}']
)
def test_a_file_that_keeps_nonsense_is_told_and_not_obeyed(
    content: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / KEPT_RUN_FILE).write_text(content)
    assert kept_run(tmp_path) is None
    assert "not heeded" in caplog.text


def test_what_is_kept_is_read_back(tmp_path: Path) -> None:
    kept = KeptRun(config=CONFIG.to_bytes().decode(), port=4000, seen_host="203.0.113.5", way_out="10.0.0.2", stage=1)
    kept.save(tmp_path)
    assert kept_run(tmp_path) == kept
    kept.save(tmp_path / "gone")  # one line in the log; the peer serves all the same


def test_a_mapped_port_is_what_others_are_told(run_file: Path) -> None:
    """In the peer's own entry, in its record and among the contacts; it listens at the port that it is mapped to."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    async def scenario() -> None:
        async with serving("--run", run_file, "--port", port, "--public-host", "203.0.113.5", "--public-port", 41234) as peer:
            public = Address("203.0.113.5", 41234)
            assert peer.context.transport.address.port == port
            assert peer.context.address == public
            assert peer.context.dht.contacts()[0] == public
            assert (peer.context.member().host, peer.context.member().port) == public
            joiner = serving("--join", peer.context.transport.address, "--state-dir", run_file.parent / "joiner")
            async with joiner:
                pass
            assert public in ContactFile(run_file.parent / "joiner" / composing.CONTACTS_FILE).load(), "for its next life"
        with pytest.raises(ConfigError, match=r"--public-port 41234: name the port of this machine .* with --port"):
            async with serving("--run", run_file, "--public-port", 41234):
                pass

    asyncio.run(scenario())
