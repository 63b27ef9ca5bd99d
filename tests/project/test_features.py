"""docs/explanation/features.md: each cell that claims something has a source, and what Perdure's cells name exists."""

from __future__ import annotations

import re
from typing import Any

import perdure
import pytest

from tests.support.command_line import call
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "explanation" / "features.md").read_text("utf-8")


def rows() -> list[list[str]]:
    found = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in PAGE.splitlines()]
    return [cells for cells in found if cells[0].strip("| ").isdigit()]


def systems() -> list[str]:
    (header,) = {line for line in PAGE.splitlines() if line.startswith("| | | Perdure")}
    return [cell.strip() for cell in header.strip("|").split("|")][3:]


def sources() -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for name, text in re.findall(r"^\*\*(\w+)\*\* (.*)$", PAGE, re.MULTILINE):
        numbers = re.findall(r"(?:^|[.;] )([\d, ]+): ", text)
        found[name] = {int(number) for group in numbers for number in group.split(",")}
    return found


def test_the_rows_are_numbered_and_have_a_cell_for_each_system() -> None:
    table = rows()
    assert [int(cells[0]) for cells in table] == list(range(1, len(table) + 1))
    assert len(systems()) == 14
    assert {len(cells) for cells in table} == {3 + 14}
    assert {cell for cells in table for cell in cells[3:]} == {"yes", "part", "no", "?"}


@pytest.mark.parametrize("system", systems())
def test_each_claim_has_a_source_and_each_source_a_claim(system: str) -> None:
    column = 3 + systems().index(system)
    claimed = {int(cells[0]) for cells in rows() if cells[column] in ("yes", "part")}
    assert sources()[system] == claimed


def test_what_perdure_is_said_to_have_is_there() -> None:
    named = "\n".join(cells[2] for cells in rows())
    commands = set(re.findall(r"`perdure ([a-z ]+)`", named))
    assert commands
    for command in commands:
        assert call(*command.split(), "--help").code == 0, command
    others = {name for name in re.findall(r"`([A-Z]\w+)", named) if not name.startswith("perdure")}
    assert others
    for name in others:
        assert getattr(perdure, name, None) is not None, name
    context: Any = perdure.Context
    for name in set(re.findall(r"`ctx\.(\w+)", named)):
        assert hasattr(context, name), name


def test_what_perdure_has_not_is_said() -> None:
    assert [cells for cells in rows() if cells[2] == "no"]
    assert all(cells[2] == "no" or cells[2].startswith("[") for cells in rows())
