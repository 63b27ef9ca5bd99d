"""Jobs: acts over many tasks or dead letters, stored by name, so that any process can continue them.

A job has a filter, which is fixed when it is created: only tasks that were enqueued before then, or dead letters that
died before, so that a job ends. Its hash has how far it is, and what it has counted. One process at a time runs a job,
under a lease that it renews; the lease of a process that died passes, and another one continues at the position. Each
change compares the revision of the hash (write_compared.lua): a runner whose lease has passed to another one, or whose
job was aborted, writes nothing more.

Each act on a task is idempotent, and compares the task with the filter at that moment. So a page of tasks may be
handled twice, after a crash, and no task is hit that the filter did not mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, TypeVar

import orjson

from .compared_writes import Change, write_compared
from .errors import JobError, QueueError, WrongType
from .keys import LEFT_TTL_MS, Namespace, is_name
from .runtime import RUNTIME
from .transport.gateway import Gateway
from .transport.pipelining import Command
from .transport.scripts import milliseconds, pairs
from .wording import iso_time

Act = Literal["cancel", "purge", "dlq-replay", "dlq-purge"]
"""Act of a job: cancel tasks, cancel those that have not started, replay dead letters, delete them."""

ACTS: Final[tuple[Act, ...]] = ("cancel", "purge", "dlq-replay", "dlq-purge")

JOB_TTL_MS: Final = 30 * 86_400_000
"""Milliseconds for which a job is kept after its last change."""

_INDEX_TTL_MS: Final = JOB_TTL_MS + 86_400_000

LEASE_MS: Final = 15_000
"""Milliseconds after which another process continues a job that its runner has not renewed."""

MAX_ERRORS: Final = 20
"""Failures that a job remembers with their tasks."""

_REASON: Final = 300
"""Characters of the reason of a failure."""

_LISTED: Final = 10_000
"""Most jobs of a list."""

_TRIES: Final = 100
"""Changes of one job by others that one call may meet."""

_PLAN: Final = "job"
"""Kind of encrypted data: the filter and the options of a job."""

T = TypeVar("T")


class JobFailure(NamedTuple):
    """A task that a job could not handle."""

    task_id: str
    queue: str
    reason: str


@dataclass(frozen=True, slots=True)
class JobPlan:
    """Plan of a job: its filter and options.

    Attributes:
        queue: Only tasks of this queue; None for all queues.
        filter: JSON form of the filter of tasks or dead letters.
        options: Options of the act, such as those of a replay.
    """

    queue: str | None
    filter: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)

    def encode(self) -> bytes:
        return orjson.dumps({"queue": self.queue, "filter": dict(self.filter), "options": dict(self.options)})

    @classmethod
    def decode(cls, data: bytes) -> JobPlan:
        """Raises `ValueError`, `LookupError`, `TypeError`."""
        found = orjson.loads(data)
        return cls(found["queue"], dict(found["filter"]), dict(found["options"]))


@dataclass(frozen=True, slots=True)
class JobCounts:
    """Numbers that a job has counted.

    Attributes:
        read: Tasks that it has looked at.
        done: Tasks on which it has acted.
        skipped: Tasks that had changed before it could act, and for which the act was not meant any more.
        failed: Tasks that it could not handle; `errors` has the first ones.
    """

    read: int = 0
    done: int = 0
    skipped: int = 0
    failed: int = 0
    errors: tuple[JobFailure, ...] = ()

    def plus(
        self,
        *,
        read: int = 0,
        done: int = 0,
        skipped: int = 0,
        failed: int = 0,
        failures: Sequence[JobFailure] = (),
    ) -> JobCounts:
        """Return these counts and more."""
        errors = (*self.errors, *(one._replace(reason=one.reason[:_REASON]) for one in failures))[:MAX_ERRORS]
        return JobCounts(self.read + read, self.done + done, self.skipped + skipped, self.failed + failed, errors)

    def change(self) -> dict[str, str | int | bytes]:
        """Return the fields of the hash."""
        return {
            "read": self.read,
            "done": self.done,
            "skipped": self.skipped,
            "failed": self.failed,
            "errors": orjson.dumps([list(one) for one in self.errors]) if self.errors else "",
        }


@dataclass(frozen=True)
class StoredJob:
    """A job as it is stored: fields of the hash, as they were read at `now`, in milliseconds of Redis' clock."""

    name: str
    fields: Mapping[bytes, bytes]
    now: int
    open_plan: Callable[[str, bytes], bytes] = field(default=lambda _, data: data, repr=False)

    def text(self, name: str) -> str:
        return self.fields.get(name.encode(), b"").decode("utf-8", "replace")

    def number(self, name: str) -> int:
        try:
            return int(self.fields.get(name.encode(), b"0"))
        except ValueError:
            return 0

    @property
    def exists(self) -> bool:
        return b"act" in self.fields

    @property
    def revision(self) -> int:
        return self.number("revision")

    @property
    def state(self) -> str:
        """`running` until it is `done` or `aborted`."""
        return self.text("state")

    @property
    def running(self) -> bool:
        return self.exists and self.state == "running"

    @property
    def act(self) -> str:
        return self.text("act")

    @property
    def rate(self) -> float | None:
        """Largest number of acts per second."""
        with suppress(ValueError):
            return float(self.text("rate")) or None
        return None

    @property
    def runner(self) -> str | None:
        """The process that runs it now; None without one."""
        held = self.running and self.number("until") > self.now
        return self.text("runner") or None if held else None

    @property
    def position(self) -> str | None:
        """Position at which it continues; None at the start."""
        return self.text("position") or None

    @property
    def total(self) -> int | None:
        """Tasks to look at, as they were counted at the start; None if that is not known."""
        return self.number("total") if b"total" in self.fields else None

    @property
    def counts(self) -> JobCounts:
        found: list[JobFailure] = []
        with suppress(ValueError, TypeError):
            found = [JobFailure(*map(str, one)) for one in orjson.loads(self.fields.get(b"errors", b"[]"))]
        read, done, skipped, failed = (self.number(name) for name in ("read", "done", "skipped", "failed"))
        return JobCounts(read, done, skipped, failed, tuple(found))

    def plan(self) -> JobPlan:
        """Return what it is about. Raises `JobError`, `DecryptionError`."""
        try:
            return JobPlan.decode(self.open_plan(self.name, self.fields.get(b"plan", b"")))
        except QueueError:
            raise
        except (ValueError, TypeError, LookupError) as error:
            raise JobError(f"could not read job {self.name!r}: its filter: {error}") from None

    def shown_plan(self) -> JobPlan | str:
        """Return what it is about, or why that cannot be read."""
        try:
            return self.plan()
        except QueueError as error:
            return f"({error})"

    def summary(self) -> dict[str, Any]:
        """Return the job as plain data, times as ISO 8601."""
        plan, counts = self.shown_plan(), self.counts
        readable = isinstance(plan, JobPlan)
        return {
            "name": self.name,
            "act": self.act,
            "state": self.state,
            "queue": plan.queue if isinstance(plan, JobPlan) else None,
            "filter": dict(plan.filter) if isinstance(plan, JobPlan) else None,
            "options": self._shown_options(plan) if isinstance(plan, JobPlan) else None,
            "rate": self.rate,
            "by": self.text("by") or None,
            "why": self.text("why") or None,
            "created": iso_time(self.number("at")),
            "ended": iso_time(self.number("ended")) if self.number("ended") else None,
            "total": self.total,
            "read": counts.read,
            "done": counts.done,
            "skipped": counts.skipped,
            "failed": counts.failed,
            "errors": [one._asdict() for one in counts.errors],
            "runner": self.runner,
            "problem": (self.text("problem") or None) if readable else str(plan),
        }

    def _shown_options(self, plan: JobPlan) -> dict[str, Any]:
        """Return the options without the values of new arguments, which may be secrets."""
        edit = plan.options.get("edit")
        shown = {**plan.options}
        if isinstance(edit, Mapping):
            shown["edit"] = sorted(map(str, edit))
        return shown


