"""Output of the commands: data on stdout, as tables or JSON; messages and a progress bar on stderr.

Text from tasks is untrusted: everything that a command prints goes through this module, which escapes what a terminal
would interpret (see worker/shown_text.py). In JSON it is escaped as \\uXXXX, so that programs read the same value.
"""

from __future__ import annotations

import asyncio
import codecs
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from operator import itemgetter
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Generic, NamedTuple, Self, TextIO, TypeAlias, TypeVar

import orjson
import typer

from ....queues.wording import duration
from ...shown_text import clean, clean_json, encode

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.progress import Progress
    from rich.table import Table as RichTable
    from rich.text import Text

R = TypeVar("R")

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]

_STATE_STYLES = {
    "queued": "cyan",
    "scheduled": "blue",
    "limited": "blue",
    "waiting": "blue",
    "running": "yellow",
    "succeeded": "green",
    "dead": "red",
    "cancelled": "magenta",
}

_LARGEST_FLOAT: Final = 10**300


def _json(data: Any, option: int = 0) -> str:
    """Return JSON in which characters that a terminal interprets are escaped."""
    return clean_json(encode(data, option))


def note(message: str) -> None:
    """Print a message on stderr, after the program's name."""
    typer.echo(f"perdure: {clean(message)}", err=True)


def print_text(text: str) -> None:
    """Print text on stdout, such as an id or a path."""
    typer.echo(clean(text))


def confirm(question: str) -> bool:
    """Ask on stderr, and return the answer."""
    return typer.confirm(clean(question), err=True)


class CleanStdout:
    """Stdout for bytes: a pipe or a file gets them unchanged, a terminal gets clean text."""

    def __init__(self) -> None:
        sys.stdout.flush()
        self._terminal = sys.stdout.isatty()
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def write(self, data: bytes) -> int:
        if self._terminal:
            sys.stdout.write(clean(self._decode(data)))
        else:
            sys.stdout.buffer.write(data)
        return len(data)

    def fileno(self) -> int:
        return sys.stdout.buffer.fileno()

    def flush(self) -> None:
        sys.stdout.flush()
        sys.stdout.buffer.flush()


def print_json(data: Any) -> None:
    """Print one JSON document."""
    typer.echo(_json(data, orjson.OPT_INDENT_2))


def print_json_lines(documents: Iterable[Any], file: TextIO | None = None) -> None:
    """Print JSON documents, one per line, on stdout or to a file."""
    if lines := "\n".join(map(_json, documents)):
        typer.echo(lines, file=file)


class JsonArray:
    """A JSON document that is an array, printed part by part."""

    def __init__(self) -> None:
        self._begun = False

    def add(self, documents: Iterable[Any]) -> None:
        """Print the next members."""
        for document in documents:
            text = _json(document, orjson.OPT_INDENT_2).replace("\n", "\n  ")  # a text in JSON has no line break
            typer.echo(f"{',' if self._begun else '['}\n  {text}", nl=False)
            self._begun = True

    def end(self) -> None:
        """Print the end of the array."""
        typer.echo("\n]" if self._begun else "[]")


def stdout() -> Console:
    """Return a console that prints clean text, without a line limit if stdout is no terminal."""
    console = _console_type()(markup=False, highlight=False, emoji=False)
    if console.is_terminal:
        return console
    return _console_type()(markup=False, highlight=False, emoji=False, width=_WIDEST)


@cache
def _console_type() -> type[Console]:
    """Return the console whose text is clean, whatever its caller has forgotten."""
    from rich.console import Console

    class CleanConsole(Console):
        def render(self, *given: Any, **options: Any) -> Iterable[Any]:
            for segment in super().render(*given, **options):
                yield segment if segment.control else segment._replace(text=clean(segment.text))

    return CleanConsole


_WIDEST: Final = 10_000
"""Characters of a line."""


class Styled(NamedTuple):
    """Text with a style of rich, such as a colour."""

    text: str
    style: str = ""


class Time(NamedTuple):
    """Time of Redis in milliseconds. A table shows it relative to now, fields also as a date. more: text after it."""

    ms: int | None
    more: str = ""


Value: TypeAlias = "str | int | Styled | Time | Sequence[str] | None"
"""Content of a cell or a field. A sequence has a line for each item."""


@dataclass(frozen=True, slots=True)
class Column(Generic[R]):
    """A column of a table.

    Args:
        cell: Returns the content of a row. A line break in it is printed as a space; None as `-`.
        right: Whether it is right-aligned.
        wide: Whether it is shown with `--wide` only.
        least: Width to which it may be narrowed if the table does not fit the terminal; None: never.
        fold: Whether a longer cell continues on the next line, because it is useless if it is cut.
    """

    name: str
    cell: Callable[[R], Value]
    right: bool = False
    wide: bool = False
    least: int | None = None
    fold: bool = False


