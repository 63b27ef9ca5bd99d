"""Tables of the lists: one line per row, in the columns that matter and fit the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, Generic, TypeVar

import typer

from .output import fields_table, stdout
from .terminal import clean

if TYPE_CHECKING:  # rich is imported where a table is printed: a worker prints none
    from rich.console import RenderableType
    from rich.text import Text

R = TypeVar("R")

Wide = Annotated[bool, typer.Option("--wide", help="Print all columns, and no cell cut.")]

_GAP: Final = 2
"""Characters between two columns."""


@dataclass(frozen=True, slots=True)
class Column(Generic[R]):
    """A column of a list.

    Args:
        cell: Returns the text of a row. A line break in it is printed as a space.
        right: Whether it is right-aligned.
        wide: Whether it is shown with `--wide` only.
        least: Width to which it may be narrowed if the table does not fit the terminal; None: never.
        fold: Whether a longer cell continues on the next line, because it is useless if it is cut.
    """

    name: str
    cell: Callable[[R], str | Text]
    right: bool = False
    wide: bool = False
    least: int | None = None
    fold: bool = False


def print_list(columns: Sequence[Column[R]], rows: Iterable[R], *, wide: bool) -> None:
    """Print a list on stdout; without a terminal, no cell is cut."""
    console = stdout()
    console.print(list_table(columns, rows, wide=wide, width=console.width))


def list_table(columns: Sequence[Column[R]], rows: Iterable[R], *, width: int, wide: bool = False) -> RenderableType:
    """Return the table of a list in at most `width` characters.

    Where the columns do not fit, even narrowed, or with `wide` unnarrowed, each row is a list of names and values.
    """
    from rich.box import SIMPLE_HEAD
    from rich.cells import cell_len
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    shown = [column for column in columns if wide or not column.wide]
    cells = [[_text(column.cell(row)) for column in shown] for row in rows]
    natural = [
        max(cell_len(column.name), *(row[position].cell_len for row in cells)) if cells else cell_len(column.name)
        for position, column in enumerate(shown)
    ]
    widths = natural if wide else _narrowed(shown, natural, width)
    if _total(widths) > width:
        return Group(*_blocks([column.name for column in shown], cells))
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for column, cut in zip(shown, widths, strict=True):
        table.add_column(
            Text(column.name, no_wrap=True, overflow="ellipsis"),
            justify="right" if column.right else "left",
            width=cut,
            no_wrap=not column.fold,
            overflow="fold" if column.fold else "ellipsis",
        )
    for row in cells:
        table.add_row(*row)
    return table


def _text(cell: str | Text) -> Text:
    from rich.text import Text

    return cell if isinstance(cell, Text) else Text(" ".join(clean(cell).split()))


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
