"""The runner of the commands: options by the type of the result, and what it prints."""

from __future__ import annotations

import inspect
import json
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
