"""Each check of streams can fail: a small run is sound, and the check reports a defect of the worker or the reader.

`sensitivity/test_defects.py` does the same with the scripts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from perdure.queues import streams
from perdure.queues.streams import StreamItem, StreamTail
from perdure.worker.durable import emitting
from perdure.worker.durable.steps import execution

from ..plan import Fault, Plan, TaskPlan
from ..world import World
from . import stream_checks

_KEPT: list[World] = []


def kinds(plan: Plan) -> set[str]:
    """Play a plan; return the kinds of violations."""
    world = World(plan)
    _KEPT.append(world)
    return {violation.kind for violation in world.play().violations}


def plan_of(kind: str, *faults: Fault, count: int = 2) -> Plan:
    tasks = tuple(TaskPlan(f"t{number}", kind, 0.5 + 0.01 * number, 3, 0.3) for number in range(count))
    return Plan(1, 2, 1.0, tasks, faults, clean=5.0)


KILLED = (Fault(0.75, "kill", 0, 1.0), Fault(0.8, "kill", 0, 1.0), Fault(2.2, "kill", 0, 1.0))
"""Both workers die in the middle of steps that emit."""


def test_items_of_a_try_that_was_cut_off_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of("narrates", *KILLED)
    assert kinds(plan) == set()

    async def no_mark(*_: Any, **__: Any) -> None:
        pass

    monkeypatch.setattr(execution, "begin_unit", no_mark)
    assert {"doubled item", "missing item", "void item"} <= kinds(plan)


def test_items_of_a_body_that_are_emitted_again_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of("narrates", *KILLED)
    monkeypatch.setattr(emitting._Body, "decode", classmethod(lambda cls, note: cls()))
    assert "doubled item" in kinds(plan)


def test_items_that_are_not_written_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    put, calls = emitting._put, iter(range(10**6))

    async def put_some(*args: Any) -> None:
        if next(calls) % 7 != 3:
            await put(*args)

    monkeypatch.setattr(emitting, "_put", put_some)
    assert "missing item" in kinds(plan_of("narrates"))


def test_the_items_of_a_forgotten_step_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of("forgets")
    assert kinds(plan) == set()
    monkeypatch.setattr(emitting, "note_in", lambda record: None)
    assert kinds(plan) >= {"doubled item"}


def test_a_reader_that_drops_nothing_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of("narrates", *KILLED)
    monkeypatch.setattr(StreamItem, "voids", lambda mark, item: False)
    assert kinds(plan) == {"shown"}


def test_a_reader_that_skips_items_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "bisect_right", lambda entries, number, key: len(entries))
    monkeypatch.setattr(streams._Page, "following", lambda page, number: page.entries[-1:])
    assert kinds(plan_of("narrates", count=4)) == {"shown"}


def test_a_reader_without_an_end_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    load = StreamTail._load

    async def never_ended(tail: StreamTail, after: int) -> Any:
        return (await load(tail, after))._replace(ended=False)

    monkeypatch.setattr(StreamTail, "_load", never_ended)
    assert kinds(plan_of("narrates", count=1)) == {"no end"}


def test_a_reader_that_ends_too_early_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_ENDED", frozenset((b"queued", b"scheduled", *streams._ENDED)))
    monkeypatch.setattr(streams._Reader, "read", read_without_record)
    assert "other end" in kinds(plan_of("laments"))


async def read_without_record(reader: Any) -> list[StreamItem]:
    """Take each state of a task for its end."""
    page = await reader._tail.page(reader._position)
    if entries := page.following(reader._position):
        reader._position = entries[-1].stored.number
        return [reader._item(entry) for entry in entries]
    reader.record = await reader._tail.record()
    reader._changes = reader._tail.changes
    return []


def test_an_end_that_differs_from_the_record_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    end = streams._end

    async def other(*args: Any) -> StreamItem:
        return replace(await end(*args), state="cancelled")

    monkeypatch.setattr(streams, "_end", other)
    assert kinds(plan_of("narrates", count=1)) == {"other end"}


def test_a_reader_that_does_not_notice_lost_items_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = Fault(1.3, "lose tail", 0, 0.25)
    plan = plan_of("narrates", lost, Fault(1.35, "kill", 0, 1.0), Fault(1.4, "kill", 0, 1.0))
    assert kinds(plan) == set()

    async def look_for_none(tail: StreamTail) -> None:
        pass

    monkeypatch.setattr(StreamTail, "_look_for_losses", look_for_none)
    assert "shown" in kinds(plan)


def test_only_other_values_of_the_first_items_are_excused_by_a_loss() -> None:
    differ, stored = stream_checks._differ_at_the_beginning, [(1, "a"), (2, "b"), (3, "c")]
    assert differ([(1, "x"), (2, "b"), (3, "c")], stored)
    assert not differ([(1, "a"), (2, "x"), (3, "c")], stored)
    assert not differ([(2, "b"), (3, "c")], stored)
    assert not differ([(1, "a"), (1, "a"), (3, "c")], stored)
