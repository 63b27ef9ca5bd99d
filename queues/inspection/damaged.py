"""Records for lists: one that cannot be read is a row with its problem, and hides no other task."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from ..errors import QueueError, Unavailable, UnreadableRecord
from ..keys import Partition
from ..records import Record, State, read_records
from ..transport.gateway import Gateway


async def read_each(gateway: Gateway, partition: Partition, task_ids: Sequence[str]) -> list[Record | None]:
    """Return the records of tasks, in the order of the ids. `Record.problem` is set in those that cannot be read."""
    try:
        return await read_records(gateway, partition, task_ids)
    except Unavailable:
        raise
    except (QueueError, LookupError, TypeError, ValueError):
        return [await _read(gateway, partition, task_id) for task_id in task_ids]


async def _read(gateway: Gateway, partition: Partition, task_id: str) -> Record | None:
    try:
        return (await read_records(gateway, partition, [task_id]))[0]
    except Unavailable:
        raise
    except (QueueError, LookupError, TypeError, ValueError) as error:
        if isinstance(error, UnreadableRecord):
            problem = str(error)
        else:
            problem = f"could not read {partition.record(task_id)} and the keys beside it: {error}"
        return _damaged(partition, task_id, await _state(gateway, partition, task_id), problem)


async def _state(gateway: Gateway, partition: Partition, task_id: str) -> State:
    """Return the stored state; queued, if that cannot be read either."""
    (stored,) = await gateway.pipeline_each([("HGET", partition.record(task_id), "state")])
    with suppress(ValueError):
        if isinstance(stored, bytes):
            return State(stored.decode())
    return State.QUEUED


def _damaged(partition: Partition, task_id: str, state: State, problem: str) -> Record:
    return Record(
        id=task_id,
        queue=partition.queue,
        partition=partition.index,
        state=state,
        task=None,
        args=None,
        headers={},
        attempts=0,
        crashes=0,
        replays=0,
        enqueued_at=None,
        due_at=None,
        finished_at=None,
        ran_ms=None,
        worker=None,
        step=None,
        alive_at=None,
        result=None,
        reason=None,
        error=None,
        problem=problem,
    )
