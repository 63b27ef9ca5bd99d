"""Task lookup: the stages that find the registered task of a delivery, and decrypt and decode what it needs.

The version checks: the stages that leave a task of a newer data format, or of newer code, to newer workers.

A mixed fleet has such tasks during a rolling deploy. They are parked until a worker that knows the format or has the
code serves the partition, and buried if none comes in time. A checkpoint that no version has written is buried at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, Final

from ....deadletter.policy import Reason, backoff
from ....queues.delivery.checkpoint import History
from ....queues.errors import (
    ConfigurationError,
    DecryptionError,
    KeyMissing,
    LargeValueLost,
    NewerVersionNeeded,
    Refused,
    UnreadableCheckpoint,
)
from ....queues.keys import DATA_FORMAT, Namespace
from ....queues.presence import list_workers
from ....queues.security.encryption import MARK, arguments_field
from ....queues.security.redaction import Redaction
from ....queues.security.secret_arguments import secret_values
from ....queues.transport.backoff import retry_while_unavailable
from ....queues.transport.large_values import REFERENCE, read_arguments
from ...durable.ended_task import ON_END
from ...durable.journal.handoff.document import HANDOFF, RECEIVED
from ...durable.journal.step_record import VERSION
from ...durable.run import Run
from ...durable.stop_reasons import StopReason
from ...errors import ArtifactError, InvalidArguments, UnknownTask, WrongApp
from ...log import log_wait, logger
from ...registry import Registry
from ...settings import Settings
from ...task import Task
from ..outcome import AwaitVersion, Burial, Outcome, Rerun
from .execution import GROUP, Execution, hand_back


class FindTask:
    """Stage: find the registered task. An unknown one, or one of another app, goes back for other workers."""

    def __init__(self, registry: Registry, settings: Settings) -> None:
        self._registry = registry
        self._settings = settings
        self._left: set[str] = set()

    def __call__(self, execution: Execution) -> Outcome | Coroutine[Any, Any, Outcome | None] | None:
        envelope = execution.run.envelope
        task = self._registry.of(envelope)
        if task is not None:
            execution.task = task
            if task.version > 1 or envelope.version is not None:
                execution.run.set_version(envelope.version or task.version, new=True)
            if task.on_end is not None:
                execution.run.mark(ON_END)
            if task.strict_order:
                execution.run.keep_order()
            if envelope.version is not None and not execution.run.delivery.has_history:
                return self._await_version(execution, envelope.version)
            return None
        policy = self._settings.unknown_task
        if envelope.app is not None and not self._registry.accepts(envelope.app):
            wrong = self._wrong_app(execution.run, envelope.app)
            return self._unless_served(execution, hand_back(execution, policy, wrong, Reason.WRONG_APP), wrong)
        error = UnknownTask(envelope.task, sorted(self._registry))
        return hand_back(execution, policy, error, Reason.UNKNOWN_TASK)

    def _await_version(self, execution: Execution, version: int) -> Outcome | None:
        """Leave a child to workers that have the code of the worker that spawned it, if that is newer."""
        run, task = execution.run, execution.task
        if version <= task.version:
            return None
        error = NewerVersionNeeded(run.id, version, task.version, task.name)
        return AwaitVersion(version, self._settings.version_wait, run.history.counters, error, task.name)

    def _wrong_app(self, run: Run, owner: str) -> WrongApp:
        """Return the error of a task of another app; the first one of each app is logged."""
        error = WrongApp(run.envelope.task, owner, self._registry.app, run.delivery.partition.queue)
        if owner not in self._left and len(self._left) < _LOGGED_APPS:
            self._left.add(owner)
            logger.bind(task=run.envelope.task, id=run.id).warning(
                "left a task to workers of app {!r}: {}", owner, error
            )
        return error

    async def _unless_served(self, execution: Execution, outcome: Outcome, error: WrongApp) -> Outcome:
        """Return the outcome; while a live worker of the task's app serves the queue, a return that is not counted.

        Its delay is the shortest: the next free worker may be of the other app again.
        """
        run, policy = execution.run, self._settings.unknown_task
        place = run.delivery.partition
        with suppress(Refused):  # an older rule may not let workers read the registry
            for worker in await list_workers(run.gateway, Namespace(place.namespace)):
                if worker.runs(error.owner) and place.queue in worker.queues and not worker.presumed_dead:
                    return Rerun(backoff(policy, 1), StopReason.RETURNED, run.history.counters, error)
        return outcome


_LOGGED_APPS: Final = 100
"""Other apps of which a worker logs the first task: anyone may write the name of an app into a message."""


class DecryptHistory:
    """Stage: decrypt the checkpoint.

    While encryption keys are being rotated, another worker may have the key that is missing here.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def __call__(self, execution: Execution) -> Outcome | None:
        run = execution.run
        try:
            run.history.decrypt(run.gateway.encryptor.of(run.delivery.partition, run.id))
        except DecryptionError as error:
            return _undecryptable(execution, self._settings, error)
        return None


