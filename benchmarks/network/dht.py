"""The DHT measured: real nodes on loopback beside hivemind's, sudden deaths, bad networks, and growth to 1,000 nodes.

Prints one table and writes it with all figures to `benchmarks/results/dht.json` and `dht.png`. Takes a few minutes, uses
loopback addresses only, and ends by itself. hivemind is measured if its interpreter is named:

    python -m venv DIR && DIR/bin/pip install hivemind==1.1.12 "numpy<2"
    python -m benchmarks.network.dht --hivemind-python DIR/bin/python
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.network.dht_growth import measure_hops
from benchmarks.network.dht_loopback import measure_loopback
from benchmarks.network.dht_loss import measure_loss_datagrams, measure_loss_sockets, measure_loss_twin
from benchmarks.report import RESULTS, machine

COMMAND = "python -m benchmarks.network.dht --hivemind-python PYTHON_WITH_HIVEMIND"
#: Figures of hivemind 1.1.12, for when it is not measured here.
QUOTED_HIVEMIND = "store p50 17-27 ms, get p50 4-6 ms, a killed node still returned after 60 s (quoted)"


def measure_hivemind(python: str | None, num_nodes: int) -> dict[str, Any] | None:
    if python is None:
        return None
    done = subprocess.run(
        [python, "-W", "ignore", "-m", "benchmarks.network.dht_hivemind", str(num_nodes), "150"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None


def table(results: dict[str, Any]) -> list[tuple[str, str, str, bool]]:
    """(what, measured, required, holds) of each promise."""
    latency, deaths = results["loopback"]["latency"], results["loopback"]["half_killed"]
    measured_hiveminds = [one for one in results["hivemind"].values() if one is not None]
    store_ms = max([one["store_p50_ms"] for one in measured_hiveminds], default=17.0)
    get_ms = max([one["get_p50_ms"] for one in measured_hiveminds], default=4.0)
    rows = [
        (
            "1 publish, 64 nodes in 8 processes",
            f"p50 {latency['publish_p50_ms']:.1f} ms, p99 {latency['publish_p99_ms']:.1f} ms",
            f"p50 <= hivemind's {store_ms:.1f} ms",
            latency["publish_p50_ms"] <= store_ms,
        ),
        (
            "1 lookup, 64 nodes in 8 processes",
            f"p50 {latency['lookup_p50_ms']:.1f} ms, p99 {latency['lookup_p99_ms']:.1f} ms",
            f"p50 <= hivemind's {get_ms:.1f} ms",
            latency["lookup_p50_ms"] <= get_ms,
        ),
        ("1 success", f"{latency['success']:.1%} of {latency['operations']}", "100 %", latency["success"] == 1),
    ]
    for name, one in results["hivemind"].items():
        text = (
            QUOTED_HIVEMIND
            if one is None
            else (
                f"store p50 {one['store_p50_ms']:.1f} p99 {one['store_p99_ms']:.1f} ms, "
                f"get p50 {one['get_p50_ms']:.1f} p99 {one['get_p99_ms']:.1f} ms, success {one['success']:.1%}"
            )
        )
        rows.append((f"1 hivemind 1.1.12, {name} nodes", text, "for scale", True))
    hops = results["hops"]
    for one in hops:
        rows.append(
            (
                f"1 hops, {one['nodes']} nodes in virtual time",
                f"mean {one['hops_mean']:.2f}, max {one['hops_max']}, {one['questions_mean']:.0f} questions, "
                f"success {one['success']:.1%}",
                f"<= log2 n = {math.log2(one['nodes']):.1f}, all found",
                one["success"] == 1 and one["hops_max"] <= math.log2(one["nodes"]),
            )
        )
    grown = hops[-1]["hops_mean"] - hops[0]["hops_mean"]
    rows += [
        (
            "1 growth of mean hops",
            f"{grown:.2f} from {hops[0]['nodes']} to {hops[-1]['nodes']} nodes",
            "<= log2 of the growth in nodes",
            grown <= math.log2(hops[-1]["nodes"] / hops[0]["nodes"]),
        ),
        (
            "2 lookups after half were killed",
            f"p50 {deaths['lookup_p50_ms']:.1f} ms, p99 {deaths['lookup_p99_ms']:.0f} ms, "
            f"success {deaths['success']:.1%} of {deaths['lookups']}",
            "p99 < 2 s",
            deaths["lookup_p99_ms"] < 2000 and deaths["success"] == 1,
        ),
        (
            "2 a dead peer's record last returned",
            f"{deaths['dead_last_returned_s']:.1f} s after the kill, ttl {deaths['ttl_s']:.0f} s",
            "<= ttl + 2 s",
            deaths["dead_last_returned_s"] <= deaths["ttl_s"] + 2,
        ),
    ]
    for name, one in results["loss"].items():
        rows.append(
            (
                f"3 20 % loss each way, 10 % twice, reordered: {name}",
                f"{one['success']:.2%} of {one['lookups']} whole, p50 {one['lookup_p50_ms']:.0f} ms, "
                f"p99 {one['lookup_p99_ms']:.0f} ms",
                ">= 99.9 %",
                one["success"] >= 0.999,
            )
        )
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
    options = parser.parse_args()
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
