"""The DHT measured: real nodes on loopback beside hivemind's, sudden deaths, bad networks, and growth to 1,000 nodes.

Prints one table and writes it with all figures to `benchmarks/results/dht.json` and `dht.png`. Takes a few minutes, uses
loopback addresses only, and ends by itself. hivemind is measured if its interpreter is named:

    python -m venv DIR && DIR/bin/pip install hivemind==1.1.12 "numpy<2"
    python benchmarks/dht.py --hivemind-python DIR/bin/python
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from swarm.base.ids import Address
from swarm.base.virtual_time import run_virtual
from swarm.net.dht import Dht
from swarm.net.identity import Identity
from swarm.net.kademlia_dht import KademliaDht
from swarm.net.lossy_udp import LossyUdp
from swarm.net.memory_datagrams import DatagramLoop
from swarm.net.memory_dht import MemoryDht, MemoryDhtNetwork
from swarm.wire.records import PeerRecord, SignedRecord

RESULTS = Path(__file__).parent / "results"
COMMAND = "python benchmarks/dht.py --hivemind-python PYTHON_WITH_HIVEMIND"
NUM_PROCESSES, NODES_PER_PROCESS = 8, 8
NUM_KEYS = 16
TTL_S = 9.0
#: hivemind 1.1.12 as the issue quotes it, for when it is not measured here.
QUOTED_HIVEMIND = "store p50 17-27 ms, get p50 4-6 ms, a killed node still returned after 60 s (quoted)"


def key_of(index: int) -> str:
    return f"{'b' * 64}/stage/{index % NUM_KEYS}"


def signed(identity: Identity, key: str, ttl_s: float) -> SignedRecord:
    return identity.sign_record(key, PeerRecord(
        peer=identity.peer_id, incarnation="0" * 16, role="stage", host="127.0.0.1", port=4000, ttl_s=ttl_s,
        sequence=identity.next_sequence(), stage=1, step=1000, state="serving",
    ))  # fmt: skip


def percentile(values: list[float], q: float) -> float:
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]


# ---------------------------------------------------------------- 64 real nodes in 8 processes


async def work(first_seed: int) -> None:
    """A worker: its nodes renew their records and do what lines of JSON on stdin ask for; ends with stdin."""
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader(limit=1 << 20)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    identities = [Identity.ephemeral(random.Random(first_seed + i)) for i in range(NODES_PER_PROCESS)]
    nodes = [KademliaDht(identity=identity) for identity in identities]
    renewals: list[asyncio.Task[None]] = []

    async def renew(index: int) -> None:
        while True:
            key = key_of(first_seed + index)
            await nodes[index].publish(key, signed(identities[index], key, TTL_S))
            await asyncio.sleep(TTL_S / 3)

    async def do(request: dict[str, Any]) -> Any:
        name = request["do"]
        if name == "start":
            for node in nodes:
                first = request["port"] or (node is not nodes[0] and nodes[0].address.port)
                await node.start([Address("127.0.0.1", first)] if first else [])
            return {"port": nodes[0].address.port, "peers": [identity.peer_id for identity in identities]}
        if name == "renew":
            renewals.extend(loop.create_task(renew(index)) for index in range(NODES_PER_PROCESS))
            return {}
        if name == "statistics":
            return [node.statistics() for node in nodes]
        node, identity = nodes[request["node"]], identities[request["node"]]
        if name == "publish":
            record = signed(identity, request["key"], 60.0)
            started = time.perf_counter()
            held = await node.publish(request["key"], record)
            return {"ms": (time.perf_counter() - started) * 1e3, "held": held}
        started = time.perf_counter()
        found = await node.lookup(request["key"])
        return {"ms": (time.perf_counter() - started) * 1e3, "peers": {r.peer: r.sequence for r in found}}

    while line := await lines.readline():
        print(json.dumps(await do(json.loads(line))), flush=True)
    for task in renewals:
        task.cancel()
    await asyncio.gather(*renewals, return_exceptions=True)
    await asyncio.gather(*(node.close() for node in nodes))


class Worker:
    def __init__(self, index: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker", str(index * NODES_PER_PROCESS)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )

    def ask(self, **request: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()


def measure_loopback() -> dict[str, Any]:
    """Publish and lookup among 64 nodes, then half of them killed at once."""
    rng = random.Random(6)
    workers = [Worker(index) for index in range(NUM_PROCESSES)]
    try:
        port = 0
        peers: list[list[str]] = []
        for worker in workers:
            reply = worker.ask(do="start", port=port)
            port = port or reply["port"]
            peers.append(reply["peers"])
        for worker in workers:
            worker.ask(do="renew")
        time.sleep(8)  # joining 64 nodes at once is a storm, and what is measured is the weather after it
        result = {"latency": _measure_latency(workers, rng)}
        result["half_killed"] = _measure_deaths(workers, peers, rng)
        return result
    finally:
        for worker in workers:
            worker.close()


def _measure_latency(workers: list[Worker], rng: random.Random) -> dict[str, Any]:
    publish_ms, lookup_ms, found = [], [], 0
    num_operations = 500
    for index in range(num_operations):
        key = f"latency {index}"
        publisher = rng.choice(workers).ask(do="publish", node=rng.randrange(NODES_PER_PROCESS), key=key)
        reader = rng.choice(workers).ask(do="lookup", node=rng.randrange(NODES_PER_PROCESS), key=key)
        publish_ms.append(publisher["ms"])
        lookup_ms.append(reader["ms"])
        found += len(reader["peers"]) == 1 and publisher["held"] >= 8
    return {
        "nodes": NUM_PROCESSES * NODES_PER_PROCESS, "operations": num_operations, "success": found / num_operations,
        "publish_p50_ms": statistics.median(publish_ms), "publish_p99_ms": percentile(publish_ms, 0.99),
        "lookup_p50_ms": statistics.median(lookup_ms), "lookup_p99_ms": percentile(lookup_ms, 0.99),
        "lookup_ms": lookup_ms, "publish_ms": publish_ms,
    }


def _measure_deaths(workers: list[Worker], peers: list[list[str]], rng: random.Random) -> dict[str, Any]:
    """SIGKILL every second process, then look for 1.6 lives of a record what the survivors are told."""
    victims = workers[1::2]
    survivors = workers[::2]
    living = {peer for group in peers[::2] for peer in group}
    members: dict[str, set[str]] = {}
    for index, peer in enumerate(peer for group in peers for peer in group):
        members.setdefault(key_of(index), set()).add(peer)
    killed_at = time.monotonic()
    for victim in victims:
        victim.process.kill()
    for victim in victims:
        victim.process.wait()
    lookup_ms: list[float] = []
    complete, last_dead_s, num_dead_returned = 0, 0.0, 0
    first_lookups_ms: list[float] = []
    while (now := time.monotonic() - killed_at) < 1.6 * TTL_S:
        key = key_of(rng.randrange(NUM_KEYS))
        reply = rng.choice(survivors).ask(do="lookup", node=rng.randrange(NODES_PER_PROCESS), key=key)
        lookup_ms.append(reply["ms"])
        if now < 2:
            first_lookups_ms.append(reply["ms"])
        complete += members[key] & living <= set(reply["peers"])
        if set(reply["peers"]) - living:
            num_dead_returned += 1
            last_dead_s = time.monotonic() - killed_at
        time.sleep(0.01)
    return {
        "lookups": len(lookup_ms), "success": complete / len(lookup_ms),
        "lookup_p50_ms": statistics.median(lookup_ms), "lookup_p99_ms": percentile(lookup_ms, 0.99),
        "lookup_max_ms": max(lookup_ms), "first_2s_p50_ms": statistics.median(first_lookups_ms),
        "ttl_s": TTL_S, "dead_last_returned_s": last_dead_s, "lookups_with_dead": num_dead_returned,
    }


# ---------------------------------------------------------------- virtual time


def on_datagrams(main: Callable[[DatagramLoop], Coroutine[Any, Any, Any]], **links: Any) -> Any:
    loop = DatagramLoop(random.Random(5), **links)
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        result = runner.run(main(loop))
    assert not loop.failures, loop.failures
    return result


async def spawn(loop: DatagramLoop, num_nodes: int, **options: Any) -> list[tuple[Identity, KademliaDht]]:
    """Nodes that each joined through a random earlier one."""
    rng = random.Random(num_nodes)
    spawned: list[tuple[Identity, KademliaDht]] = []
    for _ in range(num_nodes):
        identity = Identity.ephemeral(rng)
        node = KademliaDht(identity=identity, sock=loop.bound_socket(), **options)
        await node.start([rng.choice(spawned)[1].address] if spawned else [])
        spawned.append((identity, node))
    return spawned


async def close(spawned: list[tuple[Identity, Any]]) -> None:
    for _, node in spawned:
        await node.close()


def measure_hops(num_nodes: int, num_lookups: int = 150) -> dict[str, Any]:
    """The real node code in virtual time: questions in a row until the nearest node has answered."""

    async def main(loop: DatagramLoop) -> dict[str, Any]:
        spawned = await spawn(loop, num_nodes, refresh_s=3600.0)
        rng = random.Random(1)
        hops, questions, milliseconds, found = [], [], [], 0
        for index in range(num_lookups):
            key = f"hops {index}"
            identity, writer = rng.choice(spawned)
            await writer.publish(key, signed(identity, key, 600.0))
            _, reader = rng.choice(spawned)
            before, started = reader.statistics(), loop.time()
            found += len(await reader.lookup(key)) == 1
            after = reader.statistics()
            milliseconds.append((loop.time() - started) * 1e3)
            hops.append(after["crawl_hops"] - before.get("crawl_hops", 0))
            questions.append(after["asked_find_value"] - before.get("asked_find_value", 0))
        contacts = [node.statistics()["contacts"] for _, node in spawned]
        await close(spawned)
        return {
            "nodes": num_nodes, "lookups": num_lookups, "success": found / num_lookups,
            "hops_mean": statistics.mean(hops), "hops_max": max(hops), "questions_mean": statistics.mean(questions),
            "lookup_p50_virtual_ms": statistics.median(milliseconds), "contacts_mean": statistics.mean(contacts),
        }

    return on_datagrams(main)


def measure_sampling(num_peers: int = 500, num_samples: int = 2000, size: int = 20) -> dict[str, Any]:
    """How evenly samples of a big stage show its peers, and how long the datagrams are."""

    async def main(loop: DatagramLoop) -> dict[str, Any]:
        spawned = await spawn(loop, 24, refresh_s=3600.0)
        rng = random.Random(2)
        key = key_of(0)
        for _ in range(num_peers):
            identity = Identity.ephemeral(rng)
            await rng.choice(spawned)[1].publish(key, signed(identity, key, 3600.0))
        seen: dict[str, int] = {}
        sizes_before = {address: len(one.sent_sizes) for address, one in loop.endpoints.items()}
        short = 0
        for _ in range(num_samples):
            sample = await rng.choice(spawned)[1].lookup(key, sample=size)
            short += len({record.peer for record in sample}) != size
            for record in sample:
                seen[record.peer] = seen.get(record.peer, 0) + 1
        sizes = [n for address, one in loop.endpoints.items() for n in one.sent_sizes[sizes_before[address] :]]
        await close(spawned)
        expected = num_samples * size / num_peers
        return {
            "peers": num_peers, "samples": num_samples, "size": size, "short_samples": short, "peers_seen": len(seen),
            "least_over_expected": min(seen.values()) / expected, "most_over_expected": max(seen.values()) / expected,
            "longest_datagram": max(sizes), "datagrams_per_sample": len(sizes) / num_samples,
        }

    return on_datagrams(main)


# ---------------------------------------------------------------- bad networks

LOSS = {"drop": 0.2, "duplicate": 0.1}


async def _lookups_under_loss(
    spawned: list[tuple[Identity, Any]], num_lookups: int, at_once: int, now: Callable[[], float]
) -> dict[str, Any]:
    """A lookup succeeds if it returns every peer under its key."""
    rng = random.Random(3)
    members: dict[str, set[str]] = {}

    async def publish(index: int, identity: Identity, node: Dht) -> None:
        await node.publish(key_of(index), signed(identity, key_of(index), 3600.0))
        members.setdefault(key_of(index), set()).add(identity.peer_id)

    for index, (identity, node) in enumerate(spawned):
        await publish(index, identity, node)

    async def look(_: int) -> tuple[bool, float]:
        key, started = rng.choice(list(members)), now()
        found = await rng.choice(spawned)[1].lookup(key)
        return {record.peer for record in found} == members[key], (now() - started) * 1e3

    outcomes: list[tuple[bool, float]] = []
    while len(outcomes) < num_lookups:
        outcomes += await asyncio.gather(*(look(index) for index in range(at_once)))
    lookup_ms = [ms for _, ms in outcomes]
    return {
        "nodes": len(spawned), "lookups": len(outcomes), "success": sum(ok for ok, _ in outcomes) / len(outcomes),
        "lookup_p50_ms": statistics.median(lookup_ms), "lookup_p99_ms": percentile(lookup_ms, 0.99),
    }


def measure_loss_datagrams() -> dict[str, Any]:
    async def main(loop: DatagramLoop) -> dict[str, Any]:
        spawned = await spawn(loop, 32)
        result = await _lookups_under_loss(spawned, 1000, 1, loop.time)
        await close(spawned)
        return result

    return on_datagrams(main, latency_s=(0.001, 0.05), **LOSS)


def measure_loss_twin() -> dict[str, Any]:
    async def main() -> dict[str, Any]:
        rng = random.Random(4)
        network = MemoryDhtNetwork(rng, latency_s=(0.001, 0.05), **LOSS)
        spawned = []
        for index in range(32):
            identity = Identity.ephemeral(rng)
            node = MemoryDht(network, identity=identity, address=Address("10.0.0.1", 1 + index))
            await node.start([Address("10.0.0.1", 1)] if index else [])
            spawned.append((identity, node))
        await asyncio.sleep(60)
        result = await _lookups_under_loss(spawned, 1000, 1, asyncio.get_running_loop().time)
        await close(spawned)
        return result

    return run_virtual(main())


def measure_loss_sockets() -> dict[str, Any]:
    async def main() -> dict[str, Any]:
        network = LossyUdp(random.Random(4), delay_s=0.02, **LOSS)
        rng = random.Random(8)
        spawned = []
        public: list[Address] = []
        for _ in range(16):
            identity = Identity.ephemeral(rng)
            sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            sock.setblocking(False)
            sock.bind(("127.0.0.1", 0))
            public.append(await network.public_address_of(Address(*sock.getsockname())))
            node = KademliaDht(identity=identity, sock=sock)
            await node.start(public[:1] if len(public) > 1 else [])
            spawned.append((identity, node))
        await asyncio.sleep(2)
        result = await _lookups_under_loss(spawned, 1000, 10, time.monotonic)
        result["datagrams_lost"] = network.num_dropped / (network.num_dropped + network.num_passed)
        await close(spawned)
        network.close()
        return result

    return asyncio.run(main())


# ---------------------------------------------------------------- the table


def measure_hivemind(python: str | None, num_nodes: int) -> dict[str, Any] | None:
    if python is None:
        return None
    done = subprocess.run(
        [python, "-W", "ignore", str(Path(__file__).with_name("dht_hivemind.py")), str(num_nodes), "150"],
        capture_output=True, text=True, timeout=120, check=False,
    )
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None


def table(results: dict[str, Any]) -> list[tuple[str, str, str, bool]]:
    """(what, measured, required, holds) of each promise."""
    latency, deaths = results["loopback"]["latency"], results["loopback"]["half_killed"]
    measured_hiveminds = [one for one in results["hivemind"].values() if one is not None]
    store_ms = max([one["store_p50_ms"] for one in measured_hiveminds], default=17.0)
    get_ms = max([one["get_p50_ms"] for one in measured_hiveminds], default=4.0)
    rows = [(
        "1 publish, 64 nodes in 8 processes", f"p50 {latency['publish_p50_ms']:.1f} ms, p99 {latency['publish_p99_ms']:.1f} ms",
        f"p50 <= hivemind's {store_ms:.1f} ms", latency["publish_p50_ms"] <= store_ms,
    ), (
        "1 lookup, 64 nodes in 8 processes", f"p50 {latency['lookup_p50_ms']:.1f} ms, p99 {latency['lookup_p99_ms']:.1f} ms",
        f"p50 <= hivemind's {get_ms:.1f} ms", latency["lookup_p50_ms"] <= get_ms,
    ), (
        "1 success", f"{latency['success']:.1%} of {latency['operations']}", "100 %", latency["success"] == 1,
    )]
    for name, one in results["hivemind"].items():
        text = QUOTED_HIVEMIND if one is None else (
            f"store p50 {one['store_p50_ms']:.1f} p99 {one['store_p99_ms']:.1f} ms, "
            f"get p50 {one['get_p50_ms']:.1f} p99 {one['get_p99_ms']:.1f} ms, success {one['success']:.1%}"
        )
        rows.append((f"1 hivemind 1.1.12, {name} nodes", text, "for scale", True))
    hops = results["hops"]
    for one in hops:
        rows.append((
            f"1 hops, {one['nodes']} nodes in virtual time",
            f"mean {one['hops_mean']:.2f}, max {one['hops_max']}, {one['questions_mean']:.0f} questions, "
            f"success {one['success']:.1%}",
            f"<= log2 n = {math.log2(one['nodes']):.1f}, all found",
            one["success"] == 1 and one["hops_max"] <= math.log2(one["nodes"]),
        ))
    grown = hops[-1]["hops_mean"] - hops[0]["hops_mean"]
    rows += [(
        "1 growth of mean hops", f"{grown:.2f} from {hops[0]['nodes']} to {hops[-1]['nodes']} nodes",
        "<= log2 of the growth in nodes", grown <= math.log2(hops[-1]["nodes"] / hops[0]["nodes"]),
    ), (
        "2 lookups after half were killed",
        f"p50 {deaths['lookup_p50_ms']:.1f} ms, p99 {deaths['lookup_p99_ms']:.0f} ms, "
        f"success {deaths['success']:.1%} of {deaths['lookups']}",
        "p99 < 2 s", deaths["lookup_p99_ms"] < 2000 and deaths["success"] == 1,
    ), (
        "2 a dead peer's record last returned",
        f"{deaths['dead_last_returned_s']:.1f} s after the kill, ttl {deaths['ttl_s']:.0f} s",
        "<= ttl + 2 s", deaths["dead_last_returned_s"] <= deaths["ttl_s"] + 2,
    )]
    sampling = results["sampling"]
    rows.append((
        f"3 {sampling['samples']} samples of {sampling['size']} of {sampling['peers']} peers",
        f"{sampling['least_over_expected']:.2f} to {sampling['most_over_expected']:.2f} of even, longest datagram "
        f"{sampling['longest_datagram']} bytes",
        "0.5 to 2, < 1,400 bytes", sampling["least_over_expected"] >= 0.5 and sampling["most_over_expected"] <= 2
        and sampling["longest_datagram"] < 1400 and not sampling["short_samples"],
    ))
    for name, one in results["loss"].items():
        rows.append((
            f"6 20 % loss each way, 10 % twice, reordered: {name}",
            f"{one['success']:.2%} of {one['lookups']} whole, p50 {one['lookup_p50_ms']:.0f} ms, "
            f"p99 {one['lookup_p99_ms']:.0f} ms",
            ">= 99.9 %", one["success"] >= 0.999,
        ))
    return rows


def plot(results: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    latency = results["loopback"]["latency"]
    for name, style in (("publish_ms", "-"), ("lookup_ms", "--")):
        values = sorted(latency[name])
        left.plot(values, [(index + 1) / len(values) for index in range(len(values))], style, label=f"{name[:-3]}, 64 nodes")
    for nodes, one in results["hivemind"].items():
        if one is not None:
            left.axvline(one["store_p50_ms"], color="grey", linestyle=":", label=f"hivemind store p50, {nodes} nodes")
    left.set(xscale="log", xlabel="milliseconds", ylabel="share of operations", title="Loopback, 8 processes")
    left.legend(fontsize=8)
    nodes = [one["nodes"] for one in results["hops"]]
    right.plot(nodes, [one["hops_mean"] for one in results["hops"]], "o-", label="mean hops")
    right.plot(nodes, [one["hops_max"] for one in results["hops"]], "s:", label="most hops")
    right.set(xscale="log", xlabel="nodes", ylabel="questions in a row", title="Hops, virtual time", xticks=nodes, ylim=(0, None))
    right.set_xticklabels([str(one) for one in nodes])
    right.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hivemind-python", help="interpreter that has hivemind 1.1.12; without it figures are quoted")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        asyncio.run(work(options.worker))
        return 0
    from report import machine  # imports torch, which the workers do without

    started = time.monotonic()
    results: dict[str, Any] = {"command": COMMAND, "facts": machine()}

    def measure(what: str, function: Callable[[], Any]) -> Any:
        since = time.monotonic()
        result = function()
        print(f"measured {what} in {time.monotonic() - since:.0f} s", file=sys.stderr, flush=True)
        return result

    results["loopback"] = measure("64 nodes on loopback", measure_loopback)
    results["hivemind"] = {
        str(n): measure(f"hivemind, {n} nodes", lambda n=n: measure_hivemind(options.hivemind_python, n)) for n in (16, 32)
    }
    results["hops"] = [measure(f"hops, {n} nodes", lambda n=n: measure_hops(n)) for n in (16, 64, 256, 1000)]
    results["sampling"] = measure("samples", measure_sampling)
    results["loss"] = {
        "real code, virtual time": measure("loss, virtual time", measure_loss_datagrams),
        "in-memory twin": measure("loss, twin", measure_loss_twin),
        "UDP sockets through a proxy": measure("loss, sockets", measure_loss_sockets),
    }
    results["seconds"] = time.monotonic() - started
    rows = table(results)
    results["table"] = [dict(zip(("what", "measured", "required", "holds"), row, strict=True)) for row in rows]
    widths = [max(len(str(row[column])) for row in rows) for column in range(3)]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=False)), "yes" if row[3] else "NO")
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "dht.json").write_text(json.dumps(results, indent=1) + "\n")
    plot(results, RESULTS / "dht.png")
    print(f"\n{results['seconds']:.0f} s on {results['facts']['cores']} cores; reproduce with: {COMMAND}")
    return 0 if all(row[3] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