class JobStore:
    """The jobs of a namespace."""

    def __init__(self, gateway: Gateway, namespace: Namespace) -> None:
        self._gateway = gateway
        self._namespace = namespace

    async def read(self, name: str) -> StoredJob:
        """Return a job; `exists` says whether there is one. Raises `ValueError` for an invalid name."""
        (found,) = await self._read([name])
        return found

    async def find(self, name: str) -> StoredJob:
        """Return a job. Raises `JobError` if there is no job of this name."""
        found = await self.read(name)
        if not found.exists:
            raise JobError(f"there is no job {name!r}; 'perdure job list' lists them")
        return found

    async def read_all(self) -> list[StoredJob]:
        """Return all jobs, the newest first."""
        index = self._namespace.jobs
        names = await self._members("ZRANGE", index, 0, _LISTED - 1)
        read = await self._read(sorted(filter(is_name, (name.decode("utf-8", "replace") for name in names))))
        return sorted((job for job in read if job.exists), key=lambda job: job.number("at"), reverse=True)

    async def _members(self, *command: str | int) -> Any:
        """Return the reply of a command on the index; of one that another program wrote, nothing."""
        try:
            return await self._gateway.command(*command)
        except WrongType:
            await self._gateway.set_keys_aside([self._namespace.jobs])
            return []

    async def open_names(self) -> tuple[list[str], int | None]:
        """Return the jobs that no process runs, and the milliseconds until the next look; None without open jobs."""
        now = milliseconds(await self._gateway.command("TIME", node_of=self._namespace.jobs))
        found = await self._members("ZRANGEBYSCORE", self._namespace.jobs, 0, "+inf", "WITHSCORES", "LIMIT", 0, 100)
        named = ((name.decode("utf-8", "replace"), at) for name, at in zip(found[::2], found[1::2], strict=True))
        looks = [(name, float(at)) for name, at in named if is_name(name)]  # others are of another program
        due = [name for name, at in looks if at <= now]
        later = [at - now for _, at in looks if at > now]
        return due, 0 if due else round(min(later)) if later else None

    async def _read(self, names: Sequence[str]) -> list[StoredJob]:
        index = self._namespace.jobs
        commands: list[Command] = [*(("HGETALL", self._namespace.job(name)) for name in names), ("TIME",)]
        replies: list[Any] = []
        for _ in range(2):
            replies = await self._gateway.pipeline_each(commands, node_of=index)
            wrong = {
                self._namespace.job(name)
                for name, reply in zip(names, replies, strict=False)
                if isinstance(reply, WrongType)
            }
            if not wrong or not await self._gateway.set_keys_aside(wrong):
                break
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        now = milliseconds(replies[-1])
        return [StoredJob(name, pairs(fields), now, self._open) for name, fields in zip(names, replies, strict=False)]

    def _open(self, name: str, data: bytes) -> bytes:
        return self._gateway.encryptor.of(self._namespace.job_place, name).decrypt(_PLAN, data)

    async def write(self, read: StoredJob, change: Change) -> bool:
        """Change a job if nothing has since it was read; return whether it was changed.

        Its score in the index follows from the change: the end of the lease of its runner, or of the job.
        """
        score: int | Literal["-"] | None = None
        ttl = JOB_TTL_MS
        if change.get("removed"):
            score, ttl = "-", LEFT_TTL_MS
        elif change.get("ended"):
            score = -int(change["ended"])
        elif "until" in change:
            score = int(change["until"] or 0)
        key, index = self._namespace.job(read.name), self._namespace.jobs
        return await write_compared(
            self._gateway,
            key,
            read.revision,
            change,
            index=index,
            name=read.name,
            score=score,
            ttl=ttl,
            index_ttl=_INDEX_TTL_MS,
        )

    async def create(
        self,
        name: str,
        act: Act,
        make_plan: Callable[[int], JobPlan],
        *,
        rate: float | None = None,
        by: str = "",
        why: str = "",
        runner: str | None = None,
    ) -> StoredJob:
        """Store a job.

        Args:
            make_plan: Returns the plan for the time of the creation, in milliseconds of Redis' clock.
            rate: Largest number of acts per second.
            runner: The process that runs it from now on; None lets workers do.

        Raises:
            JobError: There is a job of this name.
        """
        added = RUNTIME.token(8)
        cipher = self._gateway.encryptor.of(self._namespace.job_place, name)
        await self._forget_ended()

        def make(read: StoredJob) -> Change | None:
            if read.exists and read.text("added") == added:
                return None
            if read.exists:
                raise JobError(
                    f"there is a job {name!r} already, which is {read.state}; give another name, or see "
                    f"'perdure job show {name}'"
                )
            change: dict[str, str | int | bytes] = {"act": act, "state": "running", "at": read.now, "added": added}
            change |= {"by": by[:200], "why": why[:2_000], "rate": "" if rate is None else repr(rate), "removed": ""}
            change |= {"plan": cipher.encrypt(_PLAN, make_plan(read.now).encode())}
            return change | _lease(read, runner)

        return await self._change(name, make)

    async def _forget_ended(self) -> None:
        """Remove the names of jobs that have expired from the index."""
        now = milliseconds(await self._gateway.command("TIME", node_of=self._namespace.jobs))
        await self._members("ZREMRANGEBYSCORE", self._namespace.jobs, -(now - JOB_TTL_MS), "(0")

    async def take(self, name: str, runner: str) -> StoredJob | None:
        """Take a job that no process runs, under a lease; return it, None if it has ended or another one runs it."""
        for _ in range(_TRIES):
            read = await self.read(name)
            if not read.exists:
                await self._gateway.command("ZREM", self._namespace.jobs, name)
                return None
            if not read.running or read.runner not in (None, runner):
                return None
            if await self.write(read, _lease(read, runner)):
                return await self.read(name)
        return None

    async def note(
        self, name: str, runner: str, change: Change, *, again: int = LEASE_MS, ended: str | None = None
    ) -> StoredJob | None:
        """Store how far a job is, and renew the lease of its runner; return the job.

        Idempotent: the values are absolute. None: it has ended, or another process runs it, and nothing was changed.

        Args:
            again: Milliseconds after which another process may continue it.
            ended: State in which it ends now.
        """
        for _ in range(_TRIES):
            read = await self.read(name)
            if not read.running or read.text("runner") != runner:
                return None
            following: dict[str, str | int | bytes] = {"until": read.now + again}
            if ended is not None:
                following = {"state": ended, "ended": read.now, "until": "", "problem": ""}
            if await self.write(read, {**change, **following}):
                return await self.read(name)
        return None

    async def release(self, name: str, runner: str, *, problem: str = "", again: int = 0) -> None:
        """Let other processes continue a job after some milliseconds. problem: why this one cannot."""

        def make(read: StoredJob) -> Change | None:
            if not read.running or read.text("runner") != runner:
                return None
            change: dict[str, str | int | bytes] = {"until": read.now + again, "runner": ""}
            return change | ({"problem": problem[:1_000]} if problem else {})

        await self._change(name, make)

    async def abort(self, name: str, *, by: str = "") -> StoredJob:
        """End a job before all of it is done; what it has done stays. Raises `JobError` if it has ended."""

        def make(read: StoredJob) -> Change | None:
            self._check(read)
            if read.state == "aborted":
                return None
            if not read.running:
                raise JobError(f"could not abort job {name!r}: it has ended, and is {read.state}")
            return {"state": "aborted", "ended": read.now, "until": "", "aborted_by": by[:200]}

        return await self._change(name, make)

    async def remove(self, name: str) -> None:
        """Remove a job that has ended. Raises `JobError`."""

        def make(read: StoredJob) -> Change | None:
            if not read.exists and read.revision:
                return None
            self._check(read)
            if read.running:
                raise JobError(f"job {name!r} is running: end it with 'perdure job abort {name}', then remove it")
            gone = {one.decode("utf-8", "replace"): "" for one in read.fields if one not in (b"revision", b"token")}
            return {**gone, "removed": read.now}

        self._check(await self.read(name))
        await self._change(name, make)

    def _check(self, read: StoredJob) -> None:
        if not read.exists:
            raise JobError(f"there is no job {read.name!r}; 'perdure job list' lists them")

    async def _change(self, name: str, make: Callable[[StoredJob], Change | None]) -> StoredJob:
        """Read and change a job until nothing came between. make: returns None for no change."""
        for _ in range(_TRIES):
            read = await self.read(name)
            change = make(read)
            if change is None or await self.write(read, change):
                return await self.read(name)
        raise JobError(f"could not change job {name!r}: others change it all the time; try again")


def _lease(read: StoredJob, runner: str | None) -> dict[str, str | int | bytes]:
    """Return the fields of a lease that begins now; without a runner, of one that has passed."""
    return {"runner": runner or "", "until": read.now + (0 if runner is None else LEASE_MS)}
