"""Workers: what they run, their health, and supervisors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Final

from pydantic import Field

from ....queues import presence, supervisors
from ....queues.inspection.running import running_tasks
from ....queues.inspection.views import observed_workers, queue_partitions
from ....queues.presence import DrainAnswer, WorkerInfo, read_registered
from ....queues.records import Record
from ....queues.supervisors import SupervisorInfo
from ....queues.wording import iso_time
from ..operation import Call, Inputs, NoInputs, ResultModel, operation
from ..problems import Problem
from ..users import Role

_MAX_RUNNING: Final = 1000
"""Running tasks that a list of workers reads."""


class RunningTaskView(ResultModel):
    """A running task in short."""

    id: str
    task: str | None = Field(description="Name of the task; null if its record cannot be read.")
    queue: str
    worker: str | None = Field(description="Worker that runs it.")
    step: str | None = Field(description="Step that it was in at its last heartbeat.")
    attempts: int = Field(description="Attempts that have ended.")
    started_at: str | None = Field(description="Start of the run; null before its first heartbeat.")
    alive_at: str | None = Field(description="Last heartbeat of the run.")

    @classmethod
    def of(cls, record: Record) -> RunningTaskView:
        """Return the view of a record."""
        return cls(
            id=record.id,
            task=record.task,
            queue=record.queue,
            worker=record.worker,
            step=record.step,
            attempts=record.attempts,
            started_at=iso_time(record.started_at),
            alive_at=iso_time(record.alive_at),
        )


class WorkerView(ResultModel):
    """A worker as it has registered."""

    id: str
    app: str
    host: str
    pid: int
    version: str
    queues: list[str]
    status: str = Field(
        description="`ready`, `draining`, `blocked`, `presumed dead`, `not` with the levels that fail, or `?`."
    )
    presumed_dead: bool = Field(description="Whether it has missed two registrations.")
    blocked: bool = Field(description="Whether it renews leases but does not register: its event loop is blocked.")
    draining: bool = Field(description="Whether it takes no more tasks and stops when its tasks have ended.")
    drain: str | None = Field(description="Time at which an operator has asked it to; null if none has.")
    drain_by: str = Field(description="Who has asked it to; may be empty.")
    concurrency: int = Field(description="Number of slots.")
    in_flight: int = Field(description="Tasks that it runs.")
    free_slots: int = Field(description="Slots that it may fill now.")
    capacity: float | None = Field(description="Share of its slots that it may fill now, 0 to 1.")
    lag: float | None = Field(description="Lag of its event loop in seconds.")
    memory: int | None = Field(description="Bytes of memory that it uses.")
    memory_limit: int | None = Field(description="Bytes that it may use; null without a limit.")
    started: str | None
    seen: float = Field(description="Seconds since the last registration.")
    progress: float | None = Field(description="Seconds since it started, recorded or settled anything.")
    rates: dict[str, float] = Field(description="Deliveries that it settles per second, by queue.")
    lease: float | None = Field(description="Seconds after which it claims the tasks of a silent worker.")
    levels: dict[str, bool] = Field(description="Levels of its health report, and whether each is ok.")

    @classmethod
    def of(cls, info: WorkerInfo) -> WorkerView:
        """Return the view of a registration, of any version."""
        return cls(
            id=info.id,
            app=info.app,
            host=info.host,
            pid=info.pid,
            version=info.version,
            queues=list(info.queues),
            status=info.status,
            presumed_dead=info.presumed_dead,
            blocked=info.blocked,
            draining=bool(info.draining),
            drain=iso_time(info.drain),
            drain_by=info.drain_by,
            concurrency=info.concurrency,
            in_flight=info.in_flight,
            free_slots=info.free_slots,
            capacity=_number(info.capacity, "figure"),
            lag=_number(info.capacity, "lag"),
            memory=info.memory,
            memory_limit=info.memory_limit,
            started=iso_time(info.started),
            seen=info.seen,
            progress=info.progress,
            rates=dict(info.rates),
            lease=info.lease,
            levels=info.levels,
        )


def _number(reported: object, name: str) -> float | None:
    """Return a number that a worker reports; None for any other JSON, if another program wrote it."""
    found = reported.get(name) if isinstance(reported, Mapping) else None
    return float(found) if isinstance(found, (int, float)) and not isinstance(found, bool) else None


class ChildView(ResultModel):
    """A child process of a supervisor."""

    pid: int
    role: str = Field(description="`worker`, `isolated` or `spare`.")
    state: str
    worker: str = Field(description="Id of the worker; empty while it starts.")


class SupervisorView(ResultModel):
    """A supervisor as it has registered, or its pause if it is gone."""

    id: str
    name: str = Field(description="Name by which its crashes are counted and by which it is resumed.")
    app: str
    host: str
    pid: int
    version: str
    processes: int = Field(description="Target number of children.")
    children: list[ChildView]
    started: str | None
    seen: float | None = Field(description="Seconds since its last registration; null if only its pause is left.")
    crashes: int = Field(description="Crashes of its workers within the window.")
    window: float = Field(description="Seconds of the window of crashes.")
    paused_since: str | None = Field(description="Time since which it is paused, after too many crashes.")
    why: str | None = Field(description="The crash that caused the pause.")

    @classmethod
    def of(cls, info: SupervisorInfo) -> SupervisorView:
        """Return the view of a supervisor."""
        return cls.model_validate(info.summary())


class WorkerDetails(ResultModel):
    """A worker with the tasks that it runs."""

    worker: WorkerView
    running: list[RunningTaskView] = Field(description="Tasks that it runs, the ones that run longest first.")


class RegistryProblem(ResultModel):
    """An entry of a registry that another program wrote."""

    id: str
    problem: str


class WorkersView(ResultModel):
    """Workers and supervisors of a deployment."""

    workers: list[WorkerDetails]
    supervisors: list[SupervisorView]
    problems: list[RegistryProblem] = Field(description="Entries of the registries that cannot be read.")


class OneWorker(Inputs):
    """A worker by its id."""

    worker_id: str = Field(min_length=1, max_length=256, description="Id of the worker.")


@operation("GET", "/workers", roles=[Role.VIEWER])
async def list_workers(call: Call, given: NoInputs) -> WorkersView:
    """List workers with what each runs, and supervisors.

    A worker that stopped reporting is listed as `presumed dead` while it holds tasks. A supervisor that paused after
    too many crashes is listed until it is resumed.
    """
    gateway, namespace = call.producer.gateway, call.producer.namespace
    workers = await observed_workers(gateway, namespace)
    problems = dict((await read_registered(gateway, namespace)).problems)
    registered = await supervisors.list_supervisors(gateway, namespace, problems)
    running = await _running(call)
    return WorkersView(
        workers=[WorkerDetails(worker=WorkerView.of(info), running=running.get(info.id, [])) for info in workers],
        supervisors=[SupervisorView.of(info) for info in registered],
        problems=[RegistryProblem(id=name, problem=problem) for name, problem in problems.items()],
    )


@operation("GET", "/workers/{worker_id}", roles=[Role.VIEWER])
async def show_worker(call: Call, given: OneWorker) -> WorkerDetails:
    """Show a worker with what it runs."""
    info = await find_worker(call, given.worker_id)
    return WorkerDetails(worker=WorkerView.of(info), running=(await _running(call)).get(info.id, []))


async def find_worker(call: Call, worker_id: str) -> WorkerInfo:
    """Return a registered worker.

    Raises:
        Problem: No worker of this id is registered.
    """
    registered = await observed_workers(call.producer.gateway, call.producer.namespace)
    found = next((info for info in registered if info.id == worker_id), None)
    if found is None:
        raise Problem(404, "worker-not-found", f"no worker {worker_id!r} is registered: it has stopped, or never ran")
    return found


async def _running(call: Call) -> dict[str, list[RunningTaskView]]:
    """Return the running tasks by worker."""
    gateway, namespace = call.producer.gateway, call.producer.namespace
    found: dict[str, list[RunningTaskView]] = defaultdict(list)
    for record in await running_tasks(gateway, await queue_partitions(gateway, namespace), _MAX_RUNNING):
        found[record.worker or ""].append(RunningTaskView.of(record))
    return found


@operation("POST", "/workers/{worker_id}/drain", roles=[Role.OPERATOR], changes=True)
async def drain_worker(call: Call, given: OneWorker) -> WorkerDetails:
    """Let a worker take no more tasks, finish what it runs, and stop.

    It follows within a moment, and runs its tasks to the end, however long that takes. Its process exits with code 0. A
    supervisor starts no other worker in its place, and exits when all of its workers were drained.
    """
    await find_worker(call, given.worker_id)
    gateway, namespace = call.producer.gateway, call.producer.namespace
    answer = await presence.drain_worker(gateway, namespace, given.worker_id, by=call.user.name)
    if answer is DrainAnswer.UNSUPPORTED:
        detail = f"worker {given.worker_id!r} is of an earlier version, which cannot be drained: send it SIGTERM"
        raise Problem(409, "earlier-version", detail)
    return await show_worker(call, given)


class OneSupervisor(Inputs):
    """A supervisor by its name."""

    supervisor: str = Field(min_length=1, max_length=256, description="Name of the supervisor.")


class ResumedSupervisor(ResultModel):
    """A supervisor that was resumed."""

    name: str


@operation("POST", "/supervisors/{supervisor}/resume", roles=[Role.OPERATOR], changes=True)
async def resume_supervisor(call: Call, given: OneSupervisor) -> ResumedSupervisor:
    """Resume a supervisor that paused because its workers crashed too often.

    Fix the cause first. This resets the crash count; it takes effect within two seconds.
    """
    gateway, namespace = call.producer.gateway, call.producer.namespace
    paused = await supervisors.paused_supervisors(gateway, namespace)
    if given.supervisor not in paused or not await supervisors.resume_supervisor(gateway, namespace, given.supervisor):
        listed = ", ".join(paused) or "none"
        raise Problem(
            409, "supervisor-not-paused", f"supervisor {given.supervisor!r} is not paused; paused supervisors: {listed}"
        )
    return ResumedSupervisor(name=given.supervisor)
