"""The layers of docs/design.md, checked on the syntax tree: imports point down only, and what must be absent is absent."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.source_trees import PRODUCT, ROOT, parse, product_files, relative

#: A layer imports itself and those before it.
LAYERS = ("base", "wire", "lifecycle", "policy", "net", "stage", "averaging", "feed", "peer")
#: Third-party packages that only `swarm/net` may know.
NETWORK_PACKAGES = {"aiohttp", "kademlia", "rpcudp", "umsgpack"}
TORCH_FREE_LAYERS = ("base", "lifecycle", "policy", "net", "feed")
TORCH_FREE_PEER_MODULES = (
    "announcing",
    "backbone",
    "context",
    "coordinator.coordinator",
    "coordinator.election",
    "hop",
    "joining",
    "link",
    "run_info",
    "trainer.trainer",
    "trainer.wiring",
)
#: Sides of `swarm/peer` that do not know one another: side -> the sides that it may import. What stands beside these
#: folders is shared by all, and imports none of them; but a backbone is put together there.
PEER_SIDES: dict[str, set[str]] = {"stage": set(), "coordinator": set(), "trainer": {"coordinator"}}
PEER_ROOTS = {"backbone"}
#: Folders of `launch`: folder -> those that it may import. The commands beside them import all.
LAUNCH_ROOMS: dict[str, set[str]] = {"processes": set(), "run": {"processes"}, "local_swarm": {"processes", "run"}}
#: Nothing that came over a wire may be unpickled or evaluated (promise 7).
UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
UNSAFE_CALLS = {"eval", "exec", "__import__"}
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "manager", "managers"}


def imported(tree: ast.AST, name: str = "") -> Iterator[tuple[int, str]]:
    """`(line, dotted module)` of every import, wherever it stands; `name` is the importing module's dotted name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                module = ".".join([*name.split(".")[: -node.level], *([module] if module else [])])
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"


def names_package(module: str, packages: set[str]) -> bool:
    return module.split(".")[0] in packages


def upward_imports(tree: ast.AST, name: str) -> list[str]:
    """What the module `name` of `swarm` imports though its layer may not."""
    own = name.split(".")[1]
    allowed = LAYERS[: LAYERS.index(own) + 1]
    wrong = []
    for line, module in imported(tree, name):
        parts = module.split(".")
        if parts[0] in ("models", "launch", "tests", "benchmarks"):
            wrong.append(f"{name}:{line} imports {module}; swarm knows no {parts[0]}")
        elif parts[0] == "swarm" and len(parts) > 1 and parts[1] not in allowed:
            wrong.append(f"{name}:{line} imports {module}; {own} may import only {', '.join(allowed)}")
    return wrong


def sideways_imports(tree: ast.AST, name: str, package: str, rooms: dict[str, set[str]], roots: set[str]) -> list[str]:
    """What a module of `package` imports from a folder of it that its own folder may not know."""
    inside = name.removeprefix(f"{package}.").split(".")
    if len(inside) == 1 and (package == "launch" or inside[0] in roots):
        return []
    own = inside[0] if len(inside) > 1 else ""
    allowed = {own, *rooms.get(own, set())}
    return [
        f"{name}:{line} imports {module}"
        for line, module in imported(tree, name)
        if module.startswith(f"{package}.")
        and (room := module.split(".")[package.count(".") + 1]) in rooms
        and room not in allowed
    ]


def reads_environment(tree: ast.AST) -> list[int]:
    wrong = []
    for node in ast.walk(tree):
        attribute = isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv", "putenv")
        name = (
            isinstance(node, ast.ImportFrom)
            and node.module == "os"
            and any(alias.name in ("environ", "environb", "getenv", "putenv") for alias in node.names)
        )
        if attribute or name:
            wrong.append(node.lineno)
    return wrong


def dotted_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts)


# ---------------------------------------------------------------------------------------------------- the checks


