"""Pages of the documentation and the code blocks in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from tests.support.paths import ROOT

_FENCE: Final = re.compile(r"^```(?P<language>\w*)(?: title=\"(?P<title>[^\"]+)\")?$")
_NOT_RUN: Final = re.compile(r"^<!-- not run: (?P<reason>.+) -->$")


@dataclass(frozen=True, slots=True)
class Block:
    """A code block of a page.

    language: the first word of its info string. title: the file that a reader saves it as. hidden: it stands in an HTML
    comment (`<!-- run`), as set-up or check that a reader does not need. not_run: the reason why it is not executed.
    line: of its first line of code, from 1.
    """

    page: Path
    line: int
    language: str
    code: str
    title: str | None = None
    hidden: bool = False
    not_run: str | None = None

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def kind(self) -> Literal["python", "console", "recipe", "other"]:
        """Test of the block: executed as Python, executed in a shell, parsed by the command line, or not."""
        if self.language in ("python", "console"):
            return self.language  # type: ignore[return-value]  # one of the two
        return "recipe" if self.language == "sh" else "other"


def pages() -> list[Path]:
    """README, CONTRIBUTING, pages beside the code, and all of docs/, recursively."""
    return [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "ARCHITECTURE.md",
        ROOT / "queues" / "STORAGE.md",
        *sorted(ROOT.glob("deploy/*.md")),
        *sorted(ROOT.glob("examples/*.md")),
        *sorted(ROOT.glob("benchmarks/*.md")),
        *sorted(ROOT.glob("tests/*.md")),
        *sorted(ROOT.glob("tests/*/README.md")),
        *sorted(ROOT.glob("docs/**/*.md")),
    ]


def blocks_of(page: Path) -> list[Block]:
    """The fenced blocks of a page and its hidden ones, in order."""
    return list(_blocks(page, page.read_text("utf-8").splitlines()))


def _blocks(page: Path, lines: list[str]) -> Iterator[Block]:
    reason: str | None = None
    at = 0
    while at < len(lines):
        line = lines[at]
        at += 1
        if found := _NOT_RUN.match(line):
            reason = found["reason"]
        elif line == "<!-- run":
            end = lines.index("-->", at)
            yield Block(page, at + 1, "python", _text(lines[at:end]), hidden=True)
            at = end + 1
        elif found := _FENCE.match(line):
            end = lines.index("```", at)
            yield Block(page, at + 1, found["language"], _text(lines[at:end]), found["title"], not_run=reason)
            at, reason = end + 1, None
        elif line.strip():
            assert reason is None, f"{page}:{at}: a 'not run' comment must stand directly before a code block"


def _text(lines: list[str]) -> str:
    return "\n".join([*lines, ""])


@dataclass(frozen=True, slots=True)
class Command:
    """A command of a console block, and the lines that it is shown to print."""

    text: str
    expected: tuple[str, ...]


def commands_of(block: Block) -> list[Command]:
    """The commands of a console block: lines that begin with `$ `; all others are output."""
    commands: list[tuple[str, list[str]]] = []
    for line in block.code.splitlines():
        if line.startswith("$ "):
            commands.append((line.removeprefix("$ "), []))
        elif commands:
            commands[-1][1].append(line)
        elif line.strip():
            raise ValueError(f"{block.name}: output before the first command")
    return [Command(text, tuple(expected)) for text, expected in commands]


def matches(expected: tuple[str, ...], printed: str) -> bool:
    """Whether the output is what the page shows. `...` stands for any text, and any space for any other."""
    pattern = ".*".join(re.escape(" ".join(part.split())) for part in "\n".join(expected).split("..."))
    return re.fullmatch(pattern.replace(r"\ ", r"\s*"), " ".join(printed.split()), re.DOTALL) is not None
