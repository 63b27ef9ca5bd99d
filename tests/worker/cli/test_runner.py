"""The runner of the commands: options by the type of the result, and what it prints."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Final

import pytest
import typer
from perdure.worker.cli.support.errors import Failed, Misuse
from perdure.worker.cli.support.output import Column, StderrText, Styled, Time
from perdure.worker.cli.support.runner import (
    Listing,
    LiveListing,
    LongListing,
    OptionGroup,
    Output,
    Resource,
    Screen,
    command,
    line,
)

NOW: Final = 1_764_000_000_000


@dataclass
class Row:
    name: str
    at: int | None = None

    def summary(self) -> dict[str, Any]:
        return {"name": self.name}


COLUMNS: Sequence[Column[Row]] = (
    Column("name", lambda row: row.name),
    Column("seen", lambda row: Time(row.at), wide=True),
)


@dataclass(frozen=True)
class Choice(OptionGroup):
    name: Annotated[str, typer.Argument(metavar="NAME")]
    tag: Annotated[str | None, typer.Option(metavar="TAG")] = None


def options(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(command(function)).parameters)


def test_the_type_of_the_result_adds_the_options() -> None:
    async def document() -> Output:
        return Output(None)

    async def listing() -> Listing:
        return Listing(COLUMNS, [], empty=None)

    async def live() -> LiveListing:
        return LiveListing(COLUMNS, [], empty=None)

    async def screen() -> Screen:
        return Screen(None)

    async def nothing() -> None:
        return None

    async def lines() -> AsyncIterator[Output]:
        yield line({}, "")

    assert options(document) == ["json"]
    assert options(listing) == ["wide", "json"]
    assert options(live) == ["wide", "watch", "json"]
    assert options(screen) == ["wide", "json"]
    assert options(nothing) == []
    assert options(lines) == ["json"]


def test_a_function_that_declares_an_added_option_receives_it(capsys: pytest.CaptureFixture[str]) -> None:
    async def declaring(*, json: bool = False) -> Output:
        return Output({"json": json}, str(json))

    command(declaring)(json=False)
    command(declaring)(json=True)
    text, document = capsys.readouterr().out.split("\n", 1)
    assert text == "False"
    assert json.loads(document) == {"json": True}


def test_a_group_stands_for_its_options_at_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    async def chosen(choice: Choice, step: str, *, by: str | None = None) -> Output:
        return Output(None, f"{choice.name} {choice.tag} {step} {by}")

    assert options(chosen) == ["name", "tag", "step", "by", "json"]
    command(chosen)(name="a", tag="b", step="c", by="d", json=False)
    assert capsys.readouterr().out == "a b c d\n"


def test_rows_are_a_table_or_their_summaries(capsys: pytest.CaptureFixture[str]) -> None:
    async def listed() -> Listing:
        return Listing(COLUMNS, [Row("a"), Row("b")], empty="no rows", notes=["more", None])

    command(listed)(wide=False, json=False)
    shown = capsys.readouterr()
    assert [cell.strip() for cell in shown.out.splitlines()][0::2] == ["name", "a"]
    assert shown.err == "perdure: more\n"
    command(listed)(wide=False, json=True)
    shown = capsys.readouterr()
    assert json.loads(shown.out) == [{"name": "a"}, {"name": "b"}]
    assert shown.err == "perdure: more\n"


def test_without_rows_the_message_is_for_people_only(capsys: pytest.CaptureFixture[str]) -> None:
    async def listed() -> Listing:
        return Listing(COLUMNS, [], empty="no rows")

    command(listed)(wide=False, json=False)
    assert capsys.readouterr() == ("", "perdure: no rows\n")
    command(listed)(wide=False, json=True)
    assert capsys.readouterr() == ("[]\n", "")


def test_a_resource_is_open_during_the_call_and_its_clock_dates_the_times(capsys: pytest.CaptureFixture[str]) -> None:
    states: list[str] = []

    @asynccontextmanager
    async def opened(choice: Choice) -> AsyncIterator[str]:
        states.append("open")
        yield choice.name
        states.append("closed")

    async def now(resource: str) -> int:
        assert states == ["open"]
        return NOW

    async def listed(resource: str) -> Listing:
        return Listing(COLUMNS, [Row(resource, NOW - 180_000)], empty=None)

    command(listed, Resource(Choice, opened, now))(name="a", tag=None, wide=True, json=False)
    assert states == ["open", "closed"]
    assert capsys.readouterr().out.splitlines()[-1].split() == ["a", "3", "min", "ago"]


def test_lines_are_printed_as_they_come(capsys: pytest.CaptureFixture[str]) -> None:
    printed: list[str] = []

    async def counted() -> AsyncIterator[Output]:
        for number in range(2):
            printed.append(capsys.readouterr().out)
            yield line({"number": number}, str(number))

    command(counted)(json=False)
    assert (printed, capsys.readouterr().out) == (["", "0\n"], "1\n")
    command(counted)(json=True)
    assert [json.loads(text) for text in (printed[-1], capsys.readouterr().out)] == [{"number": 0}, {"number": 1}]


def test_a_failure_is_raised_after_the_output(capsys: pytest.CaptureFixture[str]) -> None:
    def failing() -> Output:
        return Output({"state": "dead"}, {"state": Styled("dead", "red"), "none": None}, failure=Failed("it is dead"))

    for as_json, wanted in ((False, "state  dead"), (True, '{\n  "state": "dead"\n}')):
        with pytest.raises(Failed, match="it is dead"):
            command(failing)(json=as_json)
        assert capsys.readouterr().out.strip() == wanted


def test_a_message_among_the_parts_is_for_people_only(capsys: pytest.CaptureFixture[str]) -> None:
    def said() -> Output:
        return Output({}, "id", StderrText("stored"))

    command(said)(json=False)
    assert capsys.readouterr() == ("id\n", "perdure: stored\n")
    command(said)(json=True)
    assert capsys.readouterr() == ("{}\n", "")


def test_a_live_view_as_json_is_misuse() -> None:
    calls: Iterator[int] = iter(range(1))

    async def listed() -> LiveListing:
        next(calls)
        return LiveListing(COLUMNS, [], empty=None)

    with pytest.raises(Misuse, match="give one of them"):
        command(listed)(wide=False, watch=True, json=True)
    assert next(calls) == 0, "the function is not called"


# long lists


def long_list(count: int, read: list[int] | None = None, name: str = "row") -> Callable[..., None]:
    """Return a command that lists so many rows. read: gets the number of each row when it is read."""

    async def rows() -> AsyncIterator[Row]:
        for number in range(count):
            if read is not None:
                read.append(number)
            yield Row(f"{name} {number}", NOW)

    async def listing() -> LongListing:
        return LongListing(COLUMNS, rows(), empty="no rows", ended=lambda: [f"{count} rows"])

    return command(listing)


@pytest.mark.parametrize("count", [0, 1, 3, 1200])
def test_a_long_list_prints_the_same_json_as_a_short_one(capsys: pytest.CaptureFixture[str], count: int) -> None:
    async def listing() -> Listing:
        return Listing(COLUMNS, [Row(f"row {number}", NOW) for number in range(count)], empty=None)

    command(listing)(json=True, wide=False)
    expected = capsys.readouterr().out
    long_list(count)(json=True, wide=False, watch=False)
    answer = capsys.readouterr()
    assert answer.out == expected
    assert answer.err == f"perdure: {count} rows\n"


def test_a_long_list_is_one_table_and_names_its_columns_once(capsys: pytest.CaptureFixture[str]) -> None:
    long_list(1200)(json=False, wide=True, watch=False)
    head, rule, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["name", "seen"]
    assert set(rule) == {"─"}
    assert [row.split()[1] for row in rows] == [str(number) for number in range(1200)]


def test_a_long_list_cuts_no_later_cell_that_is_longer(capsys: pytest.CaptureFixture[str]) -> None:
    async def rows() -> AsyncIterator[Row]:
        for number in range(600):
            yield Row("x" * number)

    async def listing() -> LongListing:
        return LongListing(COLUMNS, rows(), empty=None)

    command(listing)(json=False, wide=False, watch=False)
    assert [len(row.strip()) for row in capsys.readouterr().out.splitlines()[3:]] == list(range(1, 600))


@pytest.mark.parametrize("json", [False, True])
def test_the_first_rows_of_a_long_list_are_printed_before_the_last_ones_are_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], json: bool
) -> None:
    read: list[int] = []
    seen: list[int] = []
    write = sys.stdout.write

    def counted(text: str) -> int:
        seen.append(len(read))
        return write(text)

    monkeypatch.setattr(sys.stdout, "write", counted)
    long_list(5000, read)(json=json, wide=False, watch=False)
    capsys.readouterr()
    assert seen[0] <= 50
    assert len(read) == 5000


def test_an_empty_long_list_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    long_list(0)(json=False, wide=False, watch=False)
    answer = capsys.readouterr()
    assert (answer.out, answer.err) == ("", "perdure: no rows\nperdure: 0 rows\n")
