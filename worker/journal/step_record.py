"""Stored form of a step record: the value of a `d:` field in a task's checkpoint.

A record has two lines. The first is a JSON object about the call, the second is the result as JSON, which has no line
breaks. The object is `{"h": HASH, "a": TEXT}`, or `{}` for records that are not compared with their call: those of
plans, artifacts and summaries, and those of events and inbox reads that earlier versions wrote.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import orjson

__all__ = ["VERSION", "StepRecord"]

VERSION: Final = "#version"
"""Checkpoint key of the version of the task's code with which the run began; absent for version 1."""


class StepRecord(NamedTuple):
    """The result of a recorded step as JSON, with the arguments that it was called with.

    digest: hash of the arguments; empty if a call is not compared with the record. arguments: their text, for people.
    """

    result: bytes
    digest: str = ""
    arguments: str = ""

    def encode(self) -> bytes:
        """Return the stored form."""
        return self.encode_call(*self) if self.digest else b"{}\n" + self.result

    @staticmethod
    def encode_call(result: bytes, digest: str, arguments: str) -> bytes:
        """Return the stored form of a record that is compared with its call. Cheaper than `encode`."""
        return orjson.dumps({"h": digest, "a": arguments}) + b"\n" + result

    @staticmethod
    def result_of(data: bytes, digest: str) -> bytes | None:
        """Return the result in a stored record if the call had these arguments, else None. Cheaper than `decode`.

        digest: "" for a record that is not compared with its call.
        """
        head = f'{{"h":"{digest}"'.encode() if digest else b"{}\n"
        return data.partition(b"\n")[2] if data.startswith(head) else None

    @classmethod
    def decode(cls, data: bytes) -> StepRecord:
        """Read what `encode` returned. Raises ValueError if its first line is not a JSON object."""
        head, _, result = data.partition(b"\n")
        call = orjson.loads(head)
        if not isinstance(call, dict):
            raise ValueError(f"a step record must begin with a JSON object, got {head!r}")
        return cls(result, call.get("h", ""), call.get("a", ""))
