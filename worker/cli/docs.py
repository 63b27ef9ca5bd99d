"""`perdure docs`: the documentation, which the package contains as Markdown.

README.md in the folder of the pages is the index: it decides which pages there are, in which order, and what each
answers. The navigation of the site and llms.txt are made of the same entries.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path, PurePosixPath
from typing import Annotated, Final

import typer

from .support.errors import Failed, Misuse
from .support.output import Column
from .support.runner import Listing, Output, command

ROOT: Final = Path(__file__).resolve().parents[2]
"""Folder of the package, or of the repository."""

FOLDER: Final = "docs"

INDEX: Final = f"{FOLDER}/README.md"


@dataclass(frozen=True, slots=True)
class IndexedPage:
    """An entry of the index.

    Args:
        sections: Headings of the index above it, the outermost first.
        title: Title for a menu.
        path: File, relative to the folder of the package.
        about: Questions that the page answers, as one sentence without a full stop.
    """

    sections: tuple[str, ...]
    title: str
    path: str
    about: str

    @property
    def name(self) -> str:
        """Name for the command line, such as `how-to/limits` or `examples`."""
        return self.path.removeprefix(f"{FOLDER}/").removesuffix(".md").removesuffix("/README")

    def summary(self) -> dict[str, object]:
        return {"page": self.name, "title": self.title, "section": list(self.sections), "about": self.about}


@dataclass(frozen=True, slots=True)
class Passage:
    """A part of a page from one heading to the next.

    Args:
        anchor: Part of a link after `#`, as GitHub makes it.
        level: Number of `#` of the heading.
    """

    heading: str
    anchor: str
    level: int
    text: str


@dataclass(frozen=True, slots=True)
class _Match:
    where: str
    heading: str
    line: str

    def summary(self) -> dict[str, str]:
        return {"page": self.where, "heading": self.heading, "line": self.line}


def pages(index: str) -> Iterator[IndexedPage]:
    """Yield the entries of the index. index: its text."""
    sections: list[str] = []
    for line in index.splitlines():
        if heading := re.match(r"(##+) (.+)", line):
            sections[len(heading[1]) - 2 :] = [heading[2]]
        elif (entry := re.match(r"- \[([^\[\]]+)\]\(([^()]+)\): (.+)", line)) and entry[2].endswith(".md"):
            path = _normal(PurePosixPath(FOLDER) / entry[2])
            yield IndexedPage(tuple(sections), entry[1], path, entry[3])


def _normal(path: PurePosixPath) -> str:
    parts: list[str] = []
    for part in path.parts:
        if part == "..":
            parts.pop()
        else:
            parts.append(part)
    return "/".join(parts)


def passages(text: str) -> Iterator[Passage]:
    """Yield the parts of a page. text: Markdown, without comments."""
    heading, lines, in_code = "", list[str](), False
    for line in [*text.splitlines(), "# "]:
        in_code ^= line.startswith("```")
        if not in_code and re.match(r"#+ ", line):
            if lines:
                title = heading.lstrip("#").strip()
                yield Passage(title, anchor(title), len(heading) - len(heading.lstrip("#")), "\n".join(lines).rstrip())
            heading, lines = line, [line]
        else:
            lines.append(line)


def anchor(heading: str) -> str:
    """Return the anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def without_comments(text: str) -> str:
    """Return Markdown without its HTML comments, which have tests of the page."""
    kept: list[str] = []
    in_comment = after_comment = False
    for line in text.splitlines(keepends=True):
        in_comment |= line.startswith("<!--")
        if not in_comment and not (after_comment and line == "\n"):
            kept.append(line)
        after_comment = in_comment or (after_comment and line == "\n")
        in_comment &= "-->" not in line
    return "".join(kept)


_COLUMNS: Final[Sequence[Column[IndexedPage]]] = (
    Column("page", lambda page: page.name),
    Column("what it answers", lambda page: page.about),
)

_FOUND: Final[Sequence[Column[_Match]]] = (
    Column("page", lambda match: match.where),
    Column("line", lambda match: match.line, least=40),
)

_MATCHES: Final = 30
"""Largest number of passages that a search prints."""


@command
def docs(
    page: Annotated[
        str | None,
        typer.Argument(metavar="[PAGE[#HEADING]]", help="Page, or one part of it; without it, all pages are listed."),
    ] = None,
    *,
    search: Annotated[str | None, typer.Option("--search", metavar="WORDS", help="List where all words occur.")] = None,
    path: Annotated[bool, typer.Option("--path", help="Print the file of the page, or the folder.")] = False,
) -> Output:
    """Read the documentation, which needs no network.

    A page is Markdown. A link to ../reference/cli.md#perdure-bench is the
    page reference/cli#perdure-bench; the last part of a name is enough.

    Example: perdure docs limits
    """
    if search is not None and (page is not None or path):
        raise Misuse("--search looks through all pages: give neither PAGE nor --path with it")
    if not (ROOT / INDEX).is_file():
        raise Failed(
            f"this installation has no documentation: {ROOT / INDEX} is missing; install the wheel of the release"
        )
    listed = list(pages((ROOT / INDEX).read_text("utf-8")))
    if search is not None:
        return _search(listed, search.casefold().split())
    if page is None:
        return Output(str(ROOT / FOLDER), str(ROOT / FOLDER)) if path else _list(listed)
    name, _, part = page.partition("#")
    if name in _INDEXES:
        return _index(name, path)
    found, *others = _find(listed, name)
    file = ROOT / found.path
    if path:
        return Output(str(file), str(file))
    text = _readable(file)
    if part:
        text = _part(found, text, part)
    also = f"also: {', '.join(page.name for page in others)}" if others else None
    return Output({"page": found.name, "text": text}, text, notes=[also])


