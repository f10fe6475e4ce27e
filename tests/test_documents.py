"""The pages: what they name exists, their links resolve, and the transcript is what the simulator prints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from swarm.testing.simulation.transcript import story
from tests.source_trees import ROOT, relative

PAGES = sorted([*ROOT.glob("*.md"), *(page for f in ("docs", "swarm", "models") for page in (ROOT / f).rglob("*.md"))])
SOURCES = sorted(p for f in ("swarm", "models", "launch", "tests", "benchmarks") for p in (ROOT / f).rglob("*.py"))
#: Where a path that a page or a comment names may begin.
BASES = (ROOT, ROOT / "swarm", ROOT / "docs", ROOT / "models", ROOT / "swarm" / "lifecycle", ROOT / "swarm" / "averaging")
MAX_GLOSSARY = 25


def anchor(heading: str) -> str:
    """The anchor that a renderer gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_every_link_resolves(page: Path) -> None:
    wrong = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, fragment = target.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        there = (page.parent / path).resolve() if path else page
        if not there.exists():
            wrong.append(f"{target}: nothing there")
        elif fragment and fragment not in {anchor(h) for h in re.findall(r"^#+ (.*)$", there.read_text(), re.M)}:
            wrong.append(f"{target}: no such heading")
    assert not wrong, "\n".join(wrong)


def test_every_page_that_the_code_names_exists() -> None:
    wrong = []
    for source in SOURCES:
        for name in re.findall(r"(?<![\w/.])((?:[\w.-]+/)*[A-Za-z][\w-]*\.md)\b", source.read_text()):
            if not any((base / name).is_file() for base in (*BASES, source.parent)) and name not in MADE_BY_TESTS:
                wrong.append(f"{relative(source)} names {name}")
    assert not wrong, "\n".join(wrong)


#: Pages that tests write, or that stand in for a user's.
MADE_BY_TESTS = {"README.md", "c.md"}


def test_every_file_that_the_pages_name_exists() -> None:
    """`swarm/...py` and paths below `swarm/` in backticks, in the pages that speak of the code as it is."""
    wrong = []
    for page in PAGES:
        if page.name in ("CHANGELOG.md", "ARCHITECTURES.md"):
            continue
        for name in re.findall(r"`((?:[\w-]+/)+[\w-]+\.(?:py|md))`", page.read_text()):
            if not any((base / name).is_file() for base in BASES):
                wrong.append(f"{relative(page)} names {name}")
    assert not wrong, "\n".join(wrong)


def test_the_transcript_is_what_the_simulator_prints() -> None:
    page = (ROOT / "docs" / "follow-one-micro-batch.md").read_text()
    shown = re.search(r"```transcript\n(.*?)```", page, re.S)
    assert shown is not None
    told = "".join(f"{line}\n" for line in story())
    assert shown[1] == told, "paste the output of `python -m swarm.testing.simulation.transcript` into the page"


def test_the_glossary_is_short() -> None:
    rows = re.findall(r"^\| (?!word|---)", (ROOT / "docs" / "glossary.md").read_text(), re.M)
    assert 0 < len(rows) <= MAX_GLOSSARY


def test_the_index_leads_to_every_page() -> None:
    index = ROOT / "docs" / "README.md"
    linked = {(index.parent / target).resolve() for target in re.findall(r"\]\(([^)#\s]+)\)", index.read_text())}
    missing = [relative(page) for page in PAGES if page not in {index, ROOT / "README.md", ROOT / "CHANGELOG.md"} | linked]
    assert not missing, missing


def test_every_command_that_the_pages_show_exists() -> None:
    """`python -m a.b.c`, as a module of this repository."""
    wrong = [
        f"{relative(page)}: {name}"
        for page in PAGES
        for name in re.findall(r"python3? -m ((?:swarm|models|launch|benchmarks)(?:\.[a-z]\w*)+)", page.read_text())
        if not (ROOT / f"{name.replace('.', '/')}.py").is_file()
    ]
    assert not wrong, "\n".join(wrong)


def test_every_script_of_the_measured_table_exists() -> None:
    scripts = {path.name for path in (ROOT / "benchmarks").rglob("*.py")}
    named = re.findall(r"`(\w+\.py)[ `]", (ROOT / "README.md").read_text().partition("## Measured")[2].partition("\n## ")[0])
    assert len(named) > 20
    assert set(named) <= scripts, set(named) - scripts