class Table(Generic[R]):
    """Rows with their columns."""

    def __init__(self, columns: Sequence[Column[R]], rows: Iterable[R]) -> None:
        self.columns = columns
        self.rows = list(rows)


def table(names: Sequence[str], rows: Iterable[Sequence[Value]]) -> Table[Sequence[Value]]:
    """Return a table of rows that are sequences. A name with `#` is right-aligned; the last column wraps."""
    columns: list[Column[Sequence[Value]]] = [
        Column(name.removesuffix("#"), itemgetter(position), right=name.endswith("#"))
        for position, name in enumerate(names)
    ]
    columns[-1] = replace(columns[-1], least=None if columns[-1].right else _LAST, fold=True)
    return Table(columns, rows)


_LAST: Final = 12
"""Width to which the last column of a table is narrowed."""


class StderrText(str):
    """Text for stderr in place of output."""

    __slots__ = ()


Part: TypeAlias = "str | Styled | Mapping[str, Value] | Table[Any]"
"""Part of an output: lines of text, a heading, fields, or a table."""


def print_parts(parts: Iterable[Part], now: int = 0, *, wide: bool = False) -> None:
    """Print parts for people. now: time in milliseconds, to which times are relative."""
    for part in parts:
        if isinstance(part, StderrText):
            note(part)
        elif isinstance(part, str):
            print_text(part)
        else:
            console = stdout()
            console.print(_drawn(part, now, console.width, wide))


def rendered(parts: Sequence[Part], now: int, *, width: int, wide: bool = False) -> RenderableType:
    """Return parts as one object for a console."""
    from rich.console import Group

    return Group(*(_drawn(part, now, width, wide) for part in parts))


def _drawn(part: Part, now: int, width: int, wide: bool) -> RenderableType:
    from rich.text import Text

    if isinstance(part, str):
        return Text(clean(part))
    if isinstance(part, Styled):
        return Text(clean(part.text), part.style)
    if isinstance(part, Table):
        return list_table(part.columns, part.rows, width=width, wide=wide, now=now)
    given = ((name, _field(value, now)) for name, value in part.items())
    return fields_table((name, text) for name, text in given if text is not None)


def _field(value: Value, now: int) -> Text | None:
    """Return the text of a field, or None for a field without content."""
    from rich.text import Text

    if isinstance(value, Styled):
        return Text(clean(value.text), value.style)
    if isinstance(value, Time):
        return None if value.ms is None else Text(clean(f"{timestamp(value.ms)} ({ago(now)(value.ms)}){value.more}"))
    if value is None or value in ([], ()):
        return None
    return Text(clean(value if isinstance(value, str) else str(value) if isinstance(value, int) else "\n".join(value)))


def _cell(value: Value, now: int) -> Text:
    from rich.text import Text

    style = ""
    if isinstance(value, Styled):
        value, style = value
    elif isinstance(value, Time):
        value = f"{ago(now, whole=True)(value.ms)}{value.more}"
    text = "-" if value is None else str(value) if isinstance(value, (str, int)) else ", ".join(value)
    return Text(" ".join(clean(text).split()), style)


def print_table(names: Sequence[str], rows: Iterable[Sequence[Value]]) -> None:
    """Print a table: see `table`."""
    print_parts([table(names, rows)])


def print_fields(fields: Mapping[str, Value]) -> None:
    """Print names and values, one pair per line, without those that are None."""
    print_parts([fields])


def fields_table(fields: Iterable[tuple[str, Text]]) -> RichTable:
    """Return names and values, one pair per line."""
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in fields:
        grid.add_row(Text(clean(name)), value)
    return grid


_GAP: Final = 2
"""Characters between two columns."""


def list_table(
    columns: Sequence[Column[R]], rows: Iterable[R], *, width: int, wide: bool = False, now: int = 0
) -> RenderableType:
    """Return the table of a list in at most `width` characters.

    Where the columns do not fit, even narrowed, or with `wide` unnarrowed, each row is a list of names and values.
    """
    return _next_rows(columns, rows, [], width=width, wide=wide, now=now)


