"""From valid options to a `PeerContext`: the run, sockets, identity, address. Knows no role's behaviour, nor torch."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import shlex
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from setproctitle import setproctitle

from launch.options import PeerOptions
from launch.processes.logs import Announcer
from launch.processes.reports import Reports
from launch.processes.state_directory import claim_directory
from launch.run.kept_run import KeptRun, kept_run
from launch.run.left_open import LeftOpen, as_begun, epochs_of, filled, is_begun
from launch.run.run_files import DataPaths, RunFile, build_config, create_run, read_run_file, with_model
from swarm.base.config import RunConfig, parse_config_bytes
from swarm.base.errors import ConfigError, StorageError
from swarm.base.ids import Address, new_incarnation
from swarm.net.identity import Identity
from swarm.net.kademlia.contact_file import ContactFile
from swarm.net.kademlia.dht import KademliaDht
from swarm.net.ports import bind_tcp_and_udp
from swarm.net.transport import Transport
from swarm.net.transports import new_transport
from swarm.net.visitor import visiting
from swarm.peer.context import PeerContext
from swarm.peer.joining import Contacts, fetch_run, require_alone
from swarm.wire.messages import CommitRecord

IDENTITY_FILE = "identity.json"
CONTACTS_FILE = "contacts.json"
_WILDCARDS = ("", "0.0.0.0", "::")
logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class KnownRun:
    """A run's verbatim configuration, where to bootstrap from, and what the joined peer says of it and of us."""

    config_bytes: bytes
    paths: DataPaths = field(default_factory=DataPaths)
    bootstrap: tuple[Address, ...] = ()
    #: Address that the joined peer saw us come from.
    seen_host: str = ""
    #: The newest that the joined peer knows.
    record: CommitRecord | None = None

    @property
    def config(self) -> RunConfig:
        """The configuration, parsed."""
        return parse_config_bytes(self.config_bytes)


async def find_run(options: PeerOptions, transport: Transport, kept: KeptRun | None = None) -> KnownRun:
    """Create the run of `--run`, or fetch that of `--join`; where nobody answers, go on with the one that was `kept`.

    Raises:
        ConfigError: the file or its data is unusable; or nobody answers, and nothing is kept.
    """
    if options.join is not None:
        kept = None if options.again is not None and kept is not None and kept.run != options.again else kept
        try:
            info = await fetch_run(
                transport,
                options.join,
                run=options.again,
                contacts=_contacts(options.state_dir, kept),
                deadline_s=options.join_timeout,
            )
        except ConfigError as error:
            if kept is None:
                raise
            logger.warning("%s; going on with run %s, which %s keeps: others may come", error, kept.run[:12], options.state_dir)
            seen = kept.seen_host if kept.way_out == _way_out(options.host) else ""
            return KnownRun(config_bytes=kept.config.encode(), bootstrap=(options.join,), seen_host=seen)
        bootstrap = tuple(dict.fromkeys([options.join, *(Address(host, port) for host, port in info.contacts)]))
        run = KnownRun(config_bytes=info.config.encode(), bootstrap=bootstrap, seen_host=info.seen_host, record=info.record)
        _ = run.config  # refused here if this version does not understand it
        return run
    assert options.run is not None
    run_file = read_run_file(options.run)
    paths = run_file.paths.overridden_by(options)
    if run_file.config_bytes is not None:
        return KnownRun(config_bytes=run_file.config_bytes, paths=paths)
    config = _created(run_file, {} if options.model is None else {"model": options.model}, paths, kept)
    if config.frozen:
        from models.registry import factory_of

        factory_of(config)  # that there are such parameters is seen before anyone joins
    return KnownRun(config_bytes=config.to_bytes(), paths=paths)


def _created(run_file: RunFile, given: dict[str, Any], paths: DataPaths, kept: KeptRun | None) -> RunConfig:
    """The run of `run_file`; what it leaves open is as in the run that was `kept`, if that is the same one."""
    overrides, _ = with_model(given)
    epochs = epochs_of(run_file, overrides, None)
    if kept is not None:
        begun = build_config(run_file, as_begun(run_file, overrides, kept.config.encode()))
        if is_begun(begun, kept.config.encode(), epochs=epochs):
            return create_run(begun, paths, left_open=LeftOpen(epochs=epochs))
    overrides, left_open = filled(run_file, overrides, paths)
    config = create_run(build_config(run_file, overrides), paths, left_open=left_open)
    if told := left_open.told(config):
        logger.info("%s", told)
    return config


def _contacts(state_dir: Path | None, kept: KeptRun | None) -> Contacts | None:
    if state_dir is None or kept is None:
        return None
    return Contacts(run=kept.run, addresses=ContactFile(state_dir / CONTACTS_FILE).load())


def _note_contacts(state_dir: Path, told: Sequence[Address]) -> None:
    """Beside those that the DHT meets: what peers say of themselves, which differs where ports are mapped."""
    file = ContactFile(state_dir / CONTACTS_FILE)
    with contextlib.suppress(StorageError):  # the DHT says that it cannot be written
        file.save(list(dict.fromkeys([*told, *file.load()])))


