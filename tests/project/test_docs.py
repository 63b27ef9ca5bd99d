"""README and docs name only what exists: files, headings, make targets, tests."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from perdure.worker.cli.docs import pages as pages_of

from tests.support.documents import blocks_of, pages
from tests.support.paths import ROOT

PAGES = pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
FOLDERS = ("queues", "deadletter", "worker", "tests", "examples", "deploy", "benchmarks", "docs")
MAKEFILE = (ROOT / "Makefile").read_text("utf-8")


def prose(page: Path) -> str:
    """The text of a page without its code blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)


def headings(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@PAGES
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in headings(target), f"{page.name}: no heading for {link}"


@PAGES
def test_make_targets_exist(page: Path) -> None:
    text = page.read_text("utf-8")
    for target in re.findall(r"(?:^|`|&& )make ([a-z][a-z0-9-]*)", text, re.MULTILINE):
        assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE), f"{page.name}: make {target}"


@PAGES
def test_files_and_tests_exist(page: Path) -> None:
    """Paths in backticks that begin with a folder of the repository, and tests named as pytest names them."""
    text = prose(page)
    for name, test in re.findall(r"(tests/[\w/]+\.py)::(\w+)", text):
        assert f"def {test}(" in (ROOT / name).read_text("utf-8"), f"{page.name}: {name}::{test}"
    for name in re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./@-]*)`", text):
        assert (ROOT / name).exists(), f"{page.name}: {name}"


def test_pages_that_the_source_names_exist() -> None:
    sources = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".lua")]
    for path in [*sources, ROOT / "Makefile", ROOT / ".ci" / "run"]:
        for page in re.findall(r"(?<![\w/.])docs/[\w/-]+\.md", path.read_text("utf-8")):
            assert (ROOT / page).is_file(), f"{path.relative_to(ROOT)}: {page}"


def test_every_page_is_an_entry_of_the_index_once() -> None:
    """`- [Title](path): what it answers`, of which the navigation of the site, llms.txt and `perdure docs` are made."""
    index = ROOT / "docs" / "README.md"
    listed = Counter(ROOT / page.path for page in pages_of(index.read_text("utf-8")))
    missing = set(ROOT.glob("docs/**/*.md")) - listed.keys() - {index}
    assert not missing, sorted(str(page.relative_to(ROOT)) for page in missing)
    assert {page.name for page, count in listed.items() if count > 1} == set()


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/**/*.md")), ids=lambda page: page.stem)
def test_pages_for_users_name_no_test(page: Path) -> None:
    """Which tests guard a promise is in tests/GUARANTEES.md."""
    assert re.findall(r"`(tests/[^`]*)`", prose(page)) == []


def test_the_first_example_of_the_readme_is_short() -> None:
    example = next(block for block in blocks_of(ROOT / "README.md") if block.language == "python")
    assert len([line for line in example.code.splitlines() if line.strip()]) <= 30
