"""Tool calls: the event of a call, the note that it is in flight, and the count of the calls of a tool."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from typing import Any, Final

from pydantic_core import from_json, to_json

from ....queues.delivery.checkpoint import Entry, Kind
from ..journal.event import Event
from ..journal.run_events import ToolCalled
from ..journal.tool_notes import TOOLS, ToolCalls, call_text, encode_note, is_note
from ..run import Run, RunObserver
from .current import StepOptions, store_calls

_MAX_LOGGED: Final = 16_384
"""Size in bytes of a result in the log, of arguments and of a reason; the checkpoint has the whole result."""

_PARTS: Final = 4
"""Parts of an event's limit, of which the result, the arguments and the reason may have one each."""

_MAX_TOOLS: Final = 50
_OTHERS: Final = "others"
"""Number of tools that are counted by name, and the name under which any further ones are counted."""


_MAX_REASON_LENGTH: Final = 200
"""Characters of the reason for a call in its note."""

_MAX_REASONS: Final = 100


class CallReasons(RunObserver):
    """Reasons of the latest tool calls of a run, for the messages with their results."""

    __slots__ = ("_reasons",)

    def __init__(self) -> None:
        self._reasons: dict[str, str] = {}

    @classmethod
    def add(cls, run: Run, call: str, reason: str) -> None:
        """Keep the reason for a call until the message with its result is added."""
        reasons = run.observer(cls)
        if reasons is None:
            reasons = cls()
            run.observe(reasons)
        reasons._reasons[call] = reason
        if len(reasons._reasons) > _MAX_REASONS:
            del reasons._reasons[next(iter(reasons._reasons))]

    @classmethod
    def take(cls, run: Run, call: str) -> tuple[dict[str, Any], ...]:
        """Return the reason for a call as a block of reasoning, if it is known."""
        reasons = run.observer(cls)
        reason = None if reasons is None else reasons._reasons.pop(call, None)
        return () if reason is None else ({"type": "reasoning", "text": reason},)


class LoggedCall:
    """A call of a tool, with its arguments by name."""

    __slots__ = ("_arguments", "_options", "_size", "name")

    def __init__(
        self, name: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: StepOptions
    ) -> None:
        self.name = name
        self._arguments, self._size = _by_name(fn, args, kwargs)
        self._options = options

    @property
    def call_id(self) -> str | None:
        """The id that the model gave to the call."""
        return self._options.call

    def event(self, run: Run, key: str, result: Any, attempt: int, took: int) -> Event:
        """Return the event of the finished call. result: JSON data. took: milliseconds.

        What is too large for the log is cut: the call was made, and must not be made again because of its log.
        """
        data, most = to_json(result), min(_MAX_LOGGED, run.payload_limit // _PARTS)
        clipped = len(data) if len(data) > most else None
        reasoning = self._options.reasoning
        return ToolCalled(
            tool=self.name,
            arguments=self._arguments if self._size <= most else _shortened(self._arguments, self._size, most, run),
            result=result if clipped is None else _head(data, most, run),
            reasoning=reasoning if len(reasoning) <= most else _head(reasoning.encode(), most, run),
            call=self._options.call,
            attempt=attempt,
            clipped=clipped,
            ms=took,
            step=key,
        )

    def note(self, run: Run, key: str, digest: str) -> tuple[Entry, Entry]:
        """Return the entries which say that the call is in flight; the record of the call deletes them."""
        call, reason = call_text(self.name, self._arguments), self._options.reasoning
        if run.redact is not None:  # before the cut could split a secret
            call, reason = run.redact(call), run.redact(reason)
        noted = f"{call}, because: {reason[:_MAX_REASON_LENGTH]}" if reason else call
        note = encode_note(digest, self.name, noted)
        known = ToolCalls.decode(run.history.saved.get(TOOLS))
        return Entry(Kind.INTENT, key, note), store_calls(run, known.with_open(key))

    def count(self, run: Run, key: str) -> Entry:
        """Count the call, which is not in flight any more, and return the entry that stores this."""
        known = ToolCalls.decode(run.history.saved.get(TOOLS))
        counts = known.counts
        name = self.name if self.name in counts or len(counts) < _MAX_TOOLS else _OTHERS
        counts[name] = counts.get(name, 0) + 1
        return store_calls(run, known.without_open(key))


def _head(data: bytes, most: int, run: Run) -> str:
    """Return at most so many bytes from the beginning of a text, without its secrets."""
    if run.redact is not None:  # before the cut could split a secret
        data = run.redact.head(data.decode(), most).encode()
    return data[:most].decode("utf-8", "ignore")


def _shortened(arguments: dict[str, Any], size: int, most: int, run: Run) -> dict[str, Any]:
    """Return arguments for the log, in place of large ones the beginning of their JSON, their size and a digest."""
    share, found = most // len(arguments), dict[str, Any]()
    for name, value in arguments.items():
        data = to_json(value)
        digest = hashlib.blake2b(data, digest_size=4).hexdigest()
        cut = len(data) > share
        found[name] = f"{_head(data, share, run)}... ({len(data):,} bytes, digest {digest})" if cut else value
    if len(to_json(found)) > 2 * most:  # too many
        return {"arguments": f"({len(arguments):,} arguments, {size:,} bytes)"}
    return found


def close_call(run: Run, key: str) -> Entry:
    """Return the entry which says that a call which is no tool call is not in flight any more."""
    return store_calls(run, ToolCalls.decode(run.history.saved.get(TOOLS)).without_open(key))


def close_calls(run: Run, scopes: tuple[str, ...]) -> list[Entry]:
    """Return the entries which say that no call in scopes is in flight any more: their branches were cancelled."""
    known = ToolCalls.decode(run.history.saved.get(TOOLS))
    intents = run.history.intents
    closed = [key for key in known.open if key.startswith(scopes) and (key not in intents or is_note(intents[key]))]
    if not closed:
        return []
    for key in closed:
        intents.pop(key, None)
    left = known._replace(open=[key for key in known.open if key not in closed])
    return [*(Entry(Kind.INTENT, key, b"") for key in closed), store_calls(run, left)]


def _by_name(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """Return a call's arguments by name, as JSON data, and its size.

    A value without a JSON form becomes the name of its type.
    """
    try:
        named = dict(inspect.signature(fn).bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):  # the call will raise, or there is no signature
        named = {str(place): value for place, value in enumerate(args)} | kwargs
    data = to_json(named, inf_nan_mode="strings", fallback=lambda one: f"<{type(one).__name__}>")
    return from_json(data), len(data)
