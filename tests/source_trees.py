"""The product's modules as syntax trees, for tests of how it is written."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("swarm", "models", "launch")


def product_files(*packages: str) -> list[Path]:
    """Every module of the product, or of some of its folders. What serves tests alone (`swarm/testing`) is none of it."""
    paths = (path for package in packages or PRODUCT for path in (ROOT / package).rglob("*.py"))
    return sorted(path for path in paths if not path.is_relative_to(ROOT / "swarm" / "testing"))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def files_for_tests() -> list[Path]:
    """Every module of what serves tests."""
    return sorted((ROOT / "swarm" / "testing").rglob("*.py"))
