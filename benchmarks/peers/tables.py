"""The Markdown tables of the page."""

from __future__ import annotations

from collections.abc import Sequence

from ..report import number
from .bars import short
from .results import Data

__all__ = ["cell_table", "guarantee_table", "overview", "row", "settings_table", "spread"]

_REASON = 160
_HEADS = {
    "acknowledged": "acknowledged",
    "delivery": "delivery",
    "on_disk": "on disk",
    "recovery": "a dead worker's task is found by",
}
"""Column heads by guarantee."""


def row(*cells: str) -> str:
    """Return one row; a bar inside a cell is escaped."""
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def rule(*alignments: str) -> str:
    """Return the line below the heads: `l` or `r` per column."""
    return f"|{'|'.join('---' if alignment == 'l' else '---:' for alignment in alignments)}|"


def spread(values: Sequence[float], median: float) -> str:
    """Return the median with the lowest and highest round."""
    if min(values) == max(values):
        return number(median)
    return f"{number(median)} ({number(min(values))}-{number(max(values))})"


def overview(lines: Sequence[Data], data: Data) -> list[str]:
    """Return the table of Perdure's ratios to every peer."""
    names = {peer["key"]: peer["name"] for peer in data["peers"]}
    cells = {(line["key"], cell["peer"]): cell for line in lines for cell in line["cells"]}
    keys = [key for key in names if any((line["key"], key) in cells for line in lines)]
    found = [row("Perdure compared with", *(line["title"] for line in lines)), rule("l", *("r" for _ in lines))]
    for key in keys:
        ratios = [_times(cells[line["key"], key]) if (line["key"], key) in cells else "-" for line in lines]
        if any(ratio != "-" for ratio in ratios):
            found.append(row(f"{names[key]}", *ratios))
    return [*found, ""]


def cell_table(line: Data, data: Data, promises: Sequence[str]) -> list[str]:
    """Return the table of all figures of a line. promises: the guarantees shown beside them."""
    peers = {peer["key"]: peer for peer in data["peers"]}
    names = {key: peer["name"] for key, peer in peers.items()}
    heads = ["", line["unit"], "Perdure is", *(_HEADS[promise] for promise in promises)]
    found = [row(*heads), rule("l", "r", "r", *("l" for _ in promises))]
    for cell in line["cells"]:
        guarantee = peers[cell["peer"]]["guarantee"]
        figure = spread(cell["values"], cell["median"]) if cell["values"] else short(cell["reason"], _REASON)
        if cell["values"] and cell["reason"]:
            figure += f"; after {len(cell['values'])} rounds: {short(cell['reason'], _REASON)}"
        found.append(
            row(
                names[cell["peer"]],
                figure,
                _times(cell),
                *(guarantee[promise] for promise in promises),
            )
        )
    return [*found, ""]


def _times(cell: Data) -> str:
    if cell["times"] is None or cell["peer"] == cell["beside"]:
        return "-"
    if cell["beside"] == "perdure":
        return f"{number(cell['times'])} x"
    return f"{number(cell['times'])} x (fsync)"


def guarantee_table(data: Data) -> list[str]:
    """Return the table of guarantees, with the default recovery timeouts."""
    found = [row("", *_HEADS.values(), "after"), rule("l", *("l" for _ in _HEADS), "r")]
    for peer in data["peers"]:
        guarantee = peer["guarantee"]
        seconds = peer.get("recovery")
        found.append(
            row(
                peer["name"],
                *(guarantee[promise] for promise in _HEADS),
                "-" if seconds is None else f"{seconds:,.0f} s",
            )
        )
    return [*found, ""]


def settings_table(data: Data) -> list[str]:
    """Return the table of settings and versions."""
    found = [row("", "started as", "versions"), rule(*"lll")]
    for peer in data["peers"]:
        versions = ", ".join(f"{name} {version}" for name, version in peer.get("versions", {}).items())
        found.append(row(peer["name"], peer["settings"], versions or short(peer["failed"], _REASON)))
    return [*found, ""]