def test_every_layer_is_known() -> None:
    """A package that nobody put into the order would escape the checks below."""
    found = {path.name for path in (ROOT / "swarm").iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert found == {*LAYERS, "testing"}, "what serves tests imports what it likes, and nothing imports it"
    assert [p.name for p in (ROOT / "swarm").glob("*.py")] == ["__init__.py"]


def test_imports_point_down_only() -> None:
    wrong = [
        line
        for path in product_files("swarm")
        if path.parent != ROOT / "swarm"
        for line in upward_imports(parse(path), dotted_name(path))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("name", "source", "is_wrong"),
    [
        ("swarm.policy.x", "from swarm.net.http.transport import Client", True),
        ("swarm.policy.x", "from swarm import net", True),
        ("swarm.policy.x", "import swarm.peer.trainer.trainer as t", True),
        ("swarm.policy.x", "def f():\n    from swarm.stage import compute", True),
        ("swarm.policy.x", "from ..peer import trainer", True),
        ("swarm.peer.x", "from models.presets import tiny", True),
        ("swarm.peer.x", "import launch", True),
        ("swarm.policy.x", "from swarm.lifecycle.table import Table\nfrom swarm.policy import shares\nimport heapq", False),
        ("swarm.policy.x", "from . import shares", False),
        ("swarm.peer.x", "from swarm.feed.feed import Feed", False),
    ],
)
def test_the_check_sees_a_planted_import(name: str, source: str, is_wrong: bool) -> None:
    assert bool(upward_imports(ast.parse(source), name)) is is_wrong


@pytest.mark.parametrize(("package", "rooms", "roots"), [("swarm.peer", PEER_SIDES, PEER_ROOTS), ("launch", LAUNCH_ROOMS, set())])
def test_folders_keep_to_themselves(package: str, rooms: dict[str, set[str]], roots: set[str]) -> None:
    """Who serves a stage, who coordinates and who trains meet in messages only; processes know no run."""
    files = product_files(package.replace(".", "/"))
    wrong = [line for path in files for line in sideways_imports(parse(path), dotted_name(path), package, rooms, roots)]
    assert not wrong, "\n".join(wrong)
    planted = ast.parse("from swarm.peer.trainer.trainer import Trainer")
    assert sideways_imports(planted, "swarm.peer.stage.x", "swarm.peer", PEER_SIDES, PEER_ROOTS)
    assert sideways_imports(planted, "swarm.peer.link", "swarm.peer", PEER_SIDES, PEER_ROOTS)


def test_nothing_imports_what_serves_tests() -> None:
    wrong = [
        f"{relative(path)}:{line} imports {module}"
        for path in product_files()
        for line, module in imported(parse(path), dotted_name(path))
        if module.startswith("swarm.testing")
    ]
    assert not wrong, "\n".join(wrong)


def test_only_net_knows_aiohttp_and_kademlia() -> None:
    wrong = [
        f"{relative(path)}:{line} imports {module}"
        for path in product_files()
        if not path.is_relative_to(ROOT / "swarm" / "net")
        for line, module in imported(parse(path))
        if names_package(module, NETWORK_PACKAGES)
    ]
    assert not wrong, "\n".join(wrong)


def test_torch_is_imported_only_where_tensors_are() -> None:
    files = [path for layer in TORCH_FREE_LAYERS for path in product_files(f"swarm/{layer}")]
    names = (*TORCH_FREE_PEER_MODULES, "stage.membership")
    files += [ROOT / "swarm" / "peer" / f"{name.replace('.', '/')}.py" for name in names]
    wrong = [
        f"{relative(path)}:{line} imports {module}"
        for path in files
        for line, module in imported(parse(path))
        if names_package(module, {"torch", "bitsandbytes", "safetensors"})
    ]
    assert not wrong, "\n".join(wrong)


def without_torch(modules: list[str]) -> str:
    """The first of `modules` whose import, in a fresh interpreter, brings torch with it; empty if none does."""
    program = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules:\n"
        "        print(name)\n"
        "        break\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *modules], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_trainer_and_a_backbone_need_no_torch() -> None:
    """They run on machines without a GPU and must start in a moment: torch is not loaded, not even in passing."""
    modules = [dotted_name(path) for layer in TORCH_FREE_LAYERS for path in product_files(f"swarm/{layer}")]
    modules = [name for name in modules if not name.endswith("__init__")]
    modules += [f"swarm.peer.{name}" for name in TORCH_FREE_PEER_MODULES]
    culprit = without_torch(modules)
    assert not culprit, f"importing {culprit} loads torch"


def test_the_environment_is_read_in_launch_only() -> None:
    wrong = [f"{relative(path)}:{line}" for path in product_files("swarm", "models") for line in reads_environment(parse(path))]
    assert not wrong, f"os.environ outside launch/: {wrong}"
    assert reads_environment(ast.parse("import os\nx = os.environ['HOME']")) == [2]
    assert reads_environment(ast.parse("from os import getenv")) == [1]


def test_bytes_are_data() -> None:
    """No pickle, no evaluation: neither as an import nor as a call (promise 7)."""
    wrong = []
    for path in product_files():
        tree = parse(path)
        wrong += [
            f"{relative(path)}:{line} imports {module}"
            for line, module in imported(tree)
            if names_package(module, UNSAFE_MODULES)
        ]
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            if called in UNSAFE_CALLS or called == "torch.load" or "pickle" in called:
                wrong.append(f"{relative(path)}:{node.lineno} calls {called}")
    assert not wrong, "\n".join(wrong)


def test_no_module_has_a_vague_name() -> None:
    wrong = [relative(path) for path in product_files() if set(path.stem.split("_")) & VAGUE_NAMES]
    wrong += [relative(p) for package in PRODUCT for p in (ROOT / package).rglob("*") if p.is_dir() and p.name in VAGUE_NAMES]
    wrong += [
        f"{relative(path)}: class {node.name}"
        for path in product_files()
        for node in ast.walk(parse(path))
        if isinstance(node, ast.ClassDef) and node.name.endswith(("Manager", "Helper", "Utils"))
    ]
    assert not wrong, f"name the noun that it serves: {wrong}"
