"""Durations and points in time in options: one form for all commands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer
from perdure.queues.durations import PointInTime
from perdure.worker.cli.support.options import Delay, read_delay, read_duration, read_time

SECONDS = {
    "90": 90.0,
    "1.5": 1.5,
    "90s": 90.0,
    "15m": 900.0,
    "30min": 1800.0,
    "2h": 7200.0,
    "1.5 h": 5400.0,
    "7d": 604_800.0,
    "0": 0.0,
}


@pytest.mark.parametrize(("text", "seconds"), SECONDS.items())
def test_a_duration_has_the_same_form_in_every_option(text: str, seconds: float) -> None:
    assert read_duration(text) == seconds
    assert read_time(text) == PointInTime(ago=seconds)
    assert read_delay(text) == Delay(seconds)


@pytest.mark.parametrize("text", ["", "soon", "-1", "nan", "inf", "15 minutes", "m", "1w", "1e3", "9" * 400])
def test_other_durations_are_refused(text: str) -> None:
    for read in (read_duration, read_time, read_delay):
        with pytest.raises(typer.BadParameter, match=re.escape(f"got {text!r}")):
            read(text)
    with pytest.raises(typer.BadParameter, match="greater than 0"):
        read_duration("0m", positive=True)


def test_a_delay_may_be_a_time_with_a_zone() -> None:
    for text in ("1970-01-02T01:00:00.5+01:00", "1970-01-02 00:00:00.5Z"):
        assert read_delay(text).from_now(86_400_000) == 0.5
        assert read_delay(text).from_now(86_500_000) == 0.0
    with pytest.raises(typer.BadParameter, match="must have a time zone, such as 2026-11-22T18:00Z"):
        read_delay("2026-11-22T18:00")
    with pytest.raises(typer.BadParameter, match="must be an ISO 8601 time"):
        read_delay("2026-13-22T18:00Z")


def test_no_command_has_a_parser_of_its_own() -> None:
    folder = Path(__file__).parents[3] / "worker" / "cli"
    own = [path for path in folder.rglob("*.py") if path.name != "options.py"]
    assert own
    assert not [path.name for path in own if "fromisoformat" in path.read_text("utf-8")]
