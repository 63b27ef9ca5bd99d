"""Rules of streams: each item that a task has emitted is visible once, and pages show what is stored."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from ...journal import Line
from ..history import History, Task, Violation
from .endings import finisher_of

__all__ = ["check_streams"]

Entry = dict[str, Any]
"""A stored entry: number, unit, attempt, key, cut and value. A notice of a resume has neither cut nor value."""


def check_streams(history: History) -> Iterator[Violation]:
    """Check the rules."""
    for task in history.tasks.values():
        stored = {line["stream"]: line for line in task.streams}
        visible = {name: visible_of(line["entries"]) for name, line in stored.items()}
        for name, line in stored.items():
            yield from _check_numbers(task, name, line)
            yield from _check_units(task, name, visible[name], line)
        if task.final is not None and task.rules.streams:
            yield from _check_recorded(task, visible)
            if task.final["state"] == "succeeded":
                yield from _check_body(task, visible)
        for line in task.unshown:
            yield Violation("no end of a stream", f"a page of {task.id} has no end", (line, *task.streams))
        for line in task.shown:
            yield from _check_shown(history, task, line, stored.get(line["stream"]))


def visible_of(entries: list[Entry]) -> list[Entry]:
    """Return the items that no later mark voids."""
    shown: list[Entry] = []
    for entry in entries:
        if not entry["cut"] and entry["value"] is None:
            continue
        if not entry["cut"]:
            shown.append(entry)
        elif entry["cut"] == "all":
            shown = [item for item in shown if item["key"]]
        else:
            unit, attempt = entry["unit"], entry["attempt"]
            shown = [item for item in shown if item["key"] or item["unit"] != unit or item["attempt"] > attempt]
    return shown


def _check_numbers(task: Task, name: str, line: Line) -> Iterator[Violation]:
    numbers = [entry["number"] for entry in line["entries"]]
    if numbers != [*range(1, len(numbers) + 1)]:
        yield Violation("stream numbers", f"stream {name} of {task.id} has the items {numbers}", (line,))
    keys = [entry["key"] for entry in line["entries"] if entry["key"]]
    if len(keys) > len(set(keys)):
        yield Violation("item doubled", f"stream {name} of {task.id} has a key twice", (line,))
    runs = [entry["value"]["token"].partition("/")[0] for entry in line["entries"] if "token" in (entry["value"] or {})]
    order = [run for run, following in pairwise([*runs, ""]) if run != following]
    if len(order) > len(set(order)):
        yield Violation("stale item", f"stream {name} of {task.id} has items of the runs {order}", (line,))


def _check_units(task: Task, name: str, visible: list[Entry], line: Line) -> Iterator[Violation]:
    """Check that the visible items of a unit are of one try, each once and in order."""
    units: dict[str, list[Any]] = defaultdict(list)
    for entry in visible:
        if not entry["key"]:
            units[entry["unit"]].append(entry["value"])
    for unit, values in units.items():
        tokens = {value.get("token") for value in values}
        numbers = [value["number"] if "token" in value else value["body"] for value in values]
        first = 1 if tokens == {None} else 0
        if len(tokens) > 1 or numbers != [*range(first, first + len(numbers))]:
            yield Violation("item doubled", f"stream {name} of {task.id} has {values} of {unit!r}", (line,))


def _check_recorded(task: Task, visible: dict[str, list[Entry]]) -> Iterator[Violation]:
    """Check that a recorded step has all of its items."""
    assert task.final is not None
    for step, token in task.final["steps"].items():
        for name, count in (("tokens", 3), ("output", 1)):
            found = [entry["value"] for entry in visible.get(name, []) if entry["unit"] == step and not entry["key"]]
            if found != [{"token": token, "number": number} for number in range(count)]:
                what = f"step {step} of {task.id} was recorded as {token}, and has {found} in stream {name}"
                yield Violation("item missing", what, (*task.streams, task.final))
        keys = {entry["value"]["key"] for entry in visible.get("facts", []) if entry["key"]}
        if missing := {"title", step} - keys:
            what = f"step {step} of {task.id} was recorded, and the items with the keys {missing} are missing"
            yield Violation("item missing", what, (*task.streams, task.final))


def _check_body(task: Task, visible: dict[str, list[Entry]]) -> Iterator[Violation]:
    """Check that what the body of the handler has emitted is there, once."""
    finisher = finisher_of(task)
    said: dict[tuple[str, str], list[int]] = defaultdict(list)
    for line in task.emits:
        if finisher is not None and line["run"] == finisher.name:
            said[line["stream"], line["scope"]].append(line["number"])
    for (name, scope), wanted in said.items():
        items = [entry["value"] for entry in visible.get(name, []) if entry["unit"] == scope and not entry["key"]]
        found = [value.get("body") for value in items]
        if found != wanted:
            what = f"the body of {task.id} has emitted {wanted} into {name} ({scope!r}), and {found} is visible"
            yield Violation("item missing", what, (*task.streams, *task.emits))


def _check_shown(history: History, task: Task, line: Line, stored: Line | None) -> Iterator[Violation]:
    """Check that a page shows what is stored up to its end, which is that of the task."""
    if history.lost(line.at, history.end, asked=line["since"]) or task.final is None:
        return
    end, final = line["end"], task.final
    replayed = history.replayed_between(line["since"], history.end)
    if not replayed and (end["state"] != final["state"] or (end["result"] or None) != (final["result"] or None)):
        what = f"a page of {task.id} ended with {end['state']}, its record is {final['state']}"
        yield Violation("other end of a stream", what, (line, final))
    entries = [] if stored is None else stored["entries"]
    if not replayed and len(entries) > end["number"]:
        what = f"a page of {task.id} ended at item {end['number']}, and {len(entries)} are stored"
        yield Violation("item not shown", what, (line, *task.streams))
    begin = line["begin"] or end["number"] + 1 if line["last"] is not None else 1
    kept = visible_of([entry for entry in entries if entry["number"] <= end["number"]])
    wanted = [[entry["number"], entry["value"]] for entry in kept if entry["number"] >= begin]
    if line["items"] != wanted:
        what = f"a page of stream {line['stream']} of {task.id} shows {line['items']}, not {wanted}"
        yield Violation("item not shown", what, (line, *task.streams))
