"""Doubts: risky steps that were cut off, and what a person has decided about them.

A risky step stores its intent, the field `i:KEY` of the checkpoint, before it acts, and the record of its result
deletes it. An intent that is left says that the effect may have happened. A decision is a part of the intent, so the
record deletes both in one act, and a run that dies in between reads the decision again.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import orjson

from .delivery.checkpoint import edit_checkpoint, read_position
from .envelope import check_size
from .errors import CannotResolve, DecryptionError, TaskNotFound
from .keys import Partition
from .records import State, read_record
from .transport.gateway import Gateway
from .transport.large_values import SCAN_START, scan_page

Decision: TypeAlias = Literal["result", "failed", "run_again"]

_DECISIONS: Final = ("result", "failed", "run_again")

_PAGE: Final = 1000

_TRIES: Final = 10
"""Times that a decision is stored again after something else has written to the task."""

_NO_WAIT: Final = "#"
"""Kind of wait that no task has: a decision wakes no task."""

RESOLVED: Final = "step_resolved"
"""Type of the event of a decision."""


@dataclass(frozen=True, slots=True)
class Resolution:
    """A person's decision about a step in doubt.

    Attributes:
        text: The result as JSON, or the text of the failure.
        by: Name of the person.
        read: Whether a run has raised the failure in its handler. Then the decision is final.
    """

    decision: Decision
    text: str = ""
    by: str = ""
    read: bool = False


@dataclass(frozen=True, slots=True)
class Doubt:
    """A risky step without a result. arguments: their text, for people. resolution: None while nothing is decided."""

    task_id: str
    step: str
    arguments: str = ""
    resolution: Resolution | None = None

    @property
    def idempotency_key(self) -> str:
        return f"{self.task_id}:{self.step}"

    @property
    def command(self) -> str:
        return resolve_command(self.task_id, self.step)

    def summary(self) -> dict[str, Any]:
        """Return the doubt as plain data."""
        decided = self.resolution
        return {
            "step": self.step,
            "arguments": self.arguments,
            "idempotency_key": self.idempotency_key,
            "decision": None if decided is None else decided.decision,
            "by": None if decided is None else decided.by,
        }

    def __str__(self) -> str:
        call = f"{self.step}({self.arguments})"
        if self.resolution is None:
            return f"{call}, idempotency key {self.idempotency_key}; {self.command}"
        by = f" by {self.resolution.by}" if self.resolution.by else ""
        return f"{call}, idempotency key {self.idempotency_key}; resolved{by}: {self.resolution.decision}"


def resolve_command(task_id: str, step: str) -> str:
    """Return the command by which a person decides about a step."""
    return f"perdure task resolve {task_id} {shlex.quote(step)} with --result JSON, --failed TEXT or --run-again"


# the stored form


def encode_intent(digest: str, arguments: str, resolution: Resolution | None = None) -> bytes:
    """Return the stored form of an intent. digest: hash of the arguments. arguments: their text."""
    stored: dict[str, Any] = {"h": digest, "a": arguments}
    if resolution is not None:
        decided = {"decision": resolution.decision, "text": resolution.text, "by": resolution.by}
        stored["r"] = {**decided, **({"read": True} if resolution.read else {})}
    return orjson.dumps(stored)


def intent_digest(intent: bytes) -> str:
    """Return the hash of the arguments in an intent."""
    return str(_decoded(intent).get("h", ""))


def intent_arguments(intent: bytes) -> str:
    """Return the text of the arguments in an intent."""
    return str(_decoded(intent).get("a", ""))


def resolution_in(intent: bytes | None) -> Resolution | None:
    """Return the decision in an intent, None without one."""
    if intent is None or b'"r":{' not in intent:
        return None
    found = _decoded(intent).get("r")
    if not isinstance(found, dict) or found.get("decision") not in _DECISIONS:
        return None
    return Resolution(
        found["decision"], str(found.get("text", "")), str(found.get("by", "")), read=found.get("read") is True
    )


def open_doubts(task_id: str, intents: Mapping[str, bytes]) -> list[Doubt]:
    """Return the doubts among decrypted intents, by step. Notes of tool calls and final decisions leave none."""
    found = []
    for step, intent in sorted(intents.items()):
        stored, decided = _decoded(intent), resolution_in(intent)
        if "t" not in stored and not (decided is not None and decided.read):
            found.append(Doubt(task_id, step, str(stored.get("a", "")), decided))
    return found


def _decoded(intent: bytes) -> dict[str, Any]:
    """Return an intent; empty if it cannot be read: it is one all the same."""
    try:
        found = orjson.loads(intent)
    except orjson.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}


# reading and deciding


async def _read_intents(
    gateway: Gateway, partition: Partition, task_id: str, *, lenient: bool = False
) -> dict[str, bytes]:
    """Return the intents of a task, decrypted. lenient: those that cannot be are empty. Raises `DecryptionError`."""
    cipher = gateway.encryptor.of(partition, task_id)
    stored: dict[bytes, bytes] = {}
    cursor = SCAN_START
    while not cursor.is_end:
        cursor, fields = await scan_page(gateway, partition.steps(task_id), cursor, "i:*", _PAGE)
        stored |= fields
    intents: dict[str, bytes] = {}
    for name, value in stored.items():
        field = name.decode("utf-8", "replace")
        key = field.removeprefix("i:")
        try:
            intents[key] = cipher.decrypt(field, value)
        except DecryptionError:
            if not lenient:
                raise
            intents[key] = b""
    return intents


async def read_doubts(gateway: Gateway, partition: Partition, task_id: str) -> list[Doubt]:
    """Return the doubts of a task. It must not run: a step that runs has an intent as well."""
    return open_doubts(task_id, await _read_intents(gateway, partition, task_id, lenient=True))


async def resolve_step(
    gateway: Gateway,
    partition: Partition,
    task_id: str,
    step: str,
    resolution: Resolution,
    *,
    limit: int,
    replaces: Decision | Literal["none"] | None = None,
) -> State:
    """Store a decision, with an event, and return the state of the task. See `TaskHandle.resolve_step`.

    The script stores it only if the task is still as it was when the doubt was read.

    Args:
        replaces: The decision that the person has seen; another one is kept, and `CannotResolve` raised. Default: any.
    """
    check_size(f"the decision about step {step!r} of task {task_id}", len(resolution.text.encode()), limit)
    for _ in range(_TRIES):
        position = await read_position(gateway, partition, task_id)
        record = await read_record(gateway, partition, task_id)
        if position.state is None or record is None:
            raise TaskNotFound(task_id, f"queue {partition.queue!r}")
        if record.state in (State.SUCCEEDED, State.CANCELLED):
            raise CannotResolve(task_id, step, f"the task is {record.state}")
        if record.state is State.RUNNING:
            raise CannotResolve(task_id, step, _RUNS)
        intents = await _read_intents(gateway, partition, task_id)
        failure = record.error if record.state is State.DEAD else None
        _check_open(task_id, step, intents, failure or {})
        former = resolution_in(intents[step])
        if replaces is not None and replaces != ("none" if former is None else former.decision):
            who = former.by if former is not None and former.by else "another person"
            raise CannotResolve(task_id, step, f"{who} has decided meanwhile: {former.decision if former else 'none'}")
        stored = _decoded(intents[step])
        intent = encode_intent(str(stored.get("h", "")), str(stored.get("a", "")), resolution)
        event: dict[str, Any] = {"step": step, "decision": resolution.decision, "by": resolution.by}
        if resolution.decision == "result":
            event["result"] = orjson.Fragment(resolution.text)
        elif resolution.decision == "failed":
            event["failed"] = resolution.text
        data = orjson.dumps({name: value for name, value in event.items() if value})
        done = await edit_checkpoint(
            gateway,
            partition,
            task_id,
            position,
            event=(RESOLVED, data),
            fields={f"i:{step}": intent},
            wakes=_NO_WAIT,
        )
        if done is not None:
            return record.state
    raise CannotResolve(task_id, step, _RUNS)


_RUNS: Final = "a worker runs the task; wait until it has ended or waits, see 'perdure task why'"


def _check_open(task_id: str, step: str, intents: Mapping[str, bytes], failure: Mapping[str, Any]) -> None:
    """Raise `CannotResolve` unless the step is in doubt. failure: the error of a dead letter.

    A failure that a run has read is final, unless the handler did not catch it: then nothing has followed from it.
    """
    doubts = open_doubts(task_id, intents)
    if any(doubt.step == step for doubt in doubts):
        return
    decided = resolution_in(intents.get(step))
    if decided is not None and decided.read:
        named, message = str(failure.get("error", "")).rpartition(".")[2], str(failure.get("message", ""))
        if named == "StepResolvedAsFailed" and message.startswith(failure_text(step, "")):
            return
        raise CannotResolve(task_id, step, "a run has read the decision that it failed, and continued with it")
    named = ", ".join(repr(doubt.step) for doubt in doubts)
    raise CannotResolve(task_id, step, f"it is not in doubt; in doubt: {named or 'no step'}")


def failure_text(step: str, text: str) -> str:
    """Return the message of the error that a step raises which was resolved as failed."""
    return f"step {step!r} was resolved as failed: {text}"


def undecided(doubts: Sequence[Doubt]) -> list[Doubt]:
    """Return the doubts about which nothing was decided."""
    return [doubt for doubt in doubts if doubt.resolution is None]
