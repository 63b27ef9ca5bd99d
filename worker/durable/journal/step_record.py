"""Stored form of a step record: the value of a `d:` field in a task's checkpoint.

A record has two lines. The first is a JSON object about the call, the second is the result as JSON, which has no line
breaks. The object is `{"h": HASH, "a": TEXT}`, or `{}` for records that are not compared with their call: those of
plans, artifacts and summaries. The record of a result that is read back as another type than was written begins with
`"m"`: the place, and the two types. That of a failure begins with `"f"`: see `failure_record.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import orjson

from ....queues.step_failures import FAILURE_HEAD
from ....queues.wording import shortened

VERSION: Final = "#version"
"""Checkpoint key of the version of the task's code with which the run began; absent for version 1."""

TRACE: Final = "#trace"
"""Checkpoint key of the W3C trace context of the last run that left one."""

PLANNED: Final = "#planned"
"""Checkpoint key of the plan of a function."""

WORKSPACE: Final = "#workspace"
"""Checkpoint key of the manifest of a task's workspace."""

MISREAD: Final = b"!"
"""Begins what `StepRecord.result_of` returns for a result that is read back as another type: the whole record."""

FAILURE: Final = b"?"
"""Begins what `StepRecord.result_of` returns for a failure: the whole record."""

_MISREAD_HEAD: Final = b'{"m":'

UNSAVED: Final = "#unsaved"
"""Checkpoint key of the mark that the files of a recorded step are not saved: their folder, its host, the step, why."""


class StepRecord(NamedTuple):
    """The result of a recorded step as JSON, with the arguments that it was called with.

    digest: hash of the arguments; empty if a call is not compared with the record. arguments: their text, for people.
    misread: place, written and read type of a value that is read back as another type; None for any other result.
    """

    result: bytes
    digest: str = ""
    arguments: str = ""
    misread: tuple[Sequence[int | str], str, str] | None = None

    def encode(self) -> bytes:
        """Return the stored form."""
        if self.misread is not None:
            head = {"m": list(self.misread), "h": self.digest, "a": self.arguments}
            return orjson.dumps(head) + b"\n" + self.result
        return self.encode_call(*self[:3]) if self.digest else b"{}\n" + self.result

    @staticmethod
    def encode_call(result: bytes, digest: str, arguments: str) -> bytes:
        """Return the stored form of a record that is compared with its call. Cheaper than `encode`."""
        return orjson.dumps({"h": digest, "a": arguments}) + b"\n" + result

    @staticmethod
    def result_of(data: bytes, digest: str) -> bytes | None:
        """Return the result in a stored record if the call had these arguments, else None. Cheaper than `decode`.

        The record of a misread result is returned as a whole, after `MISREAD`, that of a failure after `FAILURE`.

        digest: "" for a record that is not compared with its call.
        """
        head = f'{{"h":"{digest}"'.encode() if digest else b"{}\n"
        if data.startswith(head):
            return data.partition(b"\n")[2]
        mark = MISREAD if data.startswith(_MISREAD_HEAD) else FAILURE if data.startswith(FAILURE_HEAD) else None
        return mark + data if mark is not None and StepRecord.decode(data).digest == digest else None

    @classmethod
    def decode(cls, data: bytes) -> StepRecord:
        """Read what `encode` returned. Raises ValueError if its first line is not a JSON object."""
        head, _, result = data.partition(b"\n")
        call = orjson.loads(head)
        if not isinstance(call, dict):
            raise ValueError(f"a step record must begin with a JSON object, got {head!r}")
        return cls(result, call.get("h", ""), call.get("a", ""), call.get("m"))


_MAX_RESULT: Final = 1000
"""Characters of a result as text."""


def result_text(data: bytes) -> str:
    """Return a result in JSON as text for people and models: a string as it is, and at most its beginning."""
    if data == b"null":
        return "no result"
    text = orjson.loads(data) if data.startswith(b'"') else data[: 4 * _MAX_RESULT].decode("utf-8", "ignore")
    return shortened(text, _MAX_RESULT)
