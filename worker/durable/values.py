"""Named values of the running task, which pages read and write while it runs: `ctx.values`.

A read in the handler's body is recorded once, like a message, so that a resumed run goes the same way. A value that the
body sets is written at most once a second, and before the outcome. With it, the run stores how often each scope has
set each name: a resumed run, which sets everything again from its top, skips what is stored, and so replaces no later
value of a page. Within a step both see the present: the step is recorded as a whole.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import orjson

from ...queues.delivery.checkpoint import Entry, Kind
from ...queues.transport.backoff import retry_while_unavailable
from ...queues.values import HANDLER, MAX_VALUES, NamedValue, encode_value, read_names, read_value
from ..errors import StepDefinitionError
from ..log import FirstOfEach, log_wait, logger
from .journal.step_record import StepRecord
from .run import Run
from .steps.current import Durability, check_call, step_here
from .steps.matching import digest_of, match_call

_GET: Final = "#get:"
"""Beginning of the names of the records of reads."""

_SET: Final = "#set:"
"""Beginning of the checkpoint keys of the numbers of stored changes, by scope and name."""

_reported: Final = FirstOfEach()


class _SetNames(set[str]):
    """Names of the values that a run has set, or has found."""


class Values:
    """Named values of the running task; see `Context.values`."""

    def __init__(self, run: Run, durability: Durability) -> None:
        self._run = run
        self._durability = durability

    async def get(self, name: str, default: Any = None) -> Any:
        """Return a value, or the default if nothing has set it. In a handler's body, recorded once like a step.

        Within a step it returns the present value, each time that the step runs. A value that this worker cannot read
        counts as missing, with a warning in its log.

        Raises:
            StepDefinitionError: the name is not valid.
        """
        encoded_value(name, None)
        run, record = self._run, _GET + name
        if step_here() is not None:
            await check_call(run, record, own=True, within=True)
            found = await self._read(name)
            return default if found is None else found.value
        with run.calling():
            await check_call(run, record, own=True)
            digest = digest_of(name.encode())
            key, recorded, former = await match_call(run, record, digest)
            if former is not None:
                recorded = StepRecord.decode(former).result
            if recorded is None:
                if run.stopping:
                    await run.boundary()
                found = await self._read(name)
                recorded = orjson.dumps([] if found is None else [found.value])
                stored, replicated = self._durability != "async", self._durability == "replicated"
                entry = Entry(Kind.DONE_WITH_EVENT, key, StepRecord(recorded, digest).encode())
                await run.recorder.put(entry, wait=stored, replicated=replicated)
            run.touch()
        return next(iter(orjson.loads(recorded)), default)

    async def set(self, name: str, value: Any) -> None:
        """Set a value: JSON data of at most 64 KiB, under one of at most 64 names of the task.

        The latest value of a name is written at most once a second, and before the outcome. A resumed run skips the
        calls whose values are stored; calls are counted by their scope and name. Within a step nothing is skipped.

        Raises:
            StepDefinitionError: the name is not valid; the value is not JSON or too large; the task has 64 others.
        """
        data = encoded_value(name, value)
        run, within = self._run, step_here() is not None
        await check_call(run, _SET + name, own=True, within=within)
        key, count = ("", 0) if within else run.keys.count(_SET + name)
        saved = run.history.saved
        if not within:
            if run.history.pages is not None and key not in saved:
                await run.history.read_unfinished(key)
            if count <= int(saved.get(key, b"0")):
                return
        await self._check_new(name)
        await run.check_stopped()
        entries = [Entry(Kind.VALUE, name, data)]
        if not within:
            if count <= int(saved.get(key, b"0")):  # a later call was faster
                return
            saved[key] = b"%d" % count
            entries.append(Entry(Kind.SAVED, key, saved[key]))
        run.touch()
        run.recorder.report(*entries)

    async def _read(self, name: str) -> NamedValue | None:
        """Return the present value; one that cannot be read counts as missing, and is reported once."""
        run = self._run
        names = run.extras.get(_SetNames)
        if names is not None and name in names:
            await run.flush()
        read = partial(read_value, run.gateway, run.delivery.partition, run.id, name)
        found = await retry_while_unavailable(read, on_wait=log_wait(f"the values of task {run.id}", run.touch))
        if found is not None and found.problem is not None:
            level = "WARNING" if _reported.is_first(run.id, name, found.problem) else "DEBUG"
            bound = logger.bind(task=run.envelope.task, id=run.id)
            text = "value {!r} of task {} could not be read, and counts as missing: {}"
            bound.log(level, text, name, run.id, found.problem)
            return None
        return found

    async def _check_new(self, name: str) -> None:
        """Raise `StepDefinitionError` if a value of this name would be one too many."""
        run = self._run
        known = run.extras.of(_SetNames, _SetNames)
        if name not in known:
            read = partial(read_names, run.gateway, run.delivery.partition, run.id)
            on_wait = log_wait(f"the values of task {run.id}", run.touch)
            known.update(await retry_while_unavailable(read, on_wait=on_wait))
            if name not in known and len(known) >= MAX_VALUES:
                raise StepDefinitionError(
                    f"a task may have at most {MAX_VALUES} values: value {name!r} was not set; put several into one "
                    "value"
                )
            known.add(name)


def encoded_value(name: str, value: Any) -> bytes:
    """Return a value that the handler sets in its stored form. Raises `StepDefinitionError`."""
    try:
        return encode_value(name, value, HANDLER)
    except (TypeError, ValueError) as error:
        raise StepDefinitionError(str(error)) from None
