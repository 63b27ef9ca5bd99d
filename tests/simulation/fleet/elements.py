"""Elements that some runs have in addition: how they are described in a plan, and how they are drawn.

Each is drawn from a random stream of its own, after all else, so that the other draws of a seed do not depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, Final

from .families import PARENTS
from .limits import LIMITED
from .streams import STREAMING
from .values import STEERED
from .waits import WAITING

if TYPE_CHECKING:
    from ..plan import Fault, Plan, TaskPlan

__all__ = ["ELEMENTS", "OPERATIONS", "RESTART_DELAYS", "SessionPlan", "SupervisorPlan", "WorkerPlan", "with_elements"]

OPERATIONS: Final = {
    "set lease": (0.4, 6.0),
    "reshard": (0.0, 0.0),
    "deploy": (0.5, 6.0),
    "kill caller": (0.1, 3.0),
    "kill page": (0.1, 3.0),
    "kill supervisor": (0.1, 3.0),
    "kill host": (0.1, 3.0),
    "freeze supervisor": (0.3, 8.0),
    "stop supervisor": (0.0, 0.0),
    "reload": (0.0, 0.0),
}
"""Kinds of faults that elements have, and the least and the most of their sizes."""

_SHARES: Final = {
    "settings": 0.12,
    "lease": 0.12,
    "resharding": 0.06,
    "deploy": 0.06,
    "sessions": 0.1,
    "supervised hosts": 0.1,
    "waits": 0.15,
    "children": 0.2,
    "streams": 0.15,
    "values": 0.1,
    "lanes": 0.1,
    "limits": 0.2,
}
"""Shares of the runs that have an element. One that costs more than an ordinary run occurs less often."""

_MAX_TASKS: Final = 6
"""Tasks of a run with such an element at most."""

_SPAN: Final = 4.8
"""Seconds within which operators act."""

RESTART_DELAYS: Final = (0.0, 0.5, 2.0)
"""Seconds until a supervisor replaces a child: after the first crash without progress, the second, and so on."""

_Draw = Callable[[Random, str, float], "Fault"]


@dataclass(frozen=True)
class WorkerPlan:
    """Settings of a worker.

    Attributes:
        lease: Seconds; the stored lease is used in place of it.
        slots: Tasks that it runs at once.
        sweep: Longest time between two sweeps, in seconds.
        heartbeat: Seconds between two registrations.
        supervised: Whether a supervisor starts it.
        stall_limit: Seconds for which a supervised worker may not respond.
        crash_threshold: Crashes without progress after more of which its supervisor pauses.
        max_crashes: Deliveries in a row that may end without an outcome and without progress.
    """

    lease: float
    slots: int
    sweep: float = 3.0
    heartbeat: float = 5.0
    supervised: bool = False
    stall_limit: float = 60.0
    crash_threshold: int = 5
    max_crashes: int = 20

    def __str__(self) -> str:
        return f"lease {self.lease:g} s, {self.slots} slots, sweep {self.sweep:g} s, heartbeat {self.heartbeat:g} s"


@dataclass(frozen=True)
class SupervisorPlan:
    """Supervisors, one per host. In a plan with them, each worker process is a child of one.

    Attributes:
        processes: Ordinary children of each.
        isolated: Quarantine children of each at most.
        stall_limit: Seconds after which a child that does not respond is killed.
        idle_limit: Seconds after which a quarantine child without a task is stopped.
        crash_threshold: Crashes without progress after more of which it pauses.
    """

    processes: int
    isolated: int
    stall_limit: float = 2.0
    idle_limit: float = 60.0
    crash_threshold: int = 5


@dataclass(frozen=True)
class SessionPlan:
    """A session. steps and pause are those of each turn.

    Attributes:
        at: Seconds after the start at which its caller starts.
        gap: Seconds between two messages.
    """

    id: str
    at: float
    messages: int
    gap: float
    steps: int
    pause: float

    def text(self, number: int) -> str:
        """Return a message, by its number from 0."""
        return f"{self.id} message {number}"


def with_elements(plan: Plan, fault: _Draw, forced: str = "") -> Plan:
    """Return the plan with the elements that its seed has.

    Args:
        fault: Draws a fault, by its kind and its time.
        forced: Element that the plan has in any case.
    """
    for name, add in ELEMENTS.items():
        random = Random(f"{name} {plan.seed}")
        if random.random() < _SHARES[name] or name == forced:
            plan = add(plan, random, fault)
    return plan


def _with_settings(plan: Plan, random: Random, fault: _Draw) -> Plan:
    """Start workers with different settings; the lease is stored for all."""
    settings = tuple(
        WorkerPlan(
            lease=random.choice((0.6, 1.0, 3.0, 6.0)),
            slots=random.choice((1, 2, 3, 5)),
            sweep=random.choice((0.2, 1.0, 3.0)),
            heartbeat=random.choice((1.0, 2.0, 5.0)),
        )
        for _ in range(random.choice((2, 2, 3)))
    )
    return replace(plan, settings=settings, stored_lease=plan.lease)


def _with_lease(plan: Plan, random: Random, fault: _Draw) -> Plan:
    """Let an operator change the lease."""
    lease = random.choice((0.4, 0.4, 0.6, 3.0, 6.0))
    return plan.along(replace(fault(random, "set lease", random.uniform(0.3, _SPAN)), size=lease))


def _with_resharding(plan: Plan, random: Random, fault: _Draw) -> Plan:
    """Change the number of partitions while two callers enqueue."""
    tasks = tuple(replace(task, key=random.choice(("", "a", "a"))) for task in plan.tasks[:_MAX_TASKS])
    times = (random.uniform(0.3, _SPAN), random.choice(tasks).at)  # at any time, or while tasks are stored
    changes = [fault(random, "reshard", random.choice(times)) for _ in range(random.choice((1, 1, 2)))]
    return replace(plan, tasks=tasks, slots=min(plan.slots, 2), again=random.choice((2.0, 4.0))).along(*changes)


def _with_lanes(plan: Plan, random: Random, fault: _Draw) -> Plan:
    """Give tasks priorities, so that lanes are used for the first time while workers and callers fail."""
    lanes = ("", "high", "high", "low", "idle")
    tasks = tuple(
        replace(task, lane=random.choice(lanes), key=task.key or random.choice(("", "a"))) for task in plan.tasks
    )
    kinds = random.choice((("kill",), ("cut", "kill"), ("reshard", "kill"), ("restart",), ()))
    added = [fault(random, kind, random.choice(tasks).at + random.uniform(0.0, 0.5)) for kind in kinds]
    return replace(plan, tasks=tasks, again=random.choice((0.0, 0.0, 2.0))).along(*added)


def _with_deploy(plan: Plan, random: Random, fault: _Draw) -> Plan:
    """Deploy another release, often while the server forgets its scripts or a worker dies."""
    added = []
    for _ in range(random.choice((1, 1, 2))):
        added.append(fault(random, "deploy", random.uniform(0.3, 0.8 * _SPAN)))
        kind = random.choice(("flush scripts", "kill", "kill", "stop", "restart", "cut"))
        added.append(fault(random, kind, added[-1].at + random.uniform(0.2, 3.0)))
    return replace(plan, clean=5.0, workers=min(plan.workers, 2), tasks=plan.tasks[:_MAX_TASKS]).along(*added)


def _with_sessions(plan: Plan, random: Random, fault: _Draw) -> Plan:
    """Add sessions, whose callers and workers may be killed."""
    sessions = tuple(
        SessionPlan(
            id=f"session {number}",
            at=round(random.uniform(0.1, 3.2), 3),
            messages=random.randint(2, 4),
            gap=random.choice((0.0, 0.1, 0.5, 1.5)),
            steps=random.choice((1, 1, 2)),
            pause=random.choice((0.02, 0.2, 0.5)),
        )
        for number in range(random.choice((1, 1, 2)))
    )
    kinds = random.choice(((), ("kill caller",), ("kill caller", "kill")))
    kills = [fault(random, kind, random.uniform(0.3, _SPAN)) for kind in kinds]
    return replace(plan, sessions=sessions, clean=5.0, tasks=plan.tasks[:_MAX_TASKS]).along(*kills)


def _with_supervisors(plan: Plan, random: Random, fault: _Draw) -> Plan:
    """Let supervisors start all workers, with tasks that kill their process among the others."""
    supervisors = SupervisorPlan(
        processes=random.choice((1, 2, 2)),
        isolated=random.choice((1, 2)),
        stall_limit=random.choice((1.5, 3.0, 60.0)),
        idle_limit=random.choice((2.0, 60.0)),
        crash_threshold=random.choice((0, 1, 5)),
    )
    poison = tuple(
        replace(
            plan.tasks[0],
            id=f"poison{number}",
            kind="poison",
            at=random.uniform(0.3, 3.5),
            steps=random.choice((1, 1, 2, 3)),
            pause=random.choice((0.0, 0.02, 0.2)),
            delay=0.0,
            rest=0.0,
            key="",
        )
        for number in range(random.choice((0, 1, 1, 2)))
    )
    kinds = random.choices(_STRIKES, k=random.choice((0, 1, 1, 2, 3)))
    faults = [fault(random, kind, random.uniform(0.3, _SPAN + 2.0)) for kind in kinds]
    if random.random() < 0.4:  # what a supervisor tells Redis, or what goes before a quarantined task runs
        aimed = fault(random, random.choice(("cut", "late", "kill", "freeze", "lose tail")), random.uniform(0.3, _SPAN))
        faults.append(replace(aimed, on=random.choice(_AIMS)))
    tasks = (*plan.tasks[:_MAX_TASKS], *poison)
    return replace(plan, supervisors=supervisors, workers=random.choice((1, 1, 2)), tasks=tasks).along(*faults)


def _with_waits(plan: Plan, random: Random, fault: _Draw) -> Plan:
    """Let some tasks wait for time and answers, and let faults meet what they write and are sent."""
    tasks = _of_kinds(plan.tasks[:_MAX_TASKS], WAITING, random)
    return replace(plan, tasks=tasks, clean=5.0).along(*_aimed_at(_OF_WAITS, random, fault))


def _with_children(plan: Plan, random: Random, fault: _Draw) -> Plan:
    """Let some tasks have children, and let faults meet what launches them and tells of their ends."""
    tasks = _of_kinds(plan.tasks[:_MAX_TASKS], PARENTS, random)
    return replace(plan, tasks=tasks, clean=5.0).along(*_aimed_at(_OF_CHILDREN, random, fault))


def _with_streams(plan: Plan, random: Random, fault: _Draw) -> Plan:
    """Let some tasks emit, kill the pages that read them, and let faults meet what is written."""
    tasks = _of_kinds(plan.tasks[:_MAX_TASKS], STREAMING, random)
    faults = [fault(random, "kill page", random.uniform(0.3, _SPAN)) for _ in range(random.choice((0, 1, 2)))]
    ends = [task.at + task.delay for task in tasks if task.kind == "laments"]
    if ends and random.random() < 0.7:
        faults += [fault(random, "replay", max(ends) + random.uniform(2.0, 6.0)) for _ in range(2)]
    return replace(plan, tasks=tasks, clean=5.0).along(*faults, *_aimed_at(_OF_STREAMS, random, fault))


def _with_values(plan: Plan, random: Random, fault: _Draw) -> Plan:
    """Let some tasks have values that a page changes, and let faults meet what is written."""
    tasks = _of_kinds(plan.tasks[:_MAX_TASKS], STEERED, random)
    return replace(plan, tasks=tasks, clean=5.0).along(*_aimed_at(_OF_VALUES, random, fault))


def _with_limits(plan: Plan, random: Random, fault: _Draw) -> Plan:
    """Let most tasks hold tokens, and let faults meet what takes, gives and waits for them."""
    kinds = random.sample(LIMITED, k=random.choice((1, 2, 3, 6)))
    drawn = (replace(task, kind=random.choice((*kinds, *kinds, task.kind))) for task in plan.tasks)
    # a limited task waits for its turn, whatever its ordering key
    tasks = tuple(replace(task, key="") if task.kind in LIMITED else task for task in drawn)
    faults = [fault(random, "kill", random.uniform(0.3, _SPAN)) for _ in range(random.choice((0, 1, 1, 2)))]
    return replace(plan, tasks=tasks, clean=5.0).along(*faults, *_aimed_at(_OF_LIMITS, random, fault))


def _of_kinds(tasks: Sequence[TaskPlan], kinds: Sequence[str], random: Random) -> tuple[TaskPlan, ...]:
    """Return the tasks, two to four of them of other kinds."""
    chosen = random.sample(range(len(tasks)), k=min(len(tasks), random.choice((2, 3, 4))))
    drawn = {number: random.choice(kinds) for number in chosen}
    return tuple(replace(task, kind=drawn.get(number, task.kind)) for number, task in enumerate(tasks))


def _aimed_at(commands: Sequence[str], random: Random, fault: _Draw) -> list[Fault]:
    found = []
    for _ in range(random.choice((0, 1, 2, 3))):
        kind = random.choice(("cut", "late", "kill", "kill", "freeze", "lose tail"))
        found.append(replace(fault(random, kind, random.uniform(0.3, _SPAN + 2.0)), on=random.choice(commands)))
    sent = ("kill", "freeze")  # the producer sends these, which neither dies nor stands still
    return [replace(one, kind="cut") if one.on in _SENT and one.kind in sent else one for one in found]


_OF_WAITS: Final = (
    *("write_checkpoint", "write_checkpoint", "park", "park", "answer", "answer", "claim_token", "promote"),
)
_OF_STREAMS: Final = (
    *("write_checkpoint",) * 5,
    *("finish", "reschedule", "bury", "release", "enqueue_successor", "renew_leases", "claim"),
)
_OF_VALUES: Final = (*("write_checkpoint",) * 4, "update_value", "finish", "reschedule", "release", "claim")
_OF_LIMITS: Final = (
    *("take_limits", "take_limits", "release_limits", "release_limits", "renew_limits", "admit_limited"),
    *("admit_limited", "await_limit", "await_limit", "enqueue_limited", "look_limited", "promote", "finish", "claim"),
    *("reschedule", "park", "release", "XREADGROUP"),
)
_SENT: Final = frozenset({"answer", "update_value", "enqueue_limited"})
_OF_CHILDREN: Final = (
    *("add_children", "enqueue_child", "confirm_launch", "notify_join", "notify_join", "notice_sent", "close_join"),
    *("finish", "finish", "bury", "park", "watch", "write_checkpoint"),
)
"""Commands that the faults of such runs wait for."""

_STRIKES: Final = (
    *("kill", "kill", "kill", "freeze", "block", "stop"),
    *("kill supervisor", "kill host", "freeze supervisor", "stop supervisor", "reload"),
)
"""Kinds of faults that runs with supervisors have more often."""

_AIMS: Final = ("report_crash", "report_crash", "count_crash", "register_supervisor", "take_quarantined", "quarantine")
"""Commands that a fault of such a run may wait for."""

ELEMENTS: Final[dict[str, Callable[[Plan, Random, _Draw], Plan]]] = {
    "settings": _with_settings,
    "lease": _with_lease,
    "resharding": _with_resharding,
    "deploy": _with_deploy,
    "sessions": _with_sessions,
    "supervised hosts": _with_supervisors,
    "waits": _with_waits,
    "children": _with_children,
    "streams": _with_streams,
    "values": _with_values,
    "lanes": _with_lanes,
    "limits": _with_limits,
}
assert ELEMENTS.keys() == _SHARES.keys()
