"""The tables of the page, in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from ..report import number
from .drawn import short
from .results import Data

__all__ = ["cell_table", "guarantee_table", "row", "settings_table", "spread"]

_REASON = 160


def row(*cells: str) -> str:
    """One row; a bar in a cell would end it."""
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def rule(*alignments: str) -> str:
    """The line under the heads: `l` or `r` per column."""
    return f"|{'|'.join('---' if alignment == 'l' else '---:' for alignment in alignments)}|"


def spread(values: Sequence[float], median: float) -> str:
    """The median, and what the rounds lay between."""
    if min(values) == max(values):
        return number(median)
    return f"{number(median)} ({number(min(values))}-{number(max(values))})"


def cell_table(line: Data, data: Data) -> list[str]:
    """Every peer's figure with its guarantee beside it."""
    peers = {peer["key"]: peer for peer in data["peers"]}
    names = {key: peer["name"] for key, peer in peers.items()}
    steps = any(peer["store"] not in ("redis",) for peer in peers.values() if _in(line, peer["key"]))
    heads = ["", line["unit"], "Perdure is", "acknowledged", "on disk" if steps else "delivery"]
    found = [row(*heads), rule("l", "r", "r", "l", "l")]
    for cell in line["cells"]:
        guarantee = peers[cell["peer"]]["guarantee"]
        figure = spread(cell["values"], cell["median"]) if cell["values"] else short(cell["reason"], _REASON)
        if cell["values"] and cell["reason"]:
            figure += f"; after {len(cell['values'])} rounds: {short(cell['reason'], _REASON)}"
        found.append(
            row(
                names[cell["peer"]],
                figure,
                _times(cell, names),
                guarantee["acknowledged"],
                guarantee["on_disk" if steps else "delivery"],
            )
        )
    return [*found, ""]


def _in(line: Data, key: str) -> bool:
    return any(cell["peer"] == key for cell in line["cells"])


def _times(cell: Data, names: dict[str, str]) -> str:
    if cell["times"] is None or cell["peer"] == cell["beside"]:
        return "-"
    if cell["beside"] == "perdure":
        return f"{number(cell['times'])} x"
    return f"{number(cell['times'])} x (fsync)"


def guarantee_table(data: Data) -> list[str]:
    """What each setup promises, with the recovery timeout that its own code names."""
    found = [row("", "acknowledged", "delivery", "on disk", "a dead worker's task", "after"), rule(*"lllllr")]
    for peer in data["peers"]:
        guarantee = peer["guarantee"]
        seconds = peer.get("recovery")
        found.append(
            row(
                peer["name"],
                guarantee["acknowledged"],
                guarantee["delivery"],
                guarantee["on_disk"],
                guarantee["recovery"],
                "-" if seconds is None else f"{seconds:,.0f} s",
            )
        )
    return [*found, ""]


def settings_table(data: Data) -> list[str]:
    """How each peer was set up."""
    found = [row("", "how it is run", "versions"), rule(*"lll")]
    for peer in data["peers"]:
        versions = ", ".join(f"{name} {version}" for name, version in peer.get("versions", {}).items())
        found.append(row(peer["name"], peer["settings"], versions or short(peer["failed"], _REASON)))
    return [*found, ""]
