"""The runner of jobs: acts on all tasks or dead letters that the filter of a job means.

A command runs the job that it has created, and any worker continues one whose runner has gone (see queues/jobs.py). The
runner handles a page, stores the position after it and what it has counted, and renews its lease with that. If it dies
within a page, the next runner handles that page again: each act is idempotent, and what was done already does not match
any more, so that only the counts of one page may be missing. A task that cannot be handled is counted, and ends no job.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final, Generic, Literal, NamedTuple, TypeVar

import anyio
from pydantic_core import to_json

from ..deadletter.letters import DAMAGED, DeadLetter, Filter, count_letters, scan_letters
from ..deadletter.replay import Replay, edited_arguments, purge, replay
from ..queues.catalog import Catalog
from ..queues.errors import CatalogError, JobError, PerdureError, QueueError, Refused, Unavailable
from ..queues.handle import TaskScope, cancel_within
from ..queues.inspection.timeline import page_tasks
from ..queues.inspection.views import queue_partitions
from ..queues.jobs import LEASE_MS, JobCounts, JobFailure, JobPlan, JobStore, StoredJob
from ..queues.presence import list_workers
from ..queues.producer import Producer
from ..queues.records import Record, State
from ..queues.runtime import RUNTIME
from ..queues.task_filter import TaskFilter
from ..queues.transport.clients import is_denied
from .defined_secrets import mask_defined

T = TypeVar("T", Record, DeadLetter)

PAGE: Final = 200
"""Tasks of one page: what may be handled twice after a crash."""

_MAX_READ: Final = 5_000
"""Dead letters that one page reads at most."""

_TICK: Final = 0.1
"""Seconds of one batch of acts, if they are limited per second."""

_PAGE_SECONDS: Final = 2.0
"""Seconds of one page, if the acts are limited per second."""

_RELEASE: Final = 2.0
"""Seconds that giving up the lease may take."""

PROBLEM_MS: Final = 30_000
"""Milliseconds after which another process tries a job that one could not run."""

LIVE: Final = frozenset(state for state in State if not state.terminal)
"""States of tasks that can be cancelled."""

UNSTARTED: Final = frozenset((State.QUEUED, State.SCHEDULED, State.LIMITED))
"""States of tasks that a purge of a queue cancels, if no worker has started them."""


class JobResult(NamedTuple):
    """Result of a job for one task.

    kind: as it is counted. what: the state of the task, or the reason.
    """

    task_id: str
    queue: str
    task: str | None
    kind: Literal["done", "skipped", "failed"]
    what: str


@dataclass(frozen=True, slots=True)
class _Page(Generic[T]):
    """Tasks to act on. position: that after the page, None at the end. unreadable: tasks that cannot be compared."""

    items: Sequence[T]
    position: str | None
    read: int
    unreadable: Sequence[tuple[T, str]] = ()


class JobAct(ABC, Generic[T]):
    """Act of a job, and the tasks on which it acts."""

    async def prepare(self) -> None:
        """Read what the act needs; called once before the first page."""

    async def problem(self, item: T) -> str:
        """Return why the act would fail for a task, as far as it can be known; empty if it would not."""
        return ""

    @abstractmethod
    async def total(self) -> int:
        """Return the number of tasks that are looked at, about."""

    @abstractmethod
    def pages(self, position: str | None, limit: int) -> AsyncIterator[_Page[T]]:
        """Yield pages of at most so many tasks."""

    @abstractmethod
    async def act(self, item: T) -> JobResult:
        """Act on one task. Raises `QueueError`."""

    async def preview(self) -> AsyncIterator[T]:
        """Yield all tasks that it means now."""
        async for page in self.pages(None, PAGE):
            for item in page.items:
                yield item


@dataclass(slots=True)
class JobPreview:
    """Preview of a job: the tasks that it would act on. Nothing is changed.

    Attributes:
        count: Tasks that it would act on.
        kinds: Their number by state, or of dead letters by reason.
        tasks: Their number by name of the task.
        first: Ids of the first ones.
        problems: Number of those for which it would fail.
        failures: The first of them.
        read: Tasks that were looked at.
        total: Tasks to look at.
        complete: Whether all were looked at; if not, the numbers are of the first ones.
    """

    count: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    tasks: Counter[str] = field(default_factory=Counter)
    first: list[str] = field(default_factory=list)
    problems: int = 0
    failures: list[JobFailure] = field(default_factory=list)
    read: int = 0
    total: int = 0
    complete: bool = True


_PREVIEWED: Final = 10
"""Ids and failures of a preview."""


async def preview_job(act: JobAct[Any], max_read: int) -> JobPreview:
    """Return what an act would do, of the tasks that it would look at first.

    Args:
        max_read: Tasks that are looked at, about.
    """
    await act.prepare()
    found = JobPreview(total=await act.total())
    async for page in act.pages(None, PAGE):
        found.read += page.read
        problems = [(item, f"its arguments cannot be compared: {problem}") for item, problem in page.unreadable]
        for item in page.items:
            found.count += 1
            found.kinds[str(item.state if isinstance(item, Record) else item.reason)] += 1
            found.tasks[item.task or "?"] += 1
            if len(found.first) < _PREVIEWED:
                found.first.append(item.id)
            if problem := await act.problem(item):
                problems.append((item, problem))
        found.problems += len(problems)
        for item, problem in problems[: _PREVIEWED - len(found.failures)]:
            found.failures.append(JobFailure(item.id, _queue_of(item), problem))
        if found.read >= max_read and page.position is not None:
            found.complete = False
            break
    return found


class CancelAct(JobAct[Record]):
    """Cancels tasks. unstarted: only those that no worker has started. Without states, all that this can mean."""

    def __init__(self, producer: Producer, queue: str | None, wanted: TaskFilter, *, unstarted: bool) -> None:
        self._producer = producer
        self._queue = queue
        states = wanted.states or (UNSTARTED if unstarted else LIVE)
        self._wanted = replace(wanted, states=states)
        self._scope = TaskScope(frozenset(states), wanted.until, unstarted)

    async def total(self) -> int:
        gateway = self._producer.gateway
        partitions = await queue_partitions(gateway, self._producer.namespace, self._queue)
        since, until = self._wanted.since, self._wanted.until
        bounds = ("-inf" if since is None else since, "+inf" if until is None else until)
        counts = await gateway.pipeline_each([("ZCOUNT", partition.timeline, *bounds) for partition in partitions])
        return sum(count for count in counts if isinstance(count, int))

    async def pages(self, position: str | None, limit: int) -> AsyncIterator[_Page[Record]]:
        gateway, namespace = self._producer.gateway, self._producer.namespace
        while True:
            page = await page_tasks(gateway, namespace, self._wanted, queue=self._queue, limit=limit, cursor=position)
            yield _Page(page.tasks, page.cursor, page.read, page.unreadable)
            if page.cursor is None:
                return
            position = page.cursor

    async def act(self, item: Record) -> JobResult:
        partition = self._producer.namespace.partition(item.queue, item.partition)
        answer = await cancel_within(
            self._producer.gateway, partition, item.id, self._scope, retention=self._producer.result_ttl
        )
        done = answer in (b"cancelled", b"requested", b"deferred")
        what = {"missing": "its record has expired", "other": "it has changed"}.get(answer.decode(), answer.decode())
        return JobResult(item.id, item.queue, item.task, "done" if done else "skipped", what)


class LetterAct(JobAct[DeadLetter]):
    """Replays or purges dead letters.

    Args:
        how: Options of a replay; None purges.
        checked: Whether edited arguments must fit what workers have published about the task.
    """

    def __init__(
        self, producer: Producer, queue: str | None, wanted: Filter, how: Replay | None, *, checked: bool = False
    ) -> None:
        self._producer = producer
        self._queue = queue
        self._wanted = wanted
        self._how = how
        self._checked = checked

    async def total(self) -> int:
        gateway = self._producer.gateway
        return await count_letters(gateway, await queue_partitions(gateway, self._producer.namespace, self._queue))

    async def pages(self, position: str | None, limit: int) -> AsyncIterator[_Page[DeadLetter]]:
        gateway = self._producer.gateway
        partitions = await queue_partitions(gateway, self._producer.namespace, self._queue)
        masked = await mask_defined(self._producer)
        scan = scan_letters(gateway, partitions, self._wanted, oldest_first=True, shown=masked, after=position)
        found: list[DeadLetter] = []
        unreadable: list[tuple[DeadLetter, str]] = []
        read = 0
        async for letter, place, matches, problem in scan:
            read += 1
            position = place or position
            if matches:
                found.append(letter)
            elif problem:
                unreadable.append((letter, problem))
            if len(found) == limit or read == _MAX_READ:
                yield _Page(found, position, read, unreadable)
                found, unreadable, read = [], [], 0
        yield _Page(found, None, read, unreadable)

    async def prepare(self) -> None:
        if self._how is not None and self._checked:
            self._how = replace(self._how, check=check_by(await self._producer.catalog()))

    async def problem(self, item: DeadLetter) -> str:
        how = self._how
        if how is None:
            return ""
        if item.reason == DAMAGED:
            return item.message
        if how.args is None:
            return ""
        try:
            await edited_arguments(self._producer.gateway, item, how.args, how)
        except Unavailable:
            raise
        except PerdureError as error:
            return str(error)
        return ""

    async def act(self, item: DeadLetter) -> JobResult:
        gateway, how = self._producer.gateway, self._how
        if how is None:
            done, what = await purge(gateway, item), "purged"
        elif item.reason == DAMAGED:
            reason = f"{item.message}; 'perdure dlq purge {item.id}' deletes it"
            return JobResult(item.id, item.partition.queue, item.task, "failed", reason)
        else:
            done, what = await replay(gateway, item, how), "replayed"
        gone = "another command had replayed or purged it"
        return JobResult(
            item.id, item.partition.queue, item.task, "done" if done else "skipped", what if done else gone
        )


def job_act(producer: Producer, act: str, plan: JobPlan) -> JobAct[Any]:
    """Return what a job does. Raises `JobError` if a later version has stored it, or it was damaged."""
    try:
        if act in ("cancel", "purge"):
            return CancelAct(producer, plan.queue, TaskFilter.parse(plan.filter), unstarted=act == "purge")
        if act not in ("dlq-replay", "dlq-purge"):
            raise ValueError(f"unknown act {act!r}")
        how = _replay(producer, plan) if act == "dlq-replay" else None
        return LetterAct(
            producer, plan.queue, Filter.parse(plan.filter), how, checked=bool(plan.options.get("checked"))
        )
    except (ValueError, TypeError, LookupError) as error:
        raise JobError(f"could not read what the job is to do: {error}; a newer version may have stored it") from None


def _replay(producer: Producer, plan: JobPlan) -> Replay:
    options = plan.options
    edit = options.get("edit")
    return Replay(
        fresh=bool(options.get("fresh")),
        rerun_failed=bool(options.get("rerun_failed")),
        args=None if edit is None else to_json(edit),
        merge=True,
        merged_limit=producer.payload_limit,
    )


def check_by(catalog: Catalog) -> Callable[[DeadLetter, bytes], None]:
    """Return a check of edited arguments by what workers have published; a task of which none has is not checked.

    It raises `CatalogError` for arguments that no app with the task takes. The text holds no values.
    """

    def check(letter: DeadLetter, arguments: bytes) -> None:
        error: CatalogError | None = None
        for task in catalog.named(letter.task, letter.app):
            try:
                task.check(arguments)
            except CatalogError as found:
                error = error or found
            else:
                return
        if error is not None:
            raise error

    return check


async def has_live_worker(producer: Producer) -> bool:
    """Return whether a worker lives that would run a job; True if this user may not read the registry."""
    try:
        workers = await list_workers(producer.gateway, producer.namespace)
    except Refused:
        return True
    return any(not worker.presumed_dead for worker in workers)


def who_continues(name: str, *, alive: bool) -> str:
    """Return who continues a job that no process runs now, as a clause. alive: see `has_live_worker`."""
    if alive:
        return "a worker runs it within seconds"
    return f"no worker runs now; one continues it when it starts, or 'perdure job run {name}' does"


class JobRunner:
    """Runs one job once.

    Attributes:
        id: Names the runner in the job.
        job: The job as the runner has stored it last.
        on_page: Called with the job after each page.
    """

    def __init__(
        self,
        producer: Producer,
        owner: str,
        *,
        before: Callable[[Any], Awaitable[None]] | None = None,
    ) -> None:
        """Args:
        owner: The worker or command that the runner belongs to.
        before: Called with each task before the act.
        """
        self.id = f"{owner}-{RUNTIME.token(3)}"
        self.job: StoredJob | None = None
        self._producer = producer
        self._store = JobStore(producer.gateway, producer.namespace)
        self._before = before
        self.on_page: Callable[[StoredJob], None] | None = None
        self._uncounted = JobCounts()
        self._renewed = 0.0

    async def run(self, name: str) -> AsyncGenerator[JobResult, None]:
        """Run a job until it ends, or another process has it; yield what becomes of each task.

        If this is cut off, the lease is given up, so that a worker continues at once.

        Raises:
            Unavailable: Redis does not answer.
            QueueError: This process cannot run the job, such as a user without the rights; others may.
        """
        self.job = await self._store.take(name, self.id)
        if self.job is None:
            return
        try:
            act = job_act(self._producer, self.job.act, self.job.plan())
            await act.prepare()
            async for outcome in self._work(self.job, act):
                yield outcome
        except Unavailable:
            raise
        except PerdureError as error:
            await self._release(str(error), PROBLEM_MS)
            raise
        except BaseException as error:
            with anyio.CancelScope(shield=True), anyio.move_on_after(_RELEASE), suppress(QueueError):
                ends = not isinstance(error, Exception)
                await self._release("" if ends else f"{type(error).__name__}: {error}", 0 if ends else PROBLEM_MS)
            raise

    async def _release(self, problem: str, again: int) -> None:
        """Store what was done within the page that is not complete, and give up the lease.

        The rest of that page is counted when it is handled again: only what was done does not match any more.
        """
        job = self.job
        if job is not None:
            await self._store.note(job.name, self.id, job.counts.plus(done=self._uncounted.done).change())
            await self._store.release(job.name, self.id, problem=problem, again=again)

    async def _work(self, job: StoredJob, act: JobAct[Any]) -> AsyncIterator[JobResult]:
        if job.total is None and not await self._note(job, {"total": await act.total(), "problem": ""}):
            return
        pace = _Pace(job.rate)
        self._renewed = RUNTIME.monotonic()
        async for page in act.pages(job.position, pace.page):
            self._count(read=page.read)
            for item, problem in page.unreadable:
                yield self._counted(_failed(item, f"its arguments cannot be compared: {problem}"))
            for start in range(0, len(page.items), pace.batch):
                batch = page.items[start : start + pace.batch]
                if not await self._wait(job, pace.seconds_until(len(batch))):
                    return
                for outcome in [self._counted(outcome) for outcome in await self._act(act, batch)]:
                    yield outcome
            last = page.position is None
            if not await self._note(job, {"position": page.position or ""}, ended="done" if last else None):
                return

    async def _act(self, act: JobAct[Any], batch: Sequence[Any]) -> list[JobResult]:
        if self._before is not None:
            for item in batch:
                await self._before(item)
        replies = await asyncio.gather(*(act.act(item) for item in batch), return_exceptions=True)
        return [_outcome_of(item, reply) for item, reply in zip(batch, replies, strict=True)]

    async def _wait(self, job: StoredJob, seconds: float) -> bool:
        """Wait, and renew the lease meanwhile. Return False if the job has ended, or another process has it."""
        until = RUNTIME.monotonic() + seconds
        while True:
            if RUNTIME.monotonic() - self._renewed > LEASE_MS / 3000 and not await self._note(job, {}):
                return False
            left = until - RUNTIME.monotonic()
            if left <= 0:
                return True
            await anyio.sleep(min(left, LEASE_MS / 5000))

    async def _note(self, job: StoredJob, change: dict[str, str | int | bytes], *, ended: str | None = None) -> bool:
        """Store the counts and a change. Return False if the job has ended, or another process has it."""
        known = self.job or job
        noted = await self._store.note(job.name, self.id, {**self._counts(known).change(), **change}, ended=ended)
        if noted is None:
            self.job = await self._store.read(job.name)
            return False
        self.job, self._uncounted, self._renewed = noted, JobCounts(), RUNTIME.monotonic()
        if self.on_page is not None:
            self.on_page(noted)
        return ended is None

    def _counts(self, job: StoredJob) -> JobCounts:
        more, stored = self._uncounted, job.counts
        return stored.plus(
            read=more.read, done=more.done, skipped=more.skipped, failures=more.errors, failed=more.failed
        )

    def _count(self, *, read: int = 0) -> None:
        self._uncounted = self._uncounted.plus(read=read)

    def _counted(self, outcome: JobResult) -> JobResult:
        failed = [JobFailure(outcome.task_id, outcome.queue, outcome.what)] if outcome.kind == "failed" else []
        done, skipped = outcome.kind == "done", outcome.kind == "skipped"
        self._uncounted = self._uncounted.plus(done=done, skipped=skipped, failures=failed, failed=len(failed))
        return outcome


def _outcome_of(item: Any, reply: JobResult | BaseException) -> JobResult:
    """Return what an act has returned, or its failure. Raises errors that concern all tasks."""
    if isinstance(reply, JobResult):
        return reply
    denied = isinstance(reply, Refused) and is_denied(reply)
    if denied or isinstance(reply, Unavailable) or not isinstance(reply, Exception):
        raise reply
    return _failed(item, str(reply) if isinstance(reply, PerdureError) else f"{type(reply).__name__}: {reply}")


def _failed(item: Record | DeadLetter, reason: str) -> JobResult:
    return JobResult(item.id, _queue_of(item), item.task, "failed", reason)


def _queue_of(item: Record | DeadLetter) -> str:
    return item.queue if isinstance(item, Record) else item.partition.queue


class _Pace:
    """Pace of a job.

    page, batch: tasks of a page, and of what is done at once.
    """

    def __init__(self, rate: float | None) -> None:
        self._rate = rate
        self._started = RUNTIME.monotonic()
        self._begun = 0
        self.page = PAGE if rate is None else max(1, min(PAGE, round(rate * _PAGE_SECONDS)))
        self.batch = PAGE if rate is None else max(1, min(self.page, round(rate * _TICK)))

    def seconds_until(self, count: int) -> float:
        """Return the seconds until so many further tasks may be acted on."""
        if self._rate is None:
            return 0.0
        at = self._started + self._begun / self._rate
        self._begun += count
        return max(0.0, at - RUNTIME.monotonic())
