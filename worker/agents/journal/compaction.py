"""Compaction of an agent's state from outside: more leaves it than the agent's own policy says."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final

import orjson

from ....queues.delivery.checkpoint import edit_checkpoint, read_position
from ....queues.envelope import check_size
from ....queues.inspection.views import checkpoint_fields
from ....queues.keys import SNAPSHOT, Partition
from ....queues.records import State
from ....queues.transport.gateway import Gateway
from ...errors import BadHistory, StateError
from .agent_events import Archived
from .archive import archived_field, remove_oldest
from .history import state_at
from .json_patch import diff
from .snapshot import BLOB, encode_snapshot

COMPACTION: Final = "compaction"
"""The wait of a task whose state is too large, as its record and its log name it."""

TOO_LARGE: Final = "#too_large"
"""Checkpoint key of the size that a state would have had, as JSON, while the task waits for a compaction."""


@dataclass(frozen=True, slots=True)
class Compaction:
    """Result of a compaction.

    Attributes:
        before, after: Sizes of the fields of the state, in bytes of JSON.
        steps, messages: How many left the state.
        state: State of the task when it was compacted. woken: whether the task is due now.
    """

    before: dict[str, int]
    after: dict[str, int]
    steps: int
    messages: int
    state: State
    woken: bool


async def compact_state(
    gateway: Gateway,
    partition: Partition,
    task_id: str,
    *,
    keep_steps: int,
    keep_messages: int,
    drop_context: Collection[str] = (),
    payload_limit: int,
) -> Compaction:
    """Archive closed steps and messages of a parked agent or a dead letter, but for the latest so many of each.

    An agent that waits because its state is too large is woken, also if nothing leaves the state: its limit may have
    been raised.

    Args:
        drop_context: Keys of `context` to delete.
        payload_limit: Largest event in bytes.

    Raises:
        BadHistory: The log is incomplete, or the task is not an agent.
        KeyError: `context` has no such key.
        StateError: The task is queued, running or has ended, or was changed meanwhile. Nothing was changed.
        DecryptionError, PayloadTooLarge
    """
    position = await read_position(gateway, partition, task_id)
    state = position.state
    if state is None or state not in (State.SCHEDULED, State.DEAD):
        raise _refused(task_id, "no such task" if state is None else state.value)
    past = await state_at(gateway, partition, task_id)
    waits = past.state["waiting_for"]
    waits_for_room = waits is not None and waits.get("what") == COMPACTION
    if past.agent is None and not waits_for_room:
        raise BadHistory(task_id, f"task {task_id} has no state to compact: it is not an agent")
    if past.number != position.events:
        raise _refused(task_id, "a task that changes")
    before = past.state
    context = dict(before["context"])
    for key in drop_context:
        del context[key]
    removed = remove_oldest(before, steps=keep_steps, messages=keep_messages, number=position.events + 1)
    after = {**(before if removed is None else removed.state), "context": context}
    if waits_for_room:
        after["waiting_for"] = None
    records = {} if removed is None else removed.steps
    messages = 0 if removed is None else removed.messages
    event = Archived(steps=tuple(records), messages=messages, changes=diff(before, after), own=True).to_json()
    check_size(f"the compaction of task {task_id}", len(event), payload_limit)
    blobs: dict[str, bytes] = {}
    snapshots: dict[str, bytes] = {}
    if past.agent is not None:  # else its inputs were too large: it has not started
        snapshots[SNAPSHOT] = encode_snapshot(after, position.events + 1, past.agent, blobs)
    old = await checkpoint_fields(gateway, partition, task_id, BLOB)
    woken = await edit_checkpoint(
        gateway,
        partition,
        task_id,
        position,
        event=("archived", event),
        fields={
            **{archived_field(key): data for key, data in records.items()},
            **{f"s:{key}": data for key, data in {**blobs, **snapshots}.items()},
        },
        dropped=[f"s:{TOO_LARGE}", *(f"s:{key}" for key in old if key not in blobs)],
        wakes=COMPACTION,
    )
    if woken is None:
        raise _refused(task_id, "a task that changes")
    return Compaction(_sizes(before), _sizes(after), len(records), messages, state, woken)


def _sizes(state: dict[str, Any]) -> dict[str, int]:
    return {name: len(orjson.dumps(value)) for name, value in state.items()}


def _refused(task_id: str, found: str) -> StateError:
    return StateError(
        f"the state of task {task_id} could not be changed: the task must be waiting, scheduled or dead, got {found}"
    )
