"""`python -m benchmarks.hostile`: time of functions over text and data of others, at a size, twice and four times it.

Each input is the worst that is known for its function. A time that grows faster than the size is a defect.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from perdure.queues.defaults import nearest
from perdure.queues.json_form import large_integer
from perdure.queues.security.redaction import Redaction
from perdure.worker.agents.coherence.checks import RecentCall
from perdure.worker.agents.context.conversation import completed, turns_of, turns_within
from perdure.worker.agents.context.prompt import Estimate, cut
from perdure.worker.agents.journal.archive import remove_oldest
from perdure.worker.agents.journal.json_patch import apply, diff
from perdure.worker.agents.journal.reducer import empty_state
from perdure.worker.durable.journal.chat import Message, ToolCall
from perdure.worker.durable.journal.handoff.budget import clipped, fitted
from perdure.worker.durable.journal.handoff.document import Handoff
from perdure.worker.durable.journal.quoting import quoted_block, quoted_line, quoted_name
from perdure.worker.memory import FoundMemory, Memory, MemoryLink
from perdure.worker.memory.hybrid import with_notes
from perdure.worker.memory.text import content_words, digest, has_words
from perdure.worker.runtime.children.child import MessageReader
from rich.console import Console
from rich.table import Table

__all__ = ["DATA", "TEXTS", "hostile"]

_PATTERNS: Final = ("a ", "a", " ", "\n", "`", "[", "](", "<|", "0", "-", ". a", "'", "input_value=", "é", "#1 ")
"""Texts that are repeated up to a length: what expressions look for, without what would end a match."""


def _redacted(text: str) -> object:
    return Redaction([f"secret-{number}" for number in range(50)])(text)


TEXTS: Final[Mapping[str, Callable[[str], object]]] = {
    "quoted_line": lambda text: quoted_line(text, len(text)),
    "quoted_name": lambda text: quoted_name(text, len(text)),
    "quoted_block": lambda text: quoted_block(text, len(text)),
    "digest of a memory": digest,
    "words of a query": content_words,
    "has_words": lambda text: has_words(text, ["b"]),
    "sentence of an agent": RecentCall.said,
    "redaction": _redacted,
    "large_integer": lambda text: large_integer(f'"{text}"'.encode()),
    "cut": lambda text: cut(text, 100, Estimate()),
    "clipped": lambda text: clipped(text, 100),
}
"""Functions of one text."""


def _nested(depth: int, value: Any) -> Any:
    for _ in range(depth):
        value = [value]
    return value


def _conversation(calls: int, *, same: bool) -> list[Message]:
    """Return one answer with many calls, whose results come in the opposite order."""
    names = ["one" if same else f"call-{number}" for number in range(calls)]
    answer = Message(role="assistant", tool_calls=tuple([ToolCall(id=name, name="t", arguments={}) for name in names]))
    results = [Message(role="tool", content="result " * 100, tool_call_id=name) for name in reversed(names)]
    return [Message(role="user", content="go"), answer, *results]


def _memories(number: int) -> list[FoundMemory]:
    times = {"created": 1.0, "accessed": 1.0, "updated": 1.0}
    memories = []
    for at in range(number):
        links = [MemoryLink("supersedes", f"chain-{at - 1}")]
        memories += [
            Memory.model_validate({"id": f"equal-{at}", "text": "equal", "source": str(at), **times}),
            Memory.model_validate({"id": f"chain-{at}", "text": f"chain {at}", "links": links, **times}),
        ]
    return [FoundMemory(memory=memory, score=1.0) for memory in memories]


def _with_notes(size: int) -> object:
    found = _memories(size)
    return with_notes(found, {one.memory.id: one.memory for one in found})


def _remove_oldest(size: int) -> object:
    roles = ["user", "assistant", *["user"] * size, "tool"]
    return remove_oldest({**empty_state(), "messages": [{"role": role} for role in roles]}, steps=None, messages=1)


def _feed(size: int) -> object:
    reader = MessageReader(lambda kind, message: None)
    for _ in range(size * 20):
        reader.feed(b"x")
    return reader


def _additions(path: str, size: int) -> Iterator[dict[str, Any]]:
    return ({"op": "add", "path": path.format(number), "value": 1} for number in range(size))


DATA: Final[Mapping[str, Callable[[int], object]]] = {
    "diff of nested lists": lambda size: diff(_nested(size // 10, 1), _nested(size // 10, 2)),
    "diff of long lists": lambda size: diff([*range(size)], [*range(1, size)]),
    "patch of an object": lambda size: apply({"a": {}}, _additions("/a/{}", size)),
    "patch of a list": lambda size: apply({"a": []}, _additions("/a/-", size)),
    "results of calls": lambda size: completed(_conversation(size, same=False)),
    "turns of calls": lambda size: turns_of(_conversation(size, same=False)),
    "turns of calls with one id": lambda size: turns_of(_conversation(size, same=True)),
    "turns that are cut": lambda size: turns_within(
        _conversation(size, same=False), size * 60, Estimate(), steady=size * 60, instructions=0
    ),
    "archive of messages": _remove_oldest,
    "notes of memories": _with_notes,
    "messages of a child": _feed,
    "handoff": lambda size: fitted(
        Handoff(task="t", session="s", why="asked", attention=("look at this",) * size), 200
    ),
    "similar names": lambda size: nearest("a" * size, [f"{'ab' * 30}{number}" for number in range(size * 10)]),
}
"""Functions of a number of items."""


def hostile(length: int = 100_000, items: int = 400) -> Iterator[tuple[str, list[float]]]:
    """Yield functions with their seconds at each size; of a text, those of its worst pattern.

    Args:
        length: of the texts in characters. items: number of the other data.
    """
    for name, function in TEXTS.items():
        yield (
            name,
            max(
                (
                    [_seconds(function, _repeated(pattern, length * times)) for times in (1, 2, 4)]
                    for pattern in _PATTERNS
                ),
                key=lambda seconds: seconds[-1],
            ),
        )
    for name, work in DATA.items():
        yield name, [_seconds(work, items * times) for times in (1, 2, 4)]


def _repeated(pattern: str, length: int) -> str:
    return (pattern * length)[:length]


def _seconds(function: Callable[[Any], object], given: Any) -> float:
    start = time.perf_counter()
    function(given)
    return time.perf_counter() - start


def main() -> None:
    table = Table("function", "ms", "twice", "four times")
    for name, seconds in hostile():
        table.add_row(name, *(f"{1000 * one:.1f}" for one in seconds))
    Console().print(table)


if __name__ == "__main__":
    main()
