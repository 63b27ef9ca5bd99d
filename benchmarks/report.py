"""The report as a table and as JSON data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from .measures.measure import Row, Spread

__all__ = ["as_data", "number", "show"]

_WIDTH = 148
"""Width of the output to a file or a pipe."""


def show(conditions: Sequence[str], rounds: int, rows: Sequence[Row]) -> None:
    """Print conditions and rows."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("benchmark")
    table.add_column("unit")
    table.add_column("Perdure", justify="right", no_wrap=True)
    table.add_column("raw client", justify="right", no_wrap=True)
    table.add_column("ratio", justify="right", no_wrap=True)
    table.add_column("raw client does")
    for row in rows:
        cells = (_spread(row.value), _spread(row.limit), number(row.ratio))
        table.add_row(row.line.what, row.line.unit, *cells, row.line.limit)
    console.print(*conditions, sep="\n", markup=False, highlight=False)
    console.print(table)
    console.print(*_legend(rounds), sep="\n", markup=False, highlight=False)


def as_data(conditions: Sequence[str], rounds: int, rows: Sequence[Row]) -> dict[str, Any]:
    """Return the report as plain data."""
    return {
        "conditions": list(conditions),
        "rounds": rounds,
        "rows": [
            {
                "key": row.line.key,
                "what": row.line.what,
                "unit": row.line.unit,
                "value": asdict(row.value),
                "limit": asdict(row.limit) | {"what": row.line.limit},
                "ratio": row.ratio,
            }
            for row in rows
        ],
    }


def _legend(rounds: int) -> list[str]:
    return [
        "one round" if rounds == 1 else f"median of {rounds} rounds (lowest-highest)",
        "raw client: hiredis on one connection; ratio: Perdure / raw client",
    ]


def _spread(spread: Spread) -> str:
    if spread.low == spread.high:
        return number(spread.median)
    return f"{number(spread.median)} ({number(spread.low)}-{number(spread.high)})"


def number(value: float) -> str:
    """Return three significant digits, with thousands grouped."""
    if value >= 100:
        return f"{value:,.0f}"
    digits = 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:.{digits}f}"
