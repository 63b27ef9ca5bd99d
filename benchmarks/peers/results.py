"""The results of a run as data, stored beside the page, which is written from them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .lines import Measure
from .measurements import Facts
from .rounds import Cell
from .setups import PERDURE, Peer
from .sizes import Amounts

__all__ = ["Data", "as_data", "read", "write"]

Data = dict[str, Any]

FORMAT = 2


def as_data(
    about: Mapping[str, object],
    size: Amounts,
    measures: Sequence[Measure],
    facts: Mapping[str, Facts | str],
    found: Mapping[tuple[str, str], Cell],
    tried: Sequence[Mapping[str, Any]],
) -> Data:
    """Return the whole run as data. about: when, where and how it was made. tried: the settings of the sweep."""
    peers = {peer.key: peer for measure in measures for peer in measure.peers if peer.key in facts}
    return {
        "format": FORMAT,
        **about,
        "amounts": asdict(size),
        "sweep": [dict(row) for row in tried],
        "peers": [_peer(peer, facts[peer.key]) for peer in peers.values()],
        "lines": [_line(measure, at, found, facts) for measure in measures for at in range(len(measure.lines))],
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
