"""The code in README and docs: every page runs from top to bottom, every command of the recipes exists."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from perdure.worker.cli import USAGE_ERROR, commands

from tests.adapters.__main__ import ADAPTERS
from tests.support.documents import Block, blocks_of, matches, pages
from tests.support.page_execution import run_page, use_server
from tests.support.paths import ROOT

BLOCKS = [block for page in pages() for block in blocks_of(page)]
EXECUTED = [block for block in BLOCKS if block.kind in ("python", "console")]
WITH_ADAPTERS = {ROOT / "docs" / "how-to" / f"{name}.md" for adapter in ADAPTERS.values() for name in adapter.pages}
"""Pages whose code needs a framework: `python -m tests.adapters` runs them in its environment."""
RUNNABLE = sorted({block.page for block in EXECUTED if not block.not_run} - WITH_ADAPTERS)
KNOWN = {"python", "console", "sh", "json", "yaml", "text", "dockerfile", "lua", ""}
TUTORIAL = [ROOT / "docs" / "tutorial" / f"{name}.md" for name in ("first-task", "steps-and-retries", "first-agent")]
"""Its pages in the order of their links."""
RECIPES = [block for block in BLOCKS if block.kind == "recipe"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Path, Future[subprocess.CompletedProcess[str]]]]:
    """All pages at work, two at a time, on one embedded server; each in a folder and a namespace of its own."""
    data = tmp_path_factory.mktemp("data")
    with use_server(data), ThreadPoolExecutor(2) as pool:
        yield {page: pool.submit(run_page, page, tmp_path_factory.mktemp(page.stem), data) for page in RUNNABLE}
        pool.shutdown(cancel_futures=True)


@pytest.mark.processes
@pytest.mark.timeout(300)  # it waits for the pages before its own
@pytest.mark.parametrize("page", RUNNABLE, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_runs_from_top_to_bottom(page: Path, runs: dict[Path, Future[subprocess.CompletedProcess[str]]]) -> None:
    done = runs[page].result()
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_a_reader_runs_all_pages_of_the_tutorial_in_one_folder(tmp_path: Path) -> None:
    folder, data = tmp_path / "folder", tmp_path / "data"
    folder.mkdir()
    assert sorted(TUTORIAL) == sorted((ROOT / "docs" / "tutorial").glob("*.md"))
    with use_server(data):
        for page in TUTORIAL:
            done = run_page(page, folder, data, "tutorial")
            assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("block", RECIPES, ids=lambda block: block.name)
def test_commands_of_a_recipe_exist_with_their_options(block: Block) -> None:
    for line in block.code.replace("\\\n", " ").splitlines():
        for words in perdure_commands(line):
            check_command(words, f"{block.name}: {line.strip()}")


def perdure_commands(line: str) -> Iterator[list[str]]:
    """The `perdure ...` commands in a line of shell, without what is piped into them or comes after them."""
    words = shlex.split(line, comments=True)
    while words:
        end = next((at for at, word in enumerate(words) if word in ("|", "&&", "&", ";", ">", "<")), len(words))
        command, words = words[:end], words[end + 1 :]
        while command and re.fullmatch(r"\w+=.*", command[0]):
            del command[0]
        if command and Path(command[0]).name == "perdure":
            yield command[1:]


def check_command(words: list[str], place: str) -> None:
    """Parse a command as the command line does, without carrying it out."""
    command = commands
    context = command.context_class(command, info_name="perdure")
    try:
        while hasattr(command, "resolve_command"):  # a group
            name, command, words = command.resolve_command(context, words)
            context = command.context_class(command, info_name=name, parent=context)
        command.make_context(context.info_name, list(words), parent=context.parent)
    except USAGE_ERROR as error:
        pytest.fail(f"{place}: {error}")


def test_a_file_that_a_page_has_its_reader_save_is_used_by_a_later_block() -> None:
    """Blocks with a title are written to a file, and only then executed: by a command, or by an import.

    An app names the modules that it includes before they are written.
    """
    for block in EXECUTED:
        if block.title is not None:
            page = [other for other in EXECUTED if other.page == block.page and not other.not_run]
            module = block.title.removesuffix(".py").replace("/", ".")
            including = [other for other in page if "include=[" in other.code and f'"{module}"' in other.code]
            later = [other for other in page if other.line > block.line]
            named = any(re.search(rf"\b{Path(block.title).stem}\b", other.code) for other in later)
            assert named or including, block.name


def test_nearly_all_blocks_are_executed() -> None:
    """A block that is not executed has a reason beside it, and there are few of them; -rP prints them."""
    left_out = [f"{block.name}: {block.not_run}" for block in EXECUTED if block.not_run]
    counts = f"{len(EXECUTED) - len(left_out)} blocks executed, {len(RECIPES)} recipes parsed, {len(left_out)} not run"
    sys.stdout.write("\n".join([counts, *left_out, ""]))
    assert len(left_out) <= len(EXECUTED) // 10, left_out


def test_blocks_are_fenced_and_of_a_known_language() -> None:
    """No indented block, and no other name for a language, which the tests above would pass over."""
    assert {block.language for block in BLOCKS} <= KNOWN
    for page in pages():
        for line in re.sub(r"^(```|<!-- run).*?^(```|-->)$", "", page.read_text("utf-8"), flags=re.S | re.M).split(
            "\n"
        ):
            assert not re.match(r" {4,}(perdure|make|pip|await|\$) ", line), f"{page}: {line}"


def test_what_a_command_prints_is_compared_with_the_page() -> None:
    assert matches(("queued 3", "done"), "queued 3\ndone\n")
    assert matches(("resumed after ... s",), "resumed after 4.2 s\n")
    assert not matches(("queued 3",), "queued 4")
