"""The deployment at one moment, as `perdure top` shows it."""

from __future__ import annotations

from pydantic import Field

from ....queues.errors import Refused
from ....queues.pauses import load_pauses
from ....queues.supervisors import list_supervisors
from ....queues.wording import iso_time
from ...overview import read_overview
from ..operation import Call, NoInputs, ResultModel, operation
from ..users import Role
from .queues import PauseView, QueueView
from .workers import RunningTaskView, SupervisorView, WorkerView


class TotalsView(ResultModel):
    """Sums over all queues."""

    depth: int = Field(description="Tasks that wait for a worker.")
    in_flight: int = Field(description="Tasks that workers hold.")
    due: int = Field(description="Tasks that are scheduled for later.")
    limited: int = Field(description="Tasks that wait for limits.")
    held: int = Field(description="Tasks that pauses hold.")
    dead: int = Field(description="Dead letters.")
    rate: float = Field(description="Deliveries that are settled per second, over the last 30 seconds.")
    oldest_age: float | None = Field(description="Seconds that the oldest waiting task has waited; null without one.")
    drain_time: float | None = Field(
        description="Seconds until no task waits or runs, at the current rate; null if tasks wait and none is settled."
    )
    workers: int = Field(description="Workers that are not presumed dead.")
    slots: int = Field(description="Slots of these workers.")
    free_slots: int = Field(description="Slots that they may fill now.")


class OverviewView(ResultModel):
    """A deployment at one moment."""

    at: str | None = Field(description="Time by the clock of Redis.")
    namespace: str
    server: str = Field(description="Address of the server, without a password.")
    totals: TotalsView
    queues: list[QueueView]
    workers: list[WorkerView]
    running: list[RunningTaskView] = Field(description="The tasks that have been running longest, at most 100.")
    pauses: list[PauseView] = Field(description="Pauses by operators.")
    paused_supervisors: list[SupervisorView] = Field(description="Supervisors that paused after too many crashes.")


@operation("GET", "/overview", roles=[Role.VIEWER])
async def show_overview(call: Call, given: NoInputs) -> OverviewView:
    """Show queues, workers and running tasks, and what is paused.

    The cost depends on the number of queues, workers and running tasks, not on the number of waiting tasks.
    """
    gateway, namespace = call.producer.gateway, call.producer.namespace
    found = await read_overview(call.producer)
    queues = [QueueView.of(stats) for stats in found.queues]
    workers = [WorkerView.of(info) for info in found.workers]
    try:
        pauses = [PauseView.of(rule) for rule in (await load_pauses(gateway, namespace)).rules]
    except Refused:  # another program wrote their key
        pauses = []
    supervisors = await list_supervisors(gateway, namespace)
    return OverviewView(
        at=iso_time(found.now),
        namespace=namespace.name,
        server=call.producer.address.shown,
        totals=_totals(queues, workers),
        queues=queues,
        workers=workers,
        running=[RunningTaskView.of(record) for record in found.running],
        pauses=pauses,
        paused_supervisors=[SupervisorView.of(info) for info in supervisors if info.paused_since],
    )


def _totals(queues: list[QueueView], workers: list[WorkerView]) -> TotalsView:
    live = [worker for worker in workers if not worker.presumed_dead]
    depth, in_flight, limited = (sum(getattr(queue, name) for queue in queues) for name in _REMAINING)
    rate = sum(queue.rate for queue in queues)
    remaining = depth + in_flight + limited
    return TotalsView(
        depth=depth,
        in_flight=in_flight,
        due=sum(queue.due for queue in queues),
        limited=limited,
        held=sum(queue.held for queue in queues),
        dead=sum(queue.dead for queue in queues),
        rate=rate,
        oldest_age=max((queue.oldest_age for queue in queues if queue.oldest_age is not None), default=None),
        drain_time=0.0 if not remaining else remaining / rate if rate else None,
        workers=len(live),
        slots=sum(worker.concurrency for worker in live),
        free_slots=sum(worker.free_slots for worker in live),
    )


_REMAINING = ("depth", "in_flight", "limited")
