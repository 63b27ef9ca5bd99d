"""Matching of calls to what earlier runs have recorded: of steps, and of calls that log, send or read."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from ....queues.delivery.checkpoint import load_history, recorded_steps
from ....queues.event_log import walk_events
from ....queues.keys import Partition
from ....queues.transport.backoff import retry_while_unavailable
from ....queues.transport.gateway import Gateway
from ...errors import StepOutOfOrder
from ...log import log_wait
from ..journal.event import LOG_BASE, RECORDED
from ..run import Run
from .keys import Match, StrictStepKeys


async def match_step(run: Run, name: str, digests: tuple[str, ...], *, rerun: bool = False) -> Match:
    """Return the key of a called step, and its record if there is one. rerun: take the next record if none fits.

    Raises `DecryptionError`.
    """
    keys, history = run.keys, run.history
    if history.pages is not None:
        await keys.read(name, digests, history)
    for digest in digests:
        if known := keys.match_next(name, digest, history):
            return (*known, None)
    return keys.match_any(name, digests, history, run.task, rerun=rerun)


async def match_call(
    run: Run,
    name: str,
    digest: str,
    started: Mapping[str, bytes] | None = None,
    *,
    order: str | None = None,
    caller: asyncio.Task[object] | None = None,
) -> Match:
    """Return the key of a call that is not a step, and its record if there is one.

    Records of earlier versions have no digest, and are found by order. In the handler's own asyncio task, a call that
    fits no record meets the next one: its text may differ in each run.

    Args:
        started: What earlier runs stored of calls without a record: JSON objects with the digest as `h`.
        order: What the digest of the next record must begin with to be met, up to a colon, which those of earlier
            versions do not have; None for any record, also if another one, which is not read yet, fits the call.
        caller: The asyncio task that makes such calls in one order, in place of the handler's own.

    Raises `DecryptionError`.
    """
    keys, history = run.keys, run.history
    if not (history.records or started):
        return keys.next(name), None, None
    if known := keys.match_next(name, digest, history):
        return (*known, None)
    digests, handler = (digest, ""), caller or run.task
    if history.pages is not None:
        await keys.read(name, digests, history, next_only=order is None and asyncio.current_task() is handler)
        if known := keys.match_next(name, digest, history):
            return (*known, None)
    if order and ":" in (met := keys.next_digest(name, history.done, started or {})) and not met.startswith(order):
        handler = None
    return keys.match_any(name, digests, history, handler, started=started)


def digest_of(data: bytes) -> str:
    """Return the hash of what a call logs, by which its record is found."""
    return hashlib.blake2b(data, digest_size=12).hexdigest()


async def read_recorded_steps(run: Run) -> Iterable[str]:
    """Return the keys of the recorded steps; those of a large checkpoint are read."""
    if run.history.pages is None:
        return run.history.done
    read = partial(recorded_steps, run.gateway, run.delivery.partition, run.id)
    return await retry_while_unavailable(read, on_wait=log_wait(f"task {run.id}", run.touch))


async def reload_records(run: Run) -> None:
    """Read the whole checkpoint again, so that a step which runs again in this run finds what it has recorded.

    Raises `LeaseLost`, `EntriesLost`, `DecryptionError`, `UnreadableCheckpoint`.
    """
    await run.flush()
    load = partial(load_history, run.gateway, run.delivery, run.id)
    stored = await retry_while_unavailable(load, on_wait=log_wait(f"task {run.id}", run.touch))
    stored.decrypt(run.gateway.encryptor.of(run.delivery.partition, run.id))
    await stored.read_all()
    for kind, records in run.history.by_kind().items():
        records.clear()
        records.update(stored.by_kind()[kind])


async def check_order(run: Run, keys: StrictStepKeys, step: str) -> None:
    """Check that a new step comes after the recorded ones of its scope. Raises `StepOutOfOrder`."""
    if not keys.complete and (missed := keys.missed(await read_recorded_steps(run))):
        find = partial(_recorded_first, run, missed)
        raise StepOutOfOrder(step, await retry_while_unavailable(find, on_wait=log_wait(f"task {run.id}", run.touch)))


async def _recorded_first(run: Run, steps: Sequence[str]) -> str:
    """Return the step that the log has first."""
    async for event in walk_events(run.gateway, run.delivery.partition, run.id):
        if event.type in RECORDED and event.step is not None and event.step in steps:
            return event.step
    return steps[0]


async def gap_before(gateway: Gateway, partition: Partition, task_id: str, step: str) -> tuple[int, int] | None:
    """Return the numbers of the first and the last event that are missing before the record of a step, if any are."""
    gap: tuple[int, int] | None = None
    found: tuple[int, int] | None = None
    last = 0
    async for event in walk_events(gateway, partition, task_id):
        if event.restarts:
            gap = None
        if event.type == LOG_BASE:
            gap, last = None, (event.number or 0) - 1
        if event.number is not None:
            if event.number > last + 1:
                gap = (last + 1 if gap is None else gap[0], event.number - 1)
            last = event.number
        if event.step == step and event.type in RECORDED:
            found = gap
    return found