class DecodeArguments:
    """Stage: decrypt and validate the arguments. Those that only other code accepts go back for its workers."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def __call__(self, execution: Execution) -> Outcome | Coroutine[Any, Any, Outcome | None] | None:
        run, task = execution.run, execution.task
        data = run.delivery.fields.get(b"args", b"{}")
        if data[:1] == REFERENCE:
            return self._decode_large(execution, data)
        try:
            encryptor = run.gateway.encryptor
            if data[:1] == MARK or encryptor.required:
                data = encryptor.of(run.delivery.partition, run.id).decrypt(
                    arguments_field(task.name, run.envelope.secrets), data
                )
            execution.arguments = decode_arguments(run, task, data)
        except DecryptionError as error:
            return _undecryptable(execution, self._settings, error)
        except InvalidArguments as invalid:
            return _unfit(execution, self._settings, invalid)
        return None

    async def _decode_large(self, execution: Execution, reference: bytes) -> Outcome | None:
        """Read the chunks of large arguments, and decode them in a thread: the event loop has other tasks."""
        run, task = execution.run, execution.task
        try:
            secrets = run.envelope.secrets
            data = await read_arguments(run.gateway, run.delivery.partition, run.id, task.name, secrets, reference)
            execution.arguments = await asyncio.to_thread(decode_arguments, run, task, data)
        except DecryptionError as error:
            return _undecryptable(execution, self._settings, error)
        except (ConfigurationError, ArtifactError) as error:  # another worker may reach the artifact store
            return hand_back(execution, self._settings.unknown_task, error, Reason.UNREADABLE)
        except LargeValueLost as lost:
            return Burial(Reason.UNREADABLE, run.history.counters, lost)
        except InvalidArguments as invalid:
            return _unfit(execution, self._settings, invalid)
        run.touch()
        return None


def _undecryptable(execution: Execution, settings: Settings, error: DecryptionError) -> Outcome:
    if isinstance(error, KeyMissing):
        return hand_back(execution, settings.unknown_task, error, Reason.UNDECRYPTABLE)
    return Burial(Reason.UNDECRYPTABLE, execution.run.history.counters, error)


def _unfit(execution: Execution, settings: Settings, error: InvalidArguments) -> Outcome:
    if error.malformed:
        return Burial(Reason.INVALID_ARGUMENTS, execution.run.history.counters, error)
    return hand_back(execution, settings.unknown_task, error, Reason.INVALID_ARGUMENTS)


def decode_arguments(run: Run, task: Task[Any, Any], data: bytes) -> dict[str, Any]:
    """Return the arguments by name; from now on the run keeps their secrets out of logs and events.

    Raises `InvalidArguments` if they do not fit the handler.
    """
    if run.envelope.group:  # the handler's arguments follow from the results of the group
        return {GROUP: data}
    paths, known = run.envelope.secrets, task.arguments
    marked = secret_values(data, paths) if paths else []
    if marked:
        run.keep_secret(Redaction(marked))
    arguments = known.decode(data)
    if known.has_secrets:  # the marks may be of a producer without the task's types, or were removed
        run.keep_secret(Redaction([*marked, *known.secret_values(arguments)]))
    return arguments


class CheckVersion:
    """Stage: continue only with a task that this version can read."""

    def __init__(self, settings: Settings) -> None:
        self._wait = settings.version_wait

    def __call__(self, execution: Execution) -> Outcome | None:
        run, history = execution.run, execution.run.history
        needed, since = max(run.envelope.requires, history.format), history.newer_since
        if needed > DATA_FORMAT:
            error = NewerVersionNeeded(run.id, needed, DATA_FORMAT)
            if since is not None and history.read_at - since >= self._wait * 1000:
                return Burial(Reason.NEWER_VERSION, history.counters, error)
            return AwaitVersion(needed, self._wait, history.counters, error)
        if history.problem is not None:
            return Burial(Reason.UNREADABLE, history.counters, history.problem)
        return None


class CheckTaskVersion:
    """Stage: set the version of the task's code that its first run began with, and continue if this worker has it."""

    def __init__(self, settings: Settings) -> None:
        self._wait = settings.version_wait

    async def __call__(self, execution: Execution) -> Outcome | None:
        run, task, history = execution.run, execution.task, execution.run.history
        since, known = history.newer_since, task.version
        try:
            version = _version_of(history, run.id)
        except UnreadableCheckpoint as problem:
            return Burial(Reason.UNREADABLE, history.counters, problem)
        if version is not None:
            run.set_version(version, new=False)
        else:
            version = run.envelope.version
        if version is not None and version > known:
            error = NewerVersionNeeded(run.id, version, known, task.name)
            if since is not None and history.read_at - since >= self._wait * 1000:
                return Burial(Reason.NEWER_VERSION, history.counters, error)
            return AwaitVersion(version, self._wait, history.counters, error, task.name)
        if since is not None:  # an older worker that gets the task later waits as long again
            record = run.delivery.partition.record(run.id)
            forget = partial(run.gateway.command, "HDEL", record, "newer_since")
            await retry_while_unavailable(forget, on_wait=log_wait(f"task {run.id}"))
        return None


def _version_of(history: History, task_id: str) -> int | None:
    """Return the version of the code that recorded the first entry of the checkpoint; None if nothing is recorded.

    Documents for the next run do not count: they may be stored before the handler has recorded anything.
    """
    stored = history.saved.get(VERSION)
    if stored is not None:
        if not stored.isdigit():
            raise UnreadableCheckpoint(task_id, f"the version of the task must be a number, got {stored!r}")
        return int(stored)
    recorded = history.done or history.intents or history.pages is not None
    return 1 if recorded or history.saved.keys() - {RECEIVED, HANDOFF} else None
