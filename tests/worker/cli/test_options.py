"""Durations and points in time in options: one form for all commands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import typer
from perdure.queues.durations import FutureTime, PointInTime
from perdure.worker.cli import commands
from perdure.worker.cli.lazy import LazyCommand
from perdure.worker.cli.support.options import read_duration, read_future, read_time

SECONDS = {
    "90": 90.0,
    "1.5": 1.5,
    "90s": 90.0,
    "15m": 900.0,
    "30min": 1800.0,
    "2h": 7200.0,
    "1.5 h": 5400.0,
    "7d": 604_800.0,
    "2w": 1_209_600.0,
    "1h30m": 5400.0,
    "1 h 30 min": 5400.0,
    "1d2h": 93_600.0,
    "500ms": 0.5,
    "0": 0.0,
}


@pytest.mark.parametrize(("text", "seconds"), SECONDS.items())
def test_a_duration_has_the_same_form_in_every_option(text: str, seconds: float) -> None:
    assert read_duration(text) == seconds
    assert read_time(text) == PointInTime(ago=seconds)
    assert read_future(text) == FutureTime(seconds)


@pytest.mark.parametrize("text", ["", "soon", "-1", "nan", "inf", "15 minutes", "m", "1y", "1h30", "1e3", "9" * 400])
def test_other_durations_are_refused(text: str) -> None:
    for read in (read_duration, read_time, read_future):
        with pytest.raises(typer.BadParameter, match=re.escape(f"got {text!r}")):
            read(text)
    with pytest.raises(typer.BadParameter, match="greater than 0"):
        read_duration("0m", positive=True)


def test_a_time_is_an_iso_date_or_time_in_every_option() -> None:
    for text in ("1970-01-02T01:00:00.5+01:00", "1970-01-02 00:00:00.5Z"):
        assert read_future(text).from_now(86_400_000) == 0.5
        assert read_future(text).from_now(86_500_000) == 0.0
        assert read_time(text).at(0) == 86_400_500
    local = "2026-11-22T18:00"
    assert read_future(local).ms == read_time(local).ms == datetime.fromisoformat(local).timestamp() * 1000
    for read in (read_time, read_future):
        with pytest.raises(typer.BadParameter, match="7d, or an ISO time such as 2026-11-22T18:00; got"):
            read("2026-13-22T18:00Z")


def every_option() -> Iterator[tuple[str, Any]]:
    """All options and arguments of all commands, by the command and their name."""
    left: list[tuple[str, Any]] = [("perdure", commands)]
    while left:
        path, command = left.pop()
        command = command.fetch() if isinstance(command, LazyCommand) else command
        left += [(f"{path} {name}", one) for name, one in getattr(command, "commands", {}).items()]
        yield from ((f"{path} {parameter.opts[0]}", parameter) for parameter in command.params)


OPTIONS = dict(every_option())
TIMES = {name: option for name, option in OPTIONS.items() if option.metavar in ("DURATION", "TIME")}
TIME_WORDS = re.compile(
    r"(delay|every|expires|grace|interval|jitter|lease|\bolder\b|poll|seconds|since|timeout|ttl|until|wait-limit|window)"
)
FLOATS = {
    "perdure budget raise --dollars",
    "perdure memory add --importance",
    "perdure memory prune --below",
    "perdure memory search --floor",
}
"""Options that are floats and no times."""


def parser_of(option: Any) -> Any:
    return option.type_descriptor.parameter_info.parser


def test_there_are_times() -> None:
    assert len(TIMES) > 30
    assert {"perdure worker run --lease", "perdure enqueue --delay", "perdure limit hold seconds"} <= set(TIMES)


def test_options_named_as_times_are_times() -> None:
    for name, option in OPTIONS.items():
        if TIME_WORDS.search(name.rpartition(" ")[2]) and not getattr(option, "is_flag", False):
            assert name in TIMES, f"{name} must have the metavar DURATION or TIME"


def test_options_that_are_numbers_of_something_else_are_known() -> None:
    for name, option in OPTIONS.items():
        if option.type_descriptor.annotation is float and name not in TIMES and parser_of(option) is None:
            assert name in FLOATS, f"{name} takes a float: is it a time?"


def test_every_time_of_every_command_has_the_one_form() -> None:
    for name, option in TIMES.items():
        read, seconds = parser_of(option), [900.0, 7200.0, 86_400.0]
        found = [read(text) for text in ("15m", "2h", "1d")]
        if option.metavar == "TIME":
            assert found in ([PointInTime(one) for one in seconds], [FutureTime(one) for one in seconds]), name
            for text in ("2026-11-22", "2026-11-22T18:00", "2026-11-22T18:00Z", "2026-11-22T18:00+01:00"):
                assert read(text).ms, name
        else:
            assert found in (seconds, [one * 1000 for one in seconds]), name  # budgets count milliseconds
        for text in ("soon", "1y", "-1"):
            with pytest.raises(typer.BadParameter, match="15m"):
                read(text)


def test_no_command_has_a_parser_of_its_own() -> None:
    folder = Path(__file__).parents[3] / "worker" / "cli"
    own = [path for path in folder.rglob("*.py") if path.name != "options.py"]
    assert own
    assert not [path.name for path in own if "fromisoformat" in path.read_text("utf-8")]
