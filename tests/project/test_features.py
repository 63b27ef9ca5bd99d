"""Comparisons with other systems: each claim has a source, and what the cells of Perdure name exists."""

from __future__ import annotations

import re
from typing import Any

import perdure
import perdure.otel
import pytest

from tests.support.command_line import call
from tests.support.paths import ROOT

SYSTEMS = {"features": 14, "dashboards": 7}
"""Number of other systems by page."""

PAGES = {name: (ROOT / "docs" / "explanation" / f"{name}.md").read_text("utf-8") for name in SYSTEMS}


def rows(page: str) -> list[list[str]]:
    found = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in PAGES[page].splitlines()]
    return [cells for cells in found if cells[0].strip("| ").isdigit()]


def systems(page: str) -> list[str]:
    (header,) = {line for line in PAGES[page].splitlines() if line.startswith("| | | Perdure")}
    return [cell.strip() for cell in header.strip("|").split("|")][3:]


def sources(page: str) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for name, text in re.findall(r"^\*\*([\w. ]+)\*\* (.*)$", PAGES[page], re.MULTILINE):
        numbers = re.findall(r"(?:^|[.;] )([\d, ]+): ", text)
        found[name] = {int(number) for group in numbers for number in group.split(",")}
    return found


@pytest.mark.parametrize("page", PAGES)
def test_the_rows_are_numbered_and_have_a_cell_for_each_system(page: str) -> None:
    table = rows(page)
    assert [int(cells[0]) for cells in table] == list(range(1, len(table) + 1))
    assert len(systems(page)) == SYSTEMS[page]
    assert {len(cells) for cells in table} == {3 + SYSTEMS[page]}
    assert {cell for cells in table for cell in cells[3:]} == {"yes", "part", "no", "?"}


@pytest.mark.parametrize(("page", "system"), [(page, system) for page in PAGES for system in systems(page)])
def test_each_claim_has_a_source_and_each_source_a_claim(page: str, system: str) -> None:
    column = 3 + systems(page).index(system)
    claimed = {int(cells[0]) for cells in rows(page) if cells[column] in ("yes", "part")}
    assert sources(page)[system] == claimed


def test_what_perdure_is_said_to_have_is_there() -> None:
    named = "\n".join(cells[2] for page in PAGES for cells in rows(page))
    commands = set(re.findall(r"`perdure ([a-z ]+)`", named))
    assert commands
    for command in commands:
        assert call(*command.split(), "--help").code == 0, command
    others = {name for name in re.findall(r"`([A-Z]\w+)", named) if not name.startswith("perdure")}
    assert others
    for name in others:
        assert any(getattr(module, name, None) is not None for module in (perdure, perdure.otel)), name
    context: Any = perdure.Context
    for name in set(re.findall(r"`ctx\.(\w+)", named)):
        assert hasattr(context, name), name


@pytest.mark.parametrize("page", PAGES)
def test_what_perdure_has_not_is_said(page: str) -> None:
    assert [cells for cells in rows(page) if cells[2] == "no"]
    assert all(cells[2] == "no" or cells[2].startswith("[") for cells in rows(page))
