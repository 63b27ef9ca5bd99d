"""Tables that fit the terminal, and tables that do not."""

from __future__ import annotations

import pytest
from perdure.worker.cli.support import output
from rich.console import Console

COLUMNS = ("id", "state", "crashes#", "error")
ROWS = [("01980f2e-7f6a-7c41", "succeeded", "0", "-"), ("01980f2e-7f6a-7c42", "dead", "3", "it cannot be read")]


def shown(patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int) -> list[str]:
    patch.setattr(output, "stdout", lambda: Console(width=width, markup=False, highlight=False, emoji=False))
    output.print_table(COLUMNS, ROWS)
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def test_a_table_that_fits_has_a_line_for_each_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = shown(monkeypatch, capsys, 80)
    assert lines[0].split() == ["id", "state", "crashes", "error"]
    assert lines[3] == "01980f2e-7f6a-7c42  dead             3  it cannot be read"


def test_the_last_column_wraps_at_words(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(monkeypatch, capsys, 54)
    assert [line.split() for line in lines[3:]] == [["01980f2e-7f6a-7c42", "dead", "3", "it", "cannot", "be"], ["read"]]


def test_a_table_that_does_not_fit_has_a_line_for_each_value(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = shown(monkeypatch, capsys, 40)
    assert lines[:5] == ["id       01980f2e-7f6a-7c41", "state    succeeded", "crashes  0", "error    -", ""]
    assert lines[-1] == "error    it cannot be read"
    assert all(len(line) <= 40 for line in lines)
