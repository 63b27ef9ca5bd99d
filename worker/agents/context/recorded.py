"""Prompts of an agent as they were built, recorded for people.

The stored form is a line of JSON about the prompt, then its messages as JSON, compressed. Secrets of the task are
masked. A prompt of more than `PROMPT_BYTES` has its longest messages cut; of all prompts of a task about
`PROMPTS_BYTES` are kept. What a run costs more: the compression, and one more entry in the write of the step's record.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from ...durable.call_records import PROMPTS, CallRecord, record_call
from ...durable.journal.event_redaction import redacted_data
from ...durable.run import Run
from ...durable.steps.current import CURRENT_STEP
from ...errors import first_problem
from .prompt import Prompt

PROMPT_BYTES: Final = 1024 * 1024
"""Bytes of the messages of a recorded prompt, before they are compressed."""

PROMPTS_BYTES: Final = 4 * 1024 * 1024
"""Bytes of the recorded prompts of a task, about, after they are compressed."""

_FEWEST: Final = 4
"""Prompts that are kept however large they are."""

_LEVEL: Final = 1
"""Level of the compression: the fastest."""

_SHORTEST: Final = 200
"""Characters that a message keeps at least when it is cut."""


class PromptHead(BaseModel):
    """Description of a recorded prompt, without its messages.

    Attributes:
        step: Key of the step that called the model; empty outside of steps.
        tries: Number of the step's try.
        attempt: Attempt of the task.
        plan_step: Key of the step of the plan that was current.
        event: Number of the last event before the prompt was built: the state after it is what the agent knew.
        window: Tokens that the model accepts.
        tokens: Tokens by layer.
        left_out: Number of items that did not fit, by kind.
        wanted: Tokens that the prompt would have had with everything.
        stable, cacheable: See `Prompt`.
        count: Number of messages.
        digest: SHA-256 of the messages, before they were masked and cut.
        cut: Characters that were cut from the recorded messages.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    v: int = 1
    step: str = ""
    tries: int = 1
    attempt: int = 1
    plan_step: str = ""
    event: int = 0
    window: int = 0
    tokens: Mapping[str, int] = Field(default_factory=dict)
    left_out: Mapping[str, int] = Field(default_factory=dict)
    wanted: int = 0
    stable: int = 0
    cacheable: int = 0
    count: int = 0
    digest: str = ""
    cut: int = 0


async def record_prompt(run: Run, prompt: Prompt, *, window: int, plan_step: str, keep: int) -> None:
    """Record a prompt for people. keep: the number of prompts of the task that are kept, about; the latest."""
    step = CURRENT_STEP.get()
    messages: list[Any] = [one.model_dump(exclude_defaults=True) for one in prompt.messages]
    data = _json(messages)
    digest = hashlib.sha256(data).hexdigest()
    if run.redact is not None:
        messages = redacted_data(messages, run.redact)
        data = _json(messages)
    removed = 0
    if len(data) > PROMPT_BYTES:
        messages, removed = _cut(messages)
        data = _json(messages)
    head = PromptHead(
        step=step.key if step is not None else run.keys.within or "",
        tries=1 if step is None else step.attempt,
        attempt=run.history.counters.attempts + 1,
        plan_step=plan_step,
        event=max(run.events, run.history.events),
        window=window,
        tokens=prompt.tokens,
        left_out=prompt.left_out,
        wanted=prompt.wanted,
        stable=prompt.stable,
        cacheable=prompt.cacheable,
        count=len(messages),
        digest=digest,
        cut=removed,
    )
    stored = head.model_dump_json(exclude_defaults=True).encode() + b"\n" + zlib.compress(data, _LEVEL)
    room = max(_FEWEST, min(keep, PROMPTS_BYTES // len(stored)))
    await record_call(run, PROMPTS, f"{head.step} {digest}", stored, room)


def _json(messages: Sequence[Any]) -> bytes:
    try:
        return orjson.dumps(messages, default=str)
    except TypeError:  # half of a surrogate pair, or an integer of more than 64 bits
        return json.dumps(messages, ensure_ascii=False, default=str).encode("utf-8", "replace")


def _cut(messages: list[Any]) -> tuple[list[Any], int]:
    """Return messages whose texts are cut so that they fit, and how many characters are missing."""
    room = PROMPT_BYTES // 4
    while True:
        removed = [0]
        found = [_shortened(message, room, removed) for message in messages]
        if room <= _SHORTEST or len(_json(found)) <= PROMPT_BYTES:
            break
        room //= 2
    if len(_json(found)) > PROMPT_BYTES:  # a great many messages
        count = len(found) // 2
        while count and len(_json(found[-count:])) > PROMPT_BYTES:
            count //= 2
        removed[0] += len(_json(found)) - len(_json(found[-count:] if count else []))
        found = found[-count:] if count else []
    return found, removed[0]


def _shortened(value: Any, room: int, removed: list[int]) -> Any:
    if isinstance(value, str) and len(value) > room:
        removed[0] += len(value) - room
        return f"{value[:room]}\n[{len(value) - room} more characters]"
    if isinstance(value, dict):
        return {name: _shortened(part, room, removed) for name, part in value.items()}
    return [_shortened(part, room, removed) for part in value] if isinstance(value, list) else value


class BadPrompt(ValueError):
    """A recorded prompt that cannot be read."""


def decode_head(record: CallRecord) -> PromptHead:
    """Return what is known of a recorded prompt. Raises `BadPrompt`."""
    if record.problem is not None:
        raise BadPrompt(record.problem)
    try:
        return PromptHead.model_validate_json(record.data.partition(b"\n")[0])
    except ValidationError as error:
        raise BadPrompt(first_problem(error)) from None


def decode_messages(record: CallRecord) -> list[dict[str, Any]]:
    """Return the messages of a recorded prompt. Raises `BadPrompt`."""
    reader = zlib.decompressobj()
    try:
        data = reader.decompress(record.data.partition(b"\n")[2], 2 * PROMPT_BYTES)
        found = from_json(data)
    except (zlib.error, ValueError) as error:
        raise BadPrompt(f"its messages cannot be read: {error}") from None
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise BadPrompt("its messages are no list of objects")
    return found
