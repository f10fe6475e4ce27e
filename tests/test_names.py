"""Names, sizes and sentences: retired words stay away, files and folders stay small, and objects keep their attributes to
themselves."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator

import pytest

from tests.source_trees import ROOT, files_for_tests, parse, product_files, relative

#: Words that say nothing, or that mean something else to a reader of Raft, PyTorch or Kademlia. No name has one in it.
RETIRED_WORDS = {
    *("seat", "reign", "tries", "passes", "listing", "milestone", "bare", "struck", "heed", "doubt", "lent", "patience"),
    *("recipe", "stranger", "vigil", "stash", "helper"),
}
#: Names of classes that said too little. As a part of a longer name, or in small letters, the same words are the field's.
RETIRED_CLASSES = {"Term", "Head", "Average", "Told", "Worked", "Places", "Tail", "Key", "Part"}
MAX_LINES = 400
MAX_FILES = 20
#: The whole protocol is one file on purpose.
LONG_FILES = {"swarm/wire/messages.py"}
#: Attributes of other libraries' objects that are set here, because these libraries offer no other way: file -> writes.
LIBRARY_WRITES = {
    "launch/options.py": {"setattr(namespace, self.dest, {**getattr(namespace, self.dest), self.const: values})"},
    "models/boundary.py": {"base.project_per_layer_inputs", "base.get_per_layer_inputs"},
    "models/causal_lm.py": {
        "stage.get_parameter(name).data",
        "parameter.data",
        "setattr(stage.get_submodule(parent), attribute, present[owner])",
    },
    "models/cut.py": {"setattr(base, name, _absent(getattr(base, name)))", "module.draws_at_random"},
    "models/lora.py": {
        "config.inference_mode",
        "setattr(module.get_submodule(parent), attribute, QuantizedLinear(linear, bits))",
    },
    "models/loss.py": {"setattr(lm, base_name, self._given)"},
    "models/masks.py": {"masking_utils.find_packed_sequence_indices", "masking_utils.is_tracing"},
    "models/quantized.py": {"torch.compile", "ctx.layer"},
    "swarm/feed/order.py": {"order.flags.writeable"},
    "swarm/net/http/server.py": {"self.response.content_length"},
    "swarm/stage/compute.py": {"block.forward"},
    "swarm/stage/gpu/graphs.py": {"warnings.showwarning"},
    "swarm/stage/module.py": {"setattr(child, name, made[parameter])"},
}


def words_of(name: str) -> set[str]:
    """The words of a snake_case or CamelCase name, in small letters."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)}


