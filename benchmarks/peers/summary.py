"""The paragraph of README.md that compares no-op tasks with the other projects."""

from __future__ import annotations

import textwrap

import typer

from ..report import number
from .results import Data
from .setups import PERDURE
from .tables import better

__all__ = ["BEGIN", "END", "with_summary"]

BEGIN = "<!-- begin: written by make bench-peers -->"
END = "<!-- end: written by make bench-peers -->"

_WIDTH = 130


def with_summary(document: str, data: Data) -> str:
    """Return a document with the paragraph between its marks. Raises BadParameter if it has no marks."""
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise typer.BadParameter(f"README.md must have the lines {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{_summary(data)}\n\n{END}{after}"


def _summary(data: Data) -> str:
    line = next(line for line in data["lines"] if line["key"] == "noop")
    peers = {peer["key"]: peer for peer in data["peers"]}
    chosen = better(line, data)
    cells = [cell for cell in line["cells"] if cell["peer"] in chosen and cell["median"] and cell["times"]]
    own = next(cell for cell in cells if cell["peer"] == PERDURE.key)
    others = sorted(
        (cell for cell in cells if peers[cell["peer"]]["store"] == PERDURE.store and cell is not own),
        key=lambda cell: cell["times"],
    )
    named = [f"{peers[peers[cell['peer']]['project']]['name']} {number(cell['median'])}" for cell in others]
    text = (
        f"One worker process ran {number(own['median'])} no-op tasks per second with their results kept, on a machine "
    )
    text += "that it shared with Redis. "
    if others:
        times = number(others[0]["times"])
        text += (
            f"In the same run, each at the better of its default and its best documented setting: {', '.join(named)}. "
        )
        text += f"Perdure was {times} times as fast as the best of them. "
    on_disk = [cell for cell in cells if peers[cell["peer"]]["store"] == "postgres"]
    if on_disk:
        best = min(on_disk, key=lambda cell: cell["times"])
        name = peers[peers[best["peer"]]["project"]]["name"]
        text += (
            f"On Postgres {name} ran {number(best['median'])}, with each transition on disk; Perdure was "
            f"{number(best['times'])} times as fast on a Redis that does the same. "
        )
    text += "It is one run on one machine; a task that does real work is as fast as its work."
    return f"{line['run']['origin']}\n\n{textwrap.fill(text, _WIDTH, break_on_hyphens=False)}"
