"""Stored form of the failure of a step: a step record whose result is the text of the error.

The first line of the record is a JSON object with `f` (the state of the failure and what is known of the error), and
`h` and `a` as in every step record; the second line is the text as JSON. The text is not masked: it becomes a part of
prompts, whose digests must not change. The record is encrypted as others are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import orjson

from ....queues.step_failures import FAILURE_HEAD


class FailureState(StrEnum):
    """State of a step that did not end with a result."""

    OPEN = "open"
    """Tries have failed, and others follow."""
    FAILED = "failed"
    """The last try has failed, and nothing has followed from it. The end of the attempt drops it."""
    HANDLED = "handled"
    """The handler has continued after the failure."""
    CUT_OFF = "cut off"
    """The handler has cut the step off, as with a time-out, and has continued."""


@dataclass(frozen=True, slots=True)
class FailureRecord:
    """A failure of a step.

    Attributes:
        tries: Tries that have ended.
        message: Id of the task's message, which changes with each attempt: as long as nothing has followed from the
            failure, it counts in the runs of this message only.
        error: What is known of the error (see `steps/recorded_errors.py`). Empty without one.
        digest, arguments: Hash and text of the arguments of the call.
        text: Text of the error.
    """

    state: FailureState
    tries: int
    digest: str
    arguments: str
    text: str = ""
    error: Mapping[str, Any] | None = None
    message: str = ""

    def encode(self) -> bytes:
        """Return the stored form."""
        failure = {"state": self.state, "tries": self.tries, "error": self.error, "message": self.message}
        head = {"f": failure, "h": self.digest, "a": self.arguments}
        return orjson.dumps(head) + b"\n" + orjson.dumps(self.text)

    @classmethod
    def decode(cls, data: bytes) -> FailureRecord:
        """Read what `encode` returned."""
        head, _, text = data.partition(b"\n")
        call = orjson.loads(head)
        failure = call["f"]
        state, called = FailureState(failure["state"]), (call.get("h", ""), call.get("a", ""))
        return cls(state, failure["tries"], *called, orjson.loads(text), failure["error"], failure["message"])


def is_failure(record: bytes) -> bool:
    """Return whether a step record is a failure."""
    return record.startswith(FAILURE_HEAD)


def is_unhandled(record: bytes) -> bool:
    """Return whether a step record is a failure from which nothing has followed yet."""
    return is_failure(record) and FailureRecord.decode(record).state in (FailureState.OPEN, FailureState.FAILED)
