"""Language and layout rules: plain words in docstrings, help, logs, errors and docs; one meaning per class name."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from tests.support.paths import ROOT

PACKAGE: Final = ("queues", "deadletter", "worker")
HELPERS: Final = ("benchmarks", "tests")
DOCUMENTS: Final = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "deploy/README.md", "docs")

WORDS: Final = {
    "anew": "again",
    "whoever": "the component that acts: the worker, the caller",
    "nobody": "no worker, no consumer",
    "somebody": "a worker, a person, an operator",
    "told": "notified, logged, reported",
    "begun": "started",
    "is none": "there is no X, X is missing",
    "of one's own": "its own, a separate",
    "goes on": "continues, resumes",
    "comes to": "results in, amounts to",
    "as good as": "equal to, equivalent to",
}
"""Words that the project does not use, each with what to write instead."""

PATTERN: Final = re.compile(
    r"\b(" + "|".join(f"(?-i:{word})" if word == "is none" else re.escape(word) for word in WORDS) + r")\b",
    re.IGNORECASE,
)  # "is None" is code
MAX_PARTS_LENGTH: Final = re.compile(
    "|".join(
        f"(?-i:{part})" if part == "none" else re.escape(part)
        for part in (max(word.split(), key=len) for word in WORDS)
    ),
    re.IGNORECASE,
)
"""Matches in each source that may have one of the words, also in a string of several pieces; others are not parsed."""

FIRST_WORDS: Final = ("What", "Who", "Where", "How", "Of", "By", "Which")
"""Words that a docstring does not begin with: its first sentence names the thing, or what the function does."""


class Text(NamedTuple):
    """A text of the source: a docstring, or any other string of it."""

    line: int
    text: str
    is_docstring: bool


def modules() -> list[Path]:
    return modules_of(PACKAGE)


def modules_of(parts: Iterable[str]) -> list[Path]:
    return sorted(path for folder in parts for path in (ROOT / folder).rglob("*.py"))


def folders() -> list[Path]:
    return sorted({path.parent for path in modules()})


def helper_folders() -> list[Path]:
    """Return the folders of tests and benchmarks."""
    return sorted({path.parent for path in modules_of(HELPERS)})


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def texts_of(source: str) -> Iterator[Text]:
    """Every string of a module. Strings after a statement count as docstrings of what precedes them."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield Text(node.lineno, node.value.value, is_docstring=True)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield Text(node.lineno, node.value, is_docstring=False)


def unusual_words(source: str) -> list[str]:
    if not MAX_PARTS_LENGTH.search(source):
        return []
    found = [(text.line, match[0].lower()) for text in texts_of(source) for match in PATTERN.finditer(text.text)]
    return [f"line {line}: {word!r}; write: {WORDS[word]}" for line, word in dict.fromkeys(found)]


@pytest.mark.parametrize("folder", folders(), ids=name_of)
def test_strings_use_plain_words(folder: Path) -> None:
    """Docstrings, help texts, log lines and errors do without the words of the list."""
    found = {path.name: unusual_words(path.read_text("utf-8")) for path in sorted(folder.glob("*.py"))}
    assert not {name: words for name, words in found.items() if words}


def test_no_string_names_a_file_of_the_documentation() -> None:
    """An error, a log line or a help text suffices by itself; a page has a name for `perdure docs`, not a path."""
    found = [
        f"{name_of(path)}:{text.line}: {text.text!r}"
        for path in [*modules(), *ROOT.glob("*.py")]
        if "docs/" in (source := path.read_text("utf-8"))
        for text in texts_of(source)
        if re.search(r"\bdocs/", re.sub(r"https?://\S+", "", text.text))
    ]
    assert not found


def names_of(source: str) -> Iterator[str]:
    """Names of the functions and classes of a module, as words."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name.replace("_", " ").replace("is none", "is None").strip()


def comments_of(source: str) -> Iterator[str]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


@pytest.mark.parametrize("folder", helper_folders(), ids=name_of)
def test_names_docstrings_and_comments_of_tests_use_plain_words(folder: Path) -> None:
    """Other strings of a test or benchmark may be data; docstrings, comments and names are prose."""
    found = []
    for path in sorted(folder.glob("*.py")):
        if path == Path(__file__).resolve():  # contains the words
            continue
        source = path.read_text("utf-8")
        if not MAX_PARTS_LENGTH.search(source):
            continue
        texts = [text.text for text in texts_of(source) if text.is_docstring]
        texts += [*names_of(source), *comments_of(source)]
        words = [match[0].lower() for text in texts for match in PATTERN.finditer(text)]
        found += [f"{path.name}: {word!r}; write: {WORDS[word]}" for word in words]
    assert not found


@pytest.mark.parametrize("folder", folders(), ids=name_of)
def test_docstrings_begin_with_the_thing_or_the_act(folder: Path) -> None:
    """A module or class begins with a noun phrase, a function with an imperative or Return."""
    found = [
        f"{path.name}:{text.line}: {text.text[:60]!r}"
        for path in sorted(folder.glob("*.py"))
        for text in texts_of(path.read_text("utf-8"))
        if text.is_docstring and re.match(rf"\s*({'|'.join(FIRST_WORDS)})\b", text.text)
    ]
    assert not found


@pytest.mark.parametrize("script", sorted(ROOT.glob("*/lua/*.lua")), ids=name_of)
def test_scripts_use_plain_words(script: Path) -> None:
    comments = re.findall(r"--(.*)", script.read_text("utf-8"))
    assert not [match[0] for comment in comments for match in PATTERN.finditer(comment)]


def documents() -> list[Path]:
    found = [ROOT / name for name in DOCUMENTS]
    return sorted(page for path in found for page in ([path] if path.is_file() else path.rglob("*.md")))


@pytest.mark.parametrize("document", documents(), ids=name_of)
def test_documents_use_plain_words(document: Path) -> None:
    """Names in backticks are code: stored fields keep their names."""
    lines = [re.sub(r"`[^`]*`", "", line) for line in document.read_text("utf-8").splitlines()]
    found = [(number, match[0].lower()) for number, line in enumerate(lines, 1) for match in PATTERN.finditer(line)]
    assert not [f"line {number}: {word!r}; write: {WORDS[word]}" for number, word in found]


DJANGO_MIGRATION = "Migration"
"""The class of each migration has this name for Django, whatever other classes there are."""


def test_a_public_class_name_is_used_once() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and node.name != DJANGO_MIGRATION:
                homes[node.name].append(name_of(path))
    assert not {name: paths for name, paths in homes.items() if len(paths) > 1}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('"""Begun anew."""', ["anew", "begun"]),
        ('raise ValueError("nobody reads it")', ["nobody"]),
        ("# a comment told\nx = 1", []),
        ('x = f"the run goes on with {y}"', ["goes on"]),
    ],
)
def test_the_word_check_finds_words_in_strings_only(source: str, found: list[str]) -> None:
    assert sorted(word.split("'")[1] for word in unusual_words(source)) == found