def _next_rows(
    columns: Sequence[Column[R]], rows: Iterable[R], natural: list[int], *, width: int, wide: bool, now: int
) -> RenderableType:
    """Return the next rows of a table, the first ones with the names of the columns.

    natural: widths of the columns so far, which are updated; empty before the first rows.
    """
    from rich.box import SIMPLE_HEAD
    from rich.cells import cell_len
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    shown = [column for column in columns if wide or not column.wide]
    cells = [[_cell(column.cell(row), now) for column in shown] for row in rows]
    first = not natural
    former = [cell_len(column.name) for column in shown] if first else natural
    natural[:] = [
        max(least, *(row[at].cell_len for row in cells)) if cells else least for at, least in enumerate(former)
    ]
    widths = natural if wide else _narrowed(shown, natural, width)
    if _total(widths) > width:
        blocks = _blocks([column.name for column in shown], cells)
        return Group(*blocks) if first else Group("", *blocks)
    grid = Table(
        box=SIMPLE_HEAD,
        show_edge=False,
        show_header=first,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        header_style="bold",
    )
    for column, cut in zip(shown, widths, strict=True):
        grid.add_column(
            Text(column.name, no_wrap=True, overflow="ellipsis"),
            justify="right" if column.right else "left",
            width=cut,
            no_wrap=not column.fold,
            overflow="fold" if column.fold else "ellipsis",
        )
    for row in cells:
        grid.add_row(*row)
    return grid


class LongTable(Generic[R]):
    """A table that is printed part by part. A column grows with the cells that come; none is cut for that."""

    def __init__(self, columns: Sequence[Column[R]], now: int, *, wide: bool) -> None:
        self._columns = columns
        self._now = now
        self._wide = wide
        self._natural: list[int] = []
        self._console: Console | None = None

    def add(self, rows: Sequence[R]) -> None:
        """Print the next rows, the first ones with the names of the columns."""
        console = self._console = self._console or stdout()
        form = {"width": console.width, "now": self._now}
        console.print(_next_rows(self._columns, rows, self._natural, wide=self._wide, **form))


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + _GAP * (len(widths) - 1)


def _narrowed(columns: Sequence[Column[Any]], natural: Sequence[int], width: int) -> list[int]:
    """Return the widths that fit, or the least ones. The widest column is narrowed first, a folded one last."""
    widths = list(natural)
    for fold in (False, True):
        while _total(widths) > width:
            spare = [
                (widths[at], at)
                for at, column in enumerate(columns)
                if column.fold is fold and column.least is not None and widths[at] > column.least
            ]
            if not spare:
                break
            widths[max(spare)[1]] -= 1
    return widths


def _blocks(names: Sequence[str], cells: Sequence[Sequence[Text]]) -> Iterable[RenderableType]:
    for position, row in enumerate(cells):
        if position:
            yield ""
        yield fields_table(zip(names, row, strict=True))


def state_text(state: str) -> Styled:
    """Return a task's state in its colour."""
    return Styled(state, _STATE_STYLES.get(state, ""))


def ago(now_ms: int, *, whole: bool = False) -> Callable[[int | None], str]:
    """Return a function that formats a Redis time in milliseconds relative to `now_ms`. whole: see `duration`."""

    def relative(at: int | None) -> str:
        if at is None:
            return "-"
        distance = (now_ms - at) / 1000
        text = duration(abs(distance), whole=whole)
        return f"{text} ago" if distance >= 0 else f"in {text}"

    return relative


def timestamp(at: int | None) -> str | None:
    """Return a Redis time in milliseconds as local time; one that no calendar has as a number of milliseconds."""
    if at is None:
        return None
    try:
        return datetime.fromtimestamp(at / 1000, UTC).astimezone().isoformat(" ", "milliseconds")
    except (OSError, OverflowError, ValueError):
        return f"{at:g} ms" if abs(at) < _LARGEST_FLOAT else "?"


_INTERRUPTIONS: Final = (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt)
"""Errors that end a command which a signal interrupts, or whose output is not read."""


class Bar:
    """Counter with a progress bar on stderr. If the command is interrupted, it prints how far it was.

    The bar appears if stderr is a terminal and the command takes longer than a second. If stdout is a terminal too,
    there is no bar, because the printed ids show the progress.

    Args:
        total: None if unknown; the attribute may be set until the bar appears.
        rest: How to go on after an interruption; None if another message says it all.
    """

    shown_after: ClassVar[float] = 1.0
    """Seconds until the bar appears."""

    def __init__(self, what: str, total: int | None = None, *, rest: str | None = "") -> None:
        self.done = 0
        self._what = what
        self._rest = rest
        self.total = total
        self._started = time.monotonic()
        self._console = _console_type()(stderr=True)
        self._wanted = self._console.is_terminal and not sys.stdout.isatty()
        self._progress: Progress | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
        if self._rest is not None and kind is not None and issubclass(kind, _INTERRUPTIONS):
            of = "" if self.total is None else f" of {self.total:,}"
            note(f"interrupted: {self._what} stopped after {self.done:,}{of}{self._rest and f'; {self._rest}'}")

    def advance(self, count: int = 1) -> None:
        self.done += count
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=self.done)
        elif self._wanted and time.monotonic() - self._started > self.shown_after:
            self._progress = self._show()

    def _show(self) -> Progress:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        progress = Progress(*columns, console=self._console, transient=True, redirect_stdout=False)
        progress.add_task(self._what, total=self.total, completed=self.done)
        progress.start()
        return progress