def retired_names(source: str, stem: str) -> set[str]:
    """Names in the code, and the file's own, that are retired or have a retired word in them. Comments and strings may."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    names = {token.string for token in tokens if token.type == tokenize.NAME} | {stem}
    return {name for name in names if name in RETIRED_CLASSES or words_of(name) & RETIRED_WORDS}


def test_no_retired_name_is_left() -> None:
    found = {relative(path): retired_names(path.read_text(), path.stem) for path in product_files()}
    wrong = [f"{path}: {', '.join(sorted(names))}" for path, names in found.items() if names]
    assert not wrong, "\n".join(wrong)


def test_the_check_of_names_sees_a_planted_one() -> None:
    assert retired_names("class Head: pass\nnum_tries = TailStash = head = 1  # seat", "vigil") == {
        "Head",
        "num_tries",
        "TailStash",
        "vigil",
    }


def test_no_name_of_the_product_stands_for_two_classes() -> None:
    """A name that a reader meets in two modules means one thing."""
    where: dict[str, list[str]] = {}
    for path in product_files():
        for node in parse(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where.setdefault(node.name, []).append(relative(path))
    wrong = [f"{name}: {', '.join(paths)}" for name, paths in sorted(where.items()) if len(paths) > 1]
    assert not wrong, "\n".join(wrong)


def test_no_module_is_long() -> None:
    paths = [*product_files(), *files_for_tests(), *(ROOT / "benchmarks").rglob("*.py")]
    wrong = [f"{relative(p)}: {n} lines" for p in paths if (n := p.read_text().count("\n")) > MAX_LINES]
    assert {line.partition(":")[0] for line in wrong} <= LONG_FILES, "\n".join(wrong)


@pytest.mark.parametrize("top", ["swarm", "models", "launch", "tests", "benchmarks"])
def test_no_folder_is_crowded(top: str) -> None:
    folders = {path.parent for path in (ROOT / top).rglob("*.py")}
    crowded = {relative(f): n for f in folders if (n := len([p for p in f.glob("*.py") if p.name != "__init__.py"])) > MAX_FILES}
    assert not crowded, crowded


def attributes_of(tree: ast.Module) -> set[str]:
    """Every attribute that a class of this file declares, or sets on itself."""
    own: set[str] = set()
    for cls in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        for node in cls.body:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
            own.update(target.id for target in targets if isinstance(target, ast.Name))
        own.update(node.attr for node in ast.walk(cls) if is_written(node) and is_own(node.value))
    return own


def is_written(node: ast.AST) -> bool:
    """Whether `node` is an attribute that is assigned or deleted."""
    return isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del)


def is_own(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def foreign_writes(tree: ast.Module) -> list[tuple[int, str]]:
    """`(line, text)` of every assignment to an attribute of an object whose class is in another file, and of `setattr`."""
    own = attributes_of(tree)
    wrong = []
    for node in ast.walk(tree):
        named = is_written(node) and not is_own(node.value) and node.attr not in own
        computed = isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr") and not is_own(node.args[0])
        if named or computed:
            wrong.append((node.lineno, ast.unparse(node)))
    return wrong


def test_nobody_writes_another_objects_attributes() -> None:
    """Who changes an object asks it to change: a method has a name, a docstring and one place to look."""
    wrong = [
        f"{relative(path)}:{line} {text}"
        for path in product_files()
        for line, text in foreign_writes(parse(path))
        if text not in LIBRARY_WRITES.get(relative(path), ())
    ]
    assert not wrong, "\n".join(wrong)


def test_every_listed_write_to_a_library_is_there() -> None:
    for name, texts in LIBRARY_WRITES.items():
        assert texts <= {text for _, text in foreign_writes(parse(ROOT / name))}, f"{name}: take out what is not written any more"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("class A:\n    x: int\n\ndef f(a, b):\n    a.x = 1\n    b.y = 2\n", [(6, "b.y")]),
        ("class A:\n    def f(self):\n        self.x = 1\n\ndef f(a):\n    del a.x\n", []),
        ("class A:\n    def f(self, b):\n        x = 1\n        b.x += x\n", [(4, "b.x")]),
        ("def f(a):\n    a.b.c, d = 1, 2\n", [(2, "a.b.c")]),
        ("def f(a, n):\n    setattr(a, n, 1)\n", [(2, "setattr(a, n, 1)")]),
    ],
)
def test_the_check_of_writes_sees_planted_ones(source: str, found: list[tuple[int, str]]) -> None:
    assert foreign_writes(ast.parse(source)) == found


def documented(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """The public classes, functions and methods of a module, without what is inside private classes and functions."""
    todo: list[ast.AST] = [tree]
    while todo:
        for node in ast.iter_child_nodes(todo.pop()):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                yield node
                if isinstance(node, ast.ClassDef):
                    todo.append(node)


def fault_of(docstring: str | None) -> str:
    """What is wrong with a docstring as a sentence; empty if nothing is."""
    text = " ".join((docstring or "").split("\n\n")[0].split())
    if not text:
        return "no docstring"
    if not re.match(r"[A-Z`0-9]", text) or re.match(r"(Of|Args:|Raises:|Returns:)(\s|$)", text):
        return f"begins in the middle of a sentence: {text}"
    if not re.search(r"[.!?:]`*\)?$", text):
        return f"no end of a sentence: {text}"
    return ""


def test_public_names_have_docstrings_of_whole_sentences() -> None:
    """In `swarm/` each has one; where another folder has one it is a sentence, too."""
    wrong = []
    for path in [*product_files(), *files_for_tests()]:
        needed = path.is_relative_to(ROOT / "swarm")
        for node in documented(parse(path)):
            text = ast.get_docstring(node)
            fault = fault_of(text)
            if fault and (needed or text is not None):
                wrong.append(f"{relative(path)}:{node.lineno} {node.name}: {fault}")
    assert not wrong, "\n".join([f"{len(wrong)} docstrings", *wrong])


def test_every_module_says_what_it_owns() -> None:
    wrong = [
        f"{relative(p)}: {fault}"
        for p in [*product_files(), *files_for_tests()]
        if (fault := fault_of(ast.get_docstring(parse(p))))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("docstring", "is_wrong"),
    [
        ("The tickets of one step.", False),
        ("`x` [N] as fp32.\n\nArgs:\n    x: a", False),
        ("Raises:\n    ValueError: always.", True),
        ("Of one peer the tickets.", True),
        ("the tickets.", True),
        ("The tickets", True),
        ("", True),
        (None, True),
    ],
)
def test_the_check_of_docstrings_sees_planted_faults(docstring: str | None, is_wrong: bool) -> None:
    assert bool(fault_of(docstring)) is is_wrong
