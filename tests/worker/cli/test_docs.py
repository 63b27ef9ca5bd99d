"""`perdure docs`: pages, parts of pages and a search, of the real documentation and of a small one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from perdure.worker.cli import docs

from tests.support.command_line import call
from tests.support.paths import ROOT

INDEX = """# Documentation

## Start

- [First](first.md): begin

## Tasks

### Write

- [Limits](how-to/limits.md): how many run at once
- [Programs](../examples/README.md): what to copy

## Background

- [Limits explained](explanation/limits.md): why there are limits
"""

LIMITS = """# Limits

Intro of tokens.

<!-- run
hidden = 1
-->

## Rates

```python
# no heading
```

### Per customer

Tokens by tenant.

## Hold it, now

After a 429.
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in {
        "README.md": INDEX,
        "first.md": "# First\n\nTokens, tokens.\n",
        "how-to/limits.md": LIMITS,
        "explanation/limits.md": "# Limits explained\n\nWhy.\n",
        "../examples/README.md": "# Programs\n",
    }.items():
        file = (tmp_path / docs.FOLDER / name).resolve()
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    return tmp_path


def test_without_a_page_all_pages_are_listed_in_the_order_of_the_index(folder: Path) -> None:
    found = json.loads(call("docs", "--json").out)
    assert [page["page"] for page in found] == ["first", "how-to/limits", "examples", "explanation/limits"]
    assert found[1] == {
        "page": "how-to/limits",
        "title": "Limits",
        "section": ["Tasks", "Write"],
        "about": "how many run at once",
    }
    assert found[3]["section"] == ["Background"]
    shown = call("docs").out
    assert "how-to/limits" in shown
    assert "how many run at once" in shown


def test_a_page_is_printed_without_its_comments(folder: Path) -> None:
    answer = call("docs", "how-to/limits")
    assert (answer.code, answer.err) == (0, "")
    assert answer.out == LIMITS.replace("<!-- run\nhidden = 1\n-->\n\n", "")


@pytest.mark.parametrize("name", ["limits", "how-to/limits.md", "docs/how-to/limits.md", "How-To/Limits"])
def test_a_page_has_several_names(folder: Path, name: str) -> None:
    assert call("docs", name).out.startswith("# Limits\n")


def test_of_two_pages_with_a_name_the_first_is_printed_and_the_other_named(folder: Path) -> None:
    assert call("docs", "limits").err == "perdure: also: explanation/limits\n"


def test_a_part_has_the_headings_below_it(folder: Path) -> None:
    assert call("docs", "how-to/limits#rates").out == (
        "## Rates\n\n```python\n# no heading\n```\n\n### Per customer\n\nTokens by tenant.\n"
    )
    assert call("docs", "limits#it-now").out == call("docs", "how-to/limits#hold-it-now").out
    assert call("docs", "how-to/limits#hold-it-now").out == "## Hold it, now\n\nAfter a 429.\n"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["limit"], "there is no page 'limit'; did you mean 'limits'? 'perdure docs' lists the pages"),
        (["nothing"], "there is no page 'nothing'; 'perdure docs' lists the pages"),
        (["../../secret"], "there is no page '../../secret'; 'perdure docs' lists the pages"),
        (
            ["limits#rate"],
            "page 'how-to/limits' has no heading 'rate'; did you mean 'rates'? 'perdure docs how-to/limits'",
        ),
        (["limits", "--search", "x"], "--search looks through all pages"),
        (["--search", " "], "--search needs at least one word"),
    ],
)
def test_misuse(folder: Path, arguments: list[str], error: str) -> None:
    answer = call("docs", *arguments)
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith(f"perdure: {error}")


def test_a_search_finds_the_parts_with_all_words_the_best_first(folder: Path) -> None:
    found = json.loads(call("docs", "--search", "tokens TENANT", "--json").out)
    assert found == [
        {"page": "how-to/limits#per-customer", "heading": "Per customer", "line": "Tokens by tenant."},
    ]
    assert [one["page"] for one in json.loads(call("docs", "--search", "tokens", "--json").out)] == [
        "first",
        "how-to/limits",
        "how-to/limits#per-customer",
    ]
    nothing = call("docs", "--search", "hidden")
    assert (nothing.code, nothing.out) == (0, "")
    assert "no page has all of these words" in nothing.err


def test_of_a_long_line_a_search_prints_what_is_around_the_words(folder: Path) -> None:
    page = folder / docs.FOLDER / "first.md"
    page.write_text("# First\n\n" + "before " * 100 + "needle" + " after" * 100 + "\n")
    (found,) = json.loads(call("docs", "--search", "needle", "--json").out)
    assert len(found["line"]) < 200
    assert "before needle after" in found["line"]
    assert found["line"].startswith("...")
    assert found["line"].endswith("...")


def test_the_index_and_the_list_for_agents_are_pages(folder: Path) -> None:
    (folder / "llms.txt").write_text("# Perdure\n")
    assert call("docs", "README").out == INDEX
    assert call("docs", "llms.txt").out == "# Perdure\n"
    assert call("docs", "llms.txt", "--path").out == f"{folder / 'llms.txt'}\n"


def test_links_to_what_the_installation_does_not_have_are_texts(folder: Path) -> None:
    page = folder / docs.FOLDER / "first.md"
    code = "`call[x](y)`\n\n```python\ncall[x](y)\n```\n"
    links = "[a](how-to/limits.md#rates) [b](../tests/x.md#y) ![c](c.png) [d](https://d.org/) [e](#e) [`f`](f.py)\n"
    page.write_text(links + code)
    assert call("docs", "first").out == "[a](how-to/limits.md#rates) b c [d](https://d.org/) [e](#e) `f`\n" + code


def test_path_prints_where_the_files_are(folder: Path) -> None:
    assert call("docs", "--path").out == f"{folder}/docs\n"
    assert call("docs", "first", "--path").out == f"{folder / docs.FOLDER / 'first.md'}\n"
    assert call("docs", "examples", "--path").out == f"{folder}/examples/README.md\n"


def test_an_installation_without_pages_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    answer = call("docs", "limits")
    assert (answer.code, answer.out) == (1, "")
    assert answer.err == (
        f"perdure: this installation has no documentation: {tmp_path}/docs/README.md is missing; "
        "install the wheel of the release\n"
    )


def test_every_page_and_every_heading_of_the_documentation_is_printed() -> None:
    index = (ROOT / "docs" / "README.md").read_text("utf-8")
    for page in docs.pages(index):
        text = docs.without_comments((ROOT / page.path).read_text("utf-8"))
        parts = list(docs.passages(text))
        assert "\n\n".join(part.text for part in parts) == text.rstrip(), page.path
    assert "### perdure docs\n" in call("docs", "cli#perdure-docs").out