async def compose(options: PeerOptions, *, max_inflight_bytes: int) -> tuple[PeerContext, KnownRun]:
    """Bind the port, find the run, load the identity. Nothing is served yet.

    Raises:
        ConfigError: the address is taken, nobody answers, or the state directory is unusable, in use, or a copy of one
            in use.
    """
    if options.public_port and not options.port:
        raise ConfigError(f"--public-port {options.public_port}: name the port of this machine that it is mapped to with --port")
    state_dir: Path | None = options.state_dir
    is_claimed, kept = await asyncio.to_thread(_taken_up, state_dir)
    tcp, udp, port = _bind(options.host, options.port, kept)
    try:
        async with visiting() as asker:
            run = await find_run(options, asker, kept)
            if state_dir is not None and not is_claimed:
                await asyncio.to_thread(claim_directory, state_dir)
            if state_dir is not None:
                _note_contacts(state_dir, run.bootstrap)
            identity = _identity(state_dir)
            timing = run.config.timing
            advertise_host = options.public_host or _reachable_host(options.host, run.seen_host)
            own = Address(advertise_host, options.public_port or port)
            await require_alone(asker, identity.peer_id, run.record, own=own, deadline_s=timing.request_s / 2)
    except BaseException:
        tcp.close()
        udp.close()
        raise
    context = PeerContext(
        config=run.config,
        config_bytes=run.config_bytes,
        identity=identity,
        incarnation=new_incarnation(random.SystemRandom()),
        transport=new_transport(
            host=options.host,
            sock=tcp,
            connect_s=timing.connect_s,
            heartbeat_s=timing.heartbeat_s,
            max_inflight_bytes=max_inflight_bytes,
        ),
        dht=KademliaDht(
            identity=identity,
            sock=udp,
            advertise_host=advertise_host,
            advertise_port=options.public_port,
            contacts_path=None if state_dir is None else state_dir / CONTACTS_FILE,
        ),
        rng=random.Random(random.SystemRandom().getrandbits(64)),
        advertise_host=advertise_host,
        advertise_port=options.public_port,
        bootstrap=run.bootstrap,
        state_dir=state_dir,
    )
    return context, run


def _taken_up(state_dir: Path | None) -> tuple[bool, KeptRun | None]:
    """Whether `state_dir` is there, and then claimed; and what it keeps. One that is not there is made once a run is found."""
    if state_dir is None or not state_dir.is_dir():
        return False, None
    claim_directory(state_dir)
    return True, kept_run(state_dir)


def _bind(host: str, port: int, kept: KeptRun | None) -> tuple[socket.socket, socket.socket, int]:
    """Where no port is asked for, the one of this peer's last life, if it is free: others know it there."""
    if not port and kept is not None:
        try:
            return bind_tcp_and_udp(host, kept.port)
        except ConfigError as error:
            logger.warning("%s: others knew this peer at that port; taking another", error)
    return bind_tcp_and_udp(host, port)


def _identity(state_dir: Path | None) -> Identity:
    if state_dir is None:
        return Identity.ephemeral(random.SystemRandom())
    return Identity.load_or_create(state_dir / IDENTITY_FILE)


def _reachable_host(host: str, seen_host: str) -> str:
    """The address others reach us at: the one we listen at, else how the joined peer sees us, else our way out."""
    if host not in _WILDCARDS:
        return host
    if seen_host and not seen_host.startswith("127.") and seen_host != "::1":
        return seen_host
    return _way_out(host)


def _way_out(host: str) -> str:
    """The own address that a packet to anywhere would leave from."""
    family, somewhere = (socket.AF_INET6, "2001:db8::1") if ":" in host else (socket.AF_INET, "192.0.2.1")
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((somewhere, 9))  # sends nothing: only asks the kernel which interface it would use
            return str(probe.getsockname()[0])
        except OSError:
            return "::1" if ":" in host else "127.0.0.1"


def announce(
    program: str,
    argv: Sequence[str],
    context: PeerContext,
    run: KnownRun,
    what: str,
    announcer: Announcer,
    reports: Reports,
    *,
    fixed: Sequence[str] = (),
    stage: int = -1,
) -> None:
    """Tell everyone who waits that this peer is up: the process list, the terminal, the parent, and its own next life.

    `fixed` are options as they were chosen, for a parent that starts this program again; `stage` is the one served, if any.
    """
    port, where = context.transport.address.port, context.address
    retitle(program, argv, port)
    if context.state_dir is not None:
        KeptRun(
            config=context.config_bytes.decode(),
            port=port,
            seen_host=run.seen_host,
            way_out=_way_out(context.transport.address.host),
            stage=stage,
        ).save(context.state_dir)
    announcer.say(f"serving {what} of run {context.run[:12]} at {where}", run=context.run, address=str(where))
    reports.send("serving", what=what, run=context.run, host=where.host, port=port, fixed=list(fixed))


def retitle(program: str, argv: Sequence[str], port: int) -> None:
    """Show the launcher's full command line, with the port it got, to `ps` and `pgrep -f`."""
    words = list(argv)
    if "--port" in words:
        words[words.index("--port") + 1] = str(port)
    else:
        words += ["--port", str(port)]
    setproctitle(f"{program} {shlex.join(words)}")
