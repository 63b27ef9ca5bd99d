"""The results of a run as data, stored beside the page, which is written from them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .lines import Measure
from .measurements import Facts
from .rounds import Cell
from .setups import PERDURE, Peer
from .sizes import Amounts

__all__ = ["About", "Data", "as_data", "merge", "read", "write"]

Data = dict[str, Any]

_FORMAT = 2


@dataclass(frozen=True, slots=True)
class About:
    """A run: the line of its origin, a note on the conditions, settings of Postgres, and whether it is only a check."""

    origin: str
    note: str = ""
    postgres: Mapping[str, str] = field(default_factory=dict)
    quick: bool = False


def as_data(
    about: About,
    size: Amounts,
    measures: Sequence[Measure],
    facts: Mapping[str, Facts | str],
    found: Mapping[tuple[str, str], Cell],
    tried: Sequence[Mapping[str, Any]],
) -> Data:
    """Return a run as data. tried: the settings of the sweep."""
    run = {**asdict(about), "rounds": size.rounds, "recoveries": size.recoveries}
    peers = {peer.key: peer for measure in measures for peer in measure.peers if peer.key in facts}
    return {
        "format": _FORMAT,
        "sweep": [dict(row) for row in tried],
        "peers": [_peer(peer, facts[peer.key]) for peer in peers.values()],
        "lines": [
            {**_line(measure, at, found, facts), "run": run} for measure in measures for at in range(len(measure.lines))
        ],
    }


def merge(stored: Data, new: Data) -> Data:
    """Return stored results with the lines, peers and settings of a new run in place of theirs.

    Each line keeps its run. Stored results in another format are dropped.
    """
    if stored.get("format") != _FORMAT:
        return new
    swept = {row["peer"] for row in new["sweep"]}
    peers = {peer["key"]: peer for peer in (*stored["peers"], *new["peers"])}
    lines = {line["key"]: line for line in (*stored["lines"], *new["lines"])}
    used = {cell["peer"] for line in lines.values() for cell in line["cells"]}
    return {
        "format": _FORMAT,
        "sweep": [*(row for row in stored["sweep"] if row["peer"] not in swept), *new["sweep"]],
        "peers": [peer for key, peer in peers.items() if key in used],
        "lines": list(lines.values()),
    }


def write(data: Data, path: Path) -> None:
    """Write the results as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")


def read(path: Path) -> Data:
    """Read results that `write` stored."""
    data: Data = json.loads(path.read_text())
    return data


def _peer(peer: Peer, facts: Facts | str) -> Data:
    known = {} if isinstance(facts, str) else asdict(facts)
    return {
        "key": peer.key,
        "name": peer.name,
        "project": peer.project or peer.key,
        "timer": peer.timer,
        "store": peer.store,
        "worker": peer.worker,
        "settings": peer.settings.format(concurrency=32),
        "guarantee": asdict(peer.guarantee),
        "failed": facts if isinstance(facts, str) else None,
        **known,
    }


def _line(measure: Measure, at: int, found: Mapping[tuple[str, str], Cell], facts: Mapping[str, Facts | str]) -> Data:
    line = measure.lines[at]
    medians = {
        peer.key: statistics.median(cell.values)
        for peer in measure.peers
        if (cell := found.get((line.key, peer.key))) and cell.values
    }
    cells = []
    for peer in measure.peers:
        if peer.key not in facts:
            continue
        cell = found.get((line.key, peer.key), Cell(reason="not measured"))
        beside = measure.beside(peer) if measure.beside(peer) in medians else PERDURE.key
        cells.append(
            {
                "peer": peer.key,
                "values": cell.values,
                "median": medians.get(peer.key),
                "beside": beside,
                "times": _times(medians.get(beside), medians.get(peer.key), less=line.less),
                "reason": cell.reason,
            }
        )
    return {"key": line.key, "title": line.title, "unit": line.unit, "how": line.how, "less": line.less, "cells": cells}


def _times(perdure: float | None, peer: float | None, *, less: bool) -> float | None:
    """Return how many times better Perdure is."""
    if not perdure or not peer:
        return None
    return peer / perdure if less else perdure / peer