_INDEXES: Final[dict[str, str]] = {
    "README": INDEX,
    f"{FOLDER}/README.md": INDEX,
    "index": INDEX,
    "llms.txt": "llms.txt",
    "llms": "llms.txt",
}
"""Files that list the pages, by their names for the command line."""


def _index(name: str, path: bool) -> Output:
    file = ROOT / _INDEXES[name]
    return Output(str(file), str(file)) if path else Output({"page": name, "text": _readable(file)}, _readable(file))


def _readable(file: Path) -> str:
    """Return a page without comments and without links to files that this installation does not have."""

    def shown(found: re.Match[str]) -> str:
        is_dead = found["path"] is not None and not (file.parent / found["path"]).exists()
        return str(found["text"]) if is_dead else found[0]

    text = without_comments(file.read_text("utf-8")).rstrip("\n")
    parts = re.split(r"^(?=```)", text, flags=re.MULTILINE)  # text, code, the end of code with more text, code, ...
    return "".join(part if number % 2 else _CODE_OR_LINK.sub(shown, part) for number, part in enumerate(parts))


_CODE_OR_LINK: Final = re.compile(
    r"```|`[^`]{1,200}`|!?\[(?P<text>[^\[\]]{1,200})\]\((?![a-z]{1,9}:|#)(?P<path>[^()\s#]{1,200})(?:#[^()\s]{1,200})?\)"
)
"""Code in a sentence, which is left alone, or a link or an image of a file: its text and its path."""


def _list(listed: list[IndexedPage]) -> Listing:
    return Listing(_COLUMNS, [page for page in listed if (ROOT / page.path).is_file()], empty=None)


def _find(listed: list[IndexedPage], name: str) -> list[IndexedPage]:
    """Return the pages that a name means, the first of the index first."""
    wanted = name.removeprefix(f"{FOLDER}/").removesuffix(".md").removesuffix("/README").lower()
    exact = [page for page in listed if page.name == wanted]
    found = exact or [page for page in listed if page.name.rpartition("/")[2] == wanted]
    if not found:
        ends = [page.name.rpartition("/")[2] for page in listed]
        near = get_close_matches(wanted.rpartition("/")[2], ends, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise Misuse(
            f"there is no page {name!r}; {hint}'perdure docs' lists the pages, 'perdure docs --search WORDS' finds them"
        )
    return found


def _part(page: IndexedPage, text: str, wanted: str) -> str:
    """Return the part of a page under a heading, with the headings below it."""
    parts = list(passages(text))
    ends = (wanted.lower(), f"-{wanted.lower()}")
    exact = next((number for number, part in enumerate(parts) if part.anchor == ends[0]), None)
    last = next((number for number, part in enumerate(parts) if part.anchor.endswith(ends[1])), None)
    start = last if exact is None else exact
    if start is None:
        near = get_close_matches(wanted.lower(), [part.anchor for part in parts], 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise Misuse(f"page {page.name!r} has no heading {wanted!r}; {hint}'perdure docs {page.name}' prints all of it")
    end = next(
        (number for number in range(start + 1, len(parts)) if parts[number].level <= parts[start].level), len(parts)
    )
    return "\n\n".join(part.text for part in parts[start:end])


def _search(listed: list[IndexedPage], words: list[str]) -> Listing:
    if not words:
        raise Misuse("--search needs at least one word")
    found: list[tuple[int, _Match]] = []
    for page in listed:
        if not (ROOT / page.path).is_file():
            continue
        title = f"{page.title} {page.about}".casefold()
        for part in passages(without_comments((ROOT / page.path).read_text("utf-8"))):
            text = part.text.casefold()
            if all(word in text or word in title for word in words) and any(word in text for word in words):
                where = page.name if part.level == 1 else f"{page.name}#{part.anchor}"
                found.append((_score(words, title, part), _Match(where, part.heading, _line(words, part.text))))
    found.sort(key=lambda one: -one[0])
    shown = [match for _, match in found[:_MATCHES]]
    more = f"{len(found) - _MATCHES} more parts match; add a word" if len(found) > _MATCHES else None
    return Listing(_FOUND, shown, empty="no page has all of these words; 'perdure docs' lists the pages", notes=[more])


_LINE: Final = 160
"""Largest number of characters of a line that a search prints."""


def _score(words: Iterable[str], title: str, part: Passage) -> int:
    heading, text = part.heading.casefold(), part.text.casefold()
    return sum(10 * (word in heading) + 5 * (word in title) + min(text.count(word), 4) for word in words)


def _line(words: Sequence[str], text: str) -> str:
    """Return the line of a text with the most of the words, the first of these; of a long one what is around them."""
    line = max(text.splitlines(), key=lambda line: sum(word in line.casefold() for word in words)).strip()
    first = min(at for word in words if (at := line.casefold().find(word)) >= 0)
    start = max(0, min(first - _LINE // 4, len(line) - _LINE))
    return f"{'...' if start else ''}{line[start : start + _LINE]}{'...' if start + _LINE < len(line) else ''}"
