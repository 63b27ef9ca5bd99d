"""How things are shown: data on stdout, as tables for people or JSON for programs; talk on stderr.

Text that came from tasks may hold anything: control characters are shown, never sent to the terminal.

A progress bar on stderr, for what turns out to take its time.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from types import TracebackType
from typing import Annotated, Any, Final, Self, TextIO

import orjson
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from ....queues import plain_data

__all__ = [
    "AsJson",
    "Bar",
    "ago",
    "as_data",
    "clean",
    "duration",
    "note",
    "print_data",
    "print_fields",
    "print_json",
    "print_json_lines",
    "print_table",
    "print_text",
    "state_text",
    "stdout",
    "timestamp",
]

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]

_ACTS = r"\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff"
"""What a terminal acts upon beyond ASCII: control characters, and those that turn the direction of writing."""

_CONTROL = re.compile(rf"[\x00-\x08\x0b-\x1f{_ACTS}]")
_CONTROL_IN_JSON = re.compile(f"[{_ACTS}]")

_STATE_STYLES = {
    "queued": "cyan",
    "scheduled": "blue",
    "running": "yellow",
    "succeeded": "green",
    "dead": "red",
    "cancelled": "magenta",
}

_UNITS = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))


def clean(text: str) -> str:
    """The text with its control characters made visible; line breaks and tabs stay."""
    return _CONTROL.sub(lambda found: _escape(found[0], "\\x"), text)


def _escape(char: str, short: str) -> str:
    return f"{short}{ord(char):02x}" if ord(char) < 0x100 else f"\\u{ord(char):04x}"


def _json(data: Any, option: int = 0) -> str:
    """JSON that a terminal shows and does not act upon: what it would, is escaped."""
    return _CONTROL_IN_JSON.sub(lambda found: _escape(found[0], "\\u00"), orjson.dumps(data, option=option).decode())


def note(message: str) -> None:
    """Talk to the person: on stderr, under the program's name."""
    typer.echo(f"perdure: {clean(message)}", err=True)


def print_text(text: str) -> None:
    """Text for people, on stdout."""
    typer.echo(clean(text))


def print_data(text: str) -> None:
    """Data for a program, as it is: an id, a result."""
    typer.echo(text)


def print_json(data: Any) -> None:
    """One document."""
    typer.echo(_json(data, orjson.OPT_INDENT_2))


def print_json_lines(documents: Iterable[Any], file: TextIO | None = None) -> None:
    """Many documents, each in a line of its own, on stdout or in a file."""
    typer.echo("\n".join(map(_json, documents)), file=file)


def as_data(value: bytes | None) -> Any:
    """A stored JSON value as data; as text where it is none."""
    if value is None:
        return None
    try:
        return plain_data(value)
    except ValueError:
        return value.decode("utf-8", "replace")


def stdout() -> Console:
    """A console that takes text as it is; where no terminal cuts lines, they are as long as they need to be."""
    console = Console(markup=False, highlight=False, emoji=False)
    return console if console.is_terminal else Console(markup=False, highlight=False, emoji=False, width=_WIDEST)


_WIDEST: Final = 10_000
"""Characters of a line."""


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> None:
    """A table. A column whose name ends with `#` holds numbers; the last one is broken into lines where that is needed.

    Where the others do not fit side by side, each row has its names and values one below the other.
    """
    console = stdout()
    cells = [[Text(clean(cell)) if isinstance(cell, str) else cell for cell in row] for row in rows]
    names = [column.removesuffix("#") for column in columns]
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")
    for name, column in zip(names, columns, strict=True):
        right, last = column.endswith("#"), column is columns[-1]
        table.add_column(name, justify="right" if right else "left", no_wrap=right or not last, overflow="fold")
    for row in cells:
        table.add_row(*row)
    if table.__rich_measure__(console, console.options.update(max_width=_WIDEST)).minimum <= console.width:
        console.print(table)
    else:
        for position, row in enumerate(cells):
            console.print(*[""] * (position > 0), _fields(zip(names, row, strict=True)), sep="\n")


def print_fields(fields: Mapping[str, str | Text | None]) -> None:
    """Names and values, one below the other; what is None is left out."""
    told = ((name, value) for name, value in fields.items() if value is not None)
    stdout().print(_fields((name, Text(clean(value)) if isinstance(value, str) else value) for name, value in told))


def _fields(fields: Iterable[tuple[str, Text]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in fields:
        table.add_row(Text(clean(name)), value)
    return table


def state_text(state: str) -> Text:
    """A task's state in its colour."""
    return Text(state, style=_STATE_STYLES.get(state, ""))


def duration(seconds: float) -> str:
    """Seconds in the largest unit that leaves a number above one, and below a second in milliseconds."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    unit, size = next((unit, size) for unit, size in _UNITS if seconds >= size)
    return f"{seconds / size:.1f} {unit}" if seconds < 10 * size else f"{seconds / size:.0f} {unit}"


def ago(now_ms: int) -> Callable[[int | None], str]:
    """A function that tells a time in milliseconds of Redis' clock by its distance from `now_ms`."""

    def tell_distance(at: int | None) -> str:
        if at is None:
            return "-"
        distance = (now_ms - at) / 1000
        return f"{duration(distance)} ago" if distance >= 0 else f"in {duration(-distance)}"

    return tell_distance


def timestamp(at: int | None) -> str | None:
    """A time in milliseconds of Redis' clock as local time, to the millisecond."""
    if at is None:
        return None
    return datetime.fromtimestamp(at / 1000, UTC).astimezone().isoformat(" ", "milliseconds")


_SHOWN_AFTER: Final = 1.0
"""Seconds: what is done sooner needs no bar."""


class Bar:
    """Counts what is done, and shows it on a terminal once a second has passed.

    Where the ids that a command prints run over the same terminal there is no bar: they show that it goes on.
    """

    def __init__(self, what: str, total: int | None = None) -> None:
        """total: None where nobody knows it."""
        self.done = 0
        self._what = what
        self._total = total
        self._began = time.monotonic()
        self._console = Console(stderr=True)
        self._wanted = self._console.is_terminal and not sys.stdout.isatty()
        self._progress: Progress | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def advance(self, count: int = 1) -> None:
        self.done += count
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=self.done)
        elif self._wanted and time.monotonic() - self._began > _SHOWN_AFTER:
            self._progress = self._show()

    def _show(self) -> Progress:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        progress = Progress(*columns, console=self._console, transient=True, redirect_stdout=False)
        progress.add_task(self._what, total=self._total, completed=self.done)
        progress.start()
        return progress
