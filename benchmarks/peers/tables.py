"""The Markdown tables of the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..report import number
from .bars import short
from .results import Data

__all__ = ["better", "cell_table", "guarantee_table", "overview", "row", "settings_table", "spread", "sweep_table"]

_REASON = 160

_FLAT = 0.01
"""Spread of the rounds of a rate, as a share of its median, below which the page has to explain it."""
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
    """Return the table of Perdure's ratios to every project, each at the better of its settings."""
    peers = {peer["key"]: peer for peer in data["peers"]}
    chosen = [{cell["peer"]: cell for cell in line["cells"] if cell["peer"] in better(line, data)} for line in lines]
    found = [row("Perdure compared with", *(line["title"] for line in lines)), rule("l", *("r" for _ in lines))]
    for project in dict.fromkeys(peer["project"] for peer in peers.values()):
        cells = [[cell for key, cell in line.items() if peers[key]["project"] == project] for line in chosen]
        ratios = [_times(of_line[0]) if of_line else "-" for of_line in cells]
        if any(ratio != "-" for ratio in ratios):
            found.append(row(peers[project]["name"], *ratios))
    return [*found, ""]


def better(line: Data, data: Data) -> set[str]:
    """Return the setups of a line that are the best of their project."""
    projects = {peer["key"]: peer["project"] for peer in data["peers"]}
    best: dict[str, Data] = {}
    for cell in line["cells"]:
        other = best.get(projects[cell["peer"]])
        if other is None or other["times"] is None or (cell["times"] is not None and cell["times"] < other["times"]):
            best[projects[cell["peer"]]] = cell
    return {cell["peer"] for cell in best.values()}


def cell_table(line: Data, data: Data, promises: Sequence[str]) -> list[str]:
    """Return the table of all figures of a line, and what explains them. promises: the guarantees shown beside them.

    A project that was measured with several settings has one ratio, that of the best.
    """
    chosen = better(line, data)
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
                _times(cell) if cell["peer"] in chosen else "-",
                *(guarantee[promise] for promise in promises),
            )
        )
    return [*found, "", *_notes(line, peers)]


def _notes(line: Data, peers: Mapping[str, Data]) -> list[str]:
    """Return why figures are flat: the timer of the project, or that no timer is known."""
    found = []
    for cell in line["cells"]:
        peer, values = peers[cell["peer"]], cell["values"]
        flat = len(values) > 1 and max(values) - min(values) < _FLAT * cell["median"]
        if peer["timer"] and values:
            found.append(f"- {peer['name']}: {peer['timer']}.")
        elif flat and not line["less"]:
            found.append(
                f"- {peer['name']}: the rounds differ by less than {_FLAT:.0%}; no timer of its own sets this rate."
            )
    return [*found, ""] if found else []


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


def sweep_table(data: Data) -> list[str]:
    """Return the table of all settings that were tried, the chosen one of each project marked."""
    names = {peer["key"]: peer["name"] for peer in data["peers"]}
    found = [row("", "setting", "rate", "unit", ""), rule(*"llrll")]
    best: dict[str, float] = {}
    for tried in data["sweep"]:
        best[tried["peer"]] = max(best.get(tried["peer"], 0.0), tried["rate"] or 0.0)
    for tried in data["sweep"]:
        rate, peer = tried["rate"], tried["peer"]
        figure = short(tried["reason"], _REASON) if rate is None else number(rate)
        found.append(
            row(names.get(peer, peer), tried["name"], figure, tried["unit"], "best" if rate == best[peer] else "")
        )
    return [*found, ""]


def settings_table(data: Data) -> list[str]:
    """Return the table of settings and versions."""
    found = [row("", "started as", "versions"), rule(*"lll")]
    for peer in data["peers"]:
        versions = ", ".join(f"{name} {version}" for name, version in peer.get("versions", {}).items())
        found.append(row(peer["name"], peer["settings"], versions or short(peer["failed"], _REASON)))
    return [*found, ""]
