"""Work over data of others: it grows no faster than the data. The lines that run are counted, not the seconds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

import pytest
from perdure.queues.defaults import nearest
from perdure.worker.agents.journal.json_patch import apply
from perdure.worker.runtime.children.child import MessageReader

from benchmarks.hostile import DATA

SIZE = 100

MORE = {"diff of nested lists": 20.0}
"""Growth for four times the size where it is not 6. Nested lists are compared once at each level of a limited depth."""


def lines_of(work: Callable[[int], object], size: int) -> int:
    """Return how many lines of Python run."""
    count = 0

    def trace(frame: FrameType, event: str, given: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    former = sys.gettrace()
    sys.settrace(trace)
    try:
        work(size)
    finally:
        sys.settrace(former)
    return count


@pytest.mark.parametrize("name", DATA)
def test_the_lines_that_run_grow_no_faster_than_the_data(name: str) -> None:
    work = DATA[name]
    work(SIZE)  # what is cached from now on does not count
    assert lines_of(work, 4 * SIZE) <= MORE.get(name, 6.0) * lines_of(work, SIZE)


class CountedObject(dict[str, Any]):
    """JSON object that counts the copies of it and of its copies."""

    copies = 0

    def copy(self) -> Self:
        CountedObject.copies += 1
        return type(self)(self)


def test_a_patch_copies_an_object_once() -> None:
    before = CountedObject()
    CountedObject.copies = 0
    after = apply({"a": before}, [{"op": "add", "path": f"/a/{number}", "value": number} for number in range(50)])
    assert (before, len(after["a"]), CountedObject.copies) == ({}, 50, 1)
    broken: list[dict[str, Any]] = [{"op": "add", "path": "/a/x", "value": 1}, {"op": "remove", "path": "/b"}]
    with pytest.raises(ValueError, match="does not fit"):
        apply({"a": before}, broken)
    assert before == {}


def test_a_patch_leaves_the_values_of_its_operations_as_they_are() -> None:
    value: dict[str, Any] = {"inner": [1]}
    patch: list[dict[str, Any]] = [
        {"op": "add", "path": "/a", "value": value},
        {"op": "add", "path": "/a/inner/-", "value": 2},
    ]
    assert apply({}, patch) == {"a": {"inner": [1, 2]}}
    assert value == {"inner": [1]}


def test_a_message_of_a_child_may_come_byte_by_byte() -> None:
    found: list[tuple[str, dict[str, Any]]] = []
    reader = MessageReader(lambda kind, message: found.append((kind, message)))
    for byte in b'{"say":"step","id":1}\nnonsense\n{"say":"idle"}\n{"say":':
        reader.feed(bytes([byte]))
    reader.feed(b'"ends"}\n{"say":"idle"}\n')
    assert found == [("step", {"id": 1}), ("idle", {}), ("ends", {}), ("idle", {})]
    reader.feed(b"x" * (2 << 20))
    reader.feed(b'\n{"say":"idle"}\n')
    assert len(found) == 5


def test_only_the_first_of_many_names_are_compared() -> None:
    def names() -> Any:
        for number in range(100_000):
            taken.append(number)
            yield f"name-{number}"

    taken: list[int] = []

    class Names:
        __iter__ = staticmethod(names)

    assert nearest("name-7x", Names()) == "; did you mean 'name-7'?"  # type: ignore[arg-type]  # names of a registry
    assert len(taken) == 1_000
