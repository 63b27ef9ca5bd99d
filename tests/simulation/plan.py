"""Plan of one run, drawn from its seed: tasks, workers and faults. The interleaving is drawn apart from it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from random import Random
from typing import Final

from .fleet.elements import OPERATIONS, SessionPlan, SupervisorPlan, WorkerPlan, with_elements

__all__ = ["FAULTS", "KINDS", "PRODUCER_COMMANDS", "Fault", "Plan", "TaskPlan", "draw"]

SPAN: Final = 8.0
"""Virtual seconds in which tasks are enqueued and faults occur."""

KINDS: Final = ("chain", "chain", "hasty", "fan", "stumbles", "doomed", "dozes", "listens", "relay", "agent")
"""Kinds of tasks that are drawn; see app.py."""

LISTENING: Final = frozenset({"listens", "passes"})
"""Kinds of tasks that messages are sent to."""

FAULTS: Final = {
    "kill": (0.1, 3.0),
    "freeze": (0.3, 6.0),
    "block": (0.5, 6.0),
    "stop": (0.1, 1.0),
    "cut": (0.0, 0.0),
    "late": (0.003, 6.0),
    "deaf": (0.0, 0.0),
    "hold": (0.3, 6.0),
    "restart": (0.1, 5.0),
    "lose tail": (0.1, 1.5),
    "step clock": (1.0, 600.0),
    "step clock back": (1.0, 40.0),
    "full": (0.5, 6.0),
    "flush scripts": (0.0, 0.0),
    "pause server": (0.2, 5.0),
    "newcomer": (0.0, 0.0),
    "cancel": (0.0, 0.0),
    "replay": (0.0, 0.0),
    "fork": (0.0, 0.0),
    "message": (0.0, 0.0),
    "garbage": (0.0, 0.0),
    **OPERATIONS,
}
"""Kinds of faults, and the least and the most of their sizes: mostly seconds; see faults.py."""

AIMED: Final = frozenset({"cut", "late", "kill", "freeze", "lose tail", "step clock", "cancel"})
"""Kinds of faults that may wait for a command of a worker, or of the producer."""

PRODUCED: Final = ("enqueue", "enqueue", "schedule", "send_message", "send_message", "cancel", "replay", "enqueue_copy")
"""Commands of the producer, as often as they are drawn."""

PRODUCER_COMMANDS: Final = frozenset({*PRODUCED, "answer", "update_value", "enqueue_limited"})
"""Commands of the producer that a fault may wait for."""

_RARE: Final = frozenset({"message", "garbage", *OPERATIONS})
"""Kinds of faults that are not drawn at random; see `_aimed` and fleet/elements.py."""

_COMMANDS: Final = (
    *("write_checkpoint", "write_checkpoint", "write_checkpoint", "release", "finish", "reschedule", "park", "claim"),
    *("bury", "quarantine", "raise_count", "renew_leases", "promote", "enqueue_successor", "XREADGROUP"),
)

_AIMS: Final = {
    "freeze": ("renew_leases", "renew_leases", "claim", "XREADGROUP", "write_checkpoint", "finish"),
    "lose tail": ("write_checkpoint", "write_checkpoint", "XREADGROUP", "claim", "finish", "park", "release"),
    "step clock": ("claim", "claim", "claim", "renew_leases", "promote"),
}
"""Commands that these faults wait for, by fault; the others wait for any of the commands above."""

_SETTLING: Final = ("release", "release", "finish", "reschedule", "park", "bury", "write_checkpoint")
"""Commands whose repetition must change nothing."""

_FREQUENT: Final = ("kill", "freeze", "stop", "late", "hold", "restart", "lose tail", "step clock", "pause server")
_DRAWN: Final = (*(kind for kind in FAULTS if kind not in _RARE), *_FREQUENT, *_FREQUENT)
"""Kinds of faults, as often as they are drawn."""

_PAUSES: Final = ((0.0, 0.02, 0.2, 0.5, 1.0), (0.2, 0.4), (0.5, 1.0))
"""Seconds of the steps of a run: of all kinds, or long enough for faults to come in their middle."""

_FOLLOWS: Final = {
    "lose tail": ("kill", "kill", "freeze", "stop", "late"),
    "late": ("stop", "kill", "freeze", "late", "lose tail"),
    "cut": ("stop", "kill", "lose tail"),
    "kill": ("lose tail", "late", "kill", "restart"),
    "restart": ("newcomer", "kill", "stop", "restart"),
    "pause server": ("newcomer", "stop", "late"),
    "step clock": ("newcomer", "stop", "step clock back"),
    "freeze": ("kill", "stop", "late"),
    "hold": ("kill", "stop", "newcomer"),
    "cancel": ("replay", "late", "kill", "lose tail"),
}
"""Faults that often follow a fault, from milliseconds to seconds later."""


@dataclass(frozen=True)
class Fault:
    """A fault.

    Attributes:
        at: Seconds after the start.
        target: Which worker, connection or task, modulo their number.
        on: Name of a script, or a command: the fault waits for the next one that a worker sends, and hits that worker.
    """

    at: float
    kind: str
    target: int
    size: float
    on: str = ""

    def __str__(self) -> str:
        size = f" {self.size:.2f} s" if self.size else ""
        return f"{self.at:6.2f} s  {self.kind}{size} ({f'with {self.on}' if self.on else f'target {self.target}'})"


@dataclass(frozen=True)
class TaskPlan:
    """A task.

    Attributes:
        at: Seconds after the start at which it is enqueued.
        delay: Seconds until it may run.
        rest: Seconds between its last record and its outcome.
        key: Tasks of one key and priority are started in the order in which they were stored; empty for none.
        lane: "high", "low" or "idle"; empty for the normal priority.
    """

    id: str
    kind: str
    at: float
    steps: int
    pause: float
    delay: float = 0.0
    rest: float = 0.0
    key: str = ""
    lane: str = ""


@dataclass(frozen=True)
class Plan:
    """A run.

    Attributes:
        lease: Seconds.
        variant: Number of another interleaving of the same plan.
        slots: Tasks that a worker runs at once.
        restarts: Leases that one script restarts at most.
        settings: Settings of the workers, in turn; empty if all have those of the plan.
        stored_lease: Lease that an operator has stored long before the run, in seconds; 0 for none.
        clean: Seconds between two rounds of a worker's janitor.
        again: Seconds between two rounds of a second caller, which asks for each stored task again; 0 for none. It
            also enqueues every second task.
        supervisors: Supervisors that start all workers; None without any. With them, `workers` is their number.
    """

    seed: int
    workers: int
    lease: float
    tasks: tuple[TaskPlan, ...]
    faults: tuple[Fault, ...]
    variant: int = 0
    slots: int = 4
    restarts: int = 250
    settings: tuple[WorkerPlan, ...] = ()
    stored_lease: float = 0.0
    clean: float = 60.0
    again: float = 0.0
    sessions: tuple[SessionPlan, ...] = ()
    supervisors: SupervisorPlan | None = None

    @property
    def longest_lease(self) -> float:
        """Longest lease that a worker may use, in seconds."""
        changed = [fault.size for fault in self.faults if fault.kind == "set lease"]
        return max((self.lease, *changed, *(one.lease for one in self.settings)))

    def worker(self, number: int) -> WorkerPlan:
        """Return the settings of a worker. number: of the order in which they start, from 0."""
        plan = self.settings[number % len(self.settings)] if self.settings else WorkerPlan(self.lease, self.slots)
        if self.supervisors is not None:
            plan = replace(
                plan,
                supervised=True,
                stall_limit=self.supervisors.stall_limit,
                crash_threshold=self.supervisors.crash_threshold,
                max_crashes=max(3, 2 + 2 * len(self.faults)),  # two beside another task, then by faults only
            )
        return plan

    def along(self, *faults: Fault) -> Plan:
        """Return the same run with more faults."""
        return replace(self, faults=tuple(sorted((*self.faults, *faults), key=lambda fault: fault.at)))

    def without(self, *faults: Fault) -> Plan:
        """Return the same run with fewer faults."""
        return replace(self, faults=tuple(fault for fault in self.faults if fault not in faults))


def draw(seed: int, element: str = "") -> Plan:
    """Return the plan of a seed. element: one that it has in any case; see fleet/elements.py."""
    random = Random(f"plan {seed}")
    lease, pauses = random.choice((1.0, 1.0, 2.0, 4.0)), random.choice(_PAUSES)
    bursts = [random.uniform(0.2, SPAN * 0.4) for _ in range(random.randint(0, 2))]
    tasks = tuple(
        TaskPlan(
            id=f"t{number}",
            kind=random.choice(KINDS),
            at=random.uniform(0, SPAN * 0.5) if not bursts else random.choice(bursts) + 0.01 * number,
            steps=random.randint(1, 6),
            pause=random.choice(pauses),
            delay=random.choice((0.0, 0.0, 0.0, 2.0)),
        )
        for number in range(random.randint(4, 10))
    )
    faults: list[Fault] = []
    for _ in range(random.choice((0, 1, 1, 2, 2, 3, 4))):
        fault = _fault(random, random.choice(_DRAWN), random.uniform(0.3, SPAN))
        faults.append(fault)
        if random.random() < 0.6:
            kind = random.choice(_FOLLOWS.get(fault.kind, _DRAWN))
            faults.append(_fault(random, kind, fault.at + 10 ** random.uniform(-2, 0.7)))
    for _ in range(random.choice((0, 0, 1, 2))):  # retries and late bytes cost a run little
        at, kind = random.uniform(0.3, SPAN * 0.7), random.choice(("cut", "late"))
        aimed = replace(_fault(random, kind, at), on=random.choice(_SETTLING))
        faults.append(aimed)
        if aimed.on == "release":
            faults.append(_fault(random, "stop", aimed.at + 0.01))
    if random.random() < 0.3:  # the server hands out a message again, while a record of the former run is on its way
        at = random.uniform(0.3, SPAN * 0.6)
        faults.append(Fault(round(at, 3), "lose tail", 0, round(10 ** random.uniform(-3.7, -1.5), 5), "XREADGROUP"))
        faults.append(Fault(round(at + 0.3, 3), "late", 0, round(random.uniform(0.05, 0.5), 3), "write_checkpoint"))
    own = Random(f"clock {seed}")
    if (
        own.random() < 0.25
    ):  # the clock is set before a worker looks for lost deliveries, and before others renew theirs
        at = round(own.uniform(0.5, SPAN * 0.6), 3)
        faults.append(Fault(at, "step clock", 0, round(own.uniform(2.0, 20.0) * lease, 3), "claim"))
    workers, slots, restarts = random.choice((1, 2, 2, 3)), random.choice((1, 2, 3, 4)), random.choice((1, 2, 250))
    own = Random(f"aims {seed}")
    if own.random() < 0.3:
        tasks = tuple(replace(task, rest=own.choice((0.0, 0.02, 0.3))) for task in tasks)
    if own.random() < 0.2:
        tasks = tuple(replace(task, kind="passes") if task.kind == "relay" else task for task in tasks)
    faults += _aimed(own, tasks, lease)
    faults.sort(key=lambda one: one.at)
    plan = Plan(
        seed,
        workers,
        lease,
        tasks,
        tuple(faults),
        slots=slots,
        restarts=restarts,
    )
    return with_elements(plan, _fault, element)


def _aimed(random: Random, tasks: tuple[TaskPlan, ...], lease: float) -> list[Fault]:
    """Return faults that meet what random ones seldom do."""

    def fault(kind: str, most: float, on: str = "", size: float = 0.0) -> Fault:
        return Fault(round(random.uniform(0.3, most), 3), kind, random.randrange(100), size, on)

    found = []
    if random.random() < 0.4:  # a reply to the producer is lost, so it sends the command again
        found += [fault(random.choice(("cut", "late")), 4.0, random.choice(PRODUCED), 0.2) for _ in range(2)]
    if random.random() < 0.3:
        found.append(fault("cancel", 6.0, random.choice((*_SETTLING, "", ""))))
    if random.random() < 0.3:
        found += [fault("message", SPAN) for _ in range(3)]
    if any(task.rest for task in tasks):  # the last record is lost while the handler returns
        found += [fault("lose tail", 5.0, "write_checkpoint", 0.05) for _ in range(2)]
    ends = [task.at + task.delay for task in tasks if task.kind == "doomed"]
    if ends and random.random() < 0.4:  # two replays at once
        at, target = round(max(ends) + random.uniform(1.5, 4.0), 3), random.randrange(100)
        found += [Fault(at, "replay", target, 0.0), Fault(at, "replay", target + random.choice((0, 2)), 0.0)]
    if random.random() < 0.12:  # a task whose workers die before it has recorded anything
        at = random.uniform(0.6, 2.0)
        found += [Fault(round(at + 1.6 * lease * count, 3), "kill", 0, 0.1, "renew_leases") for count in range(4)]
        found.append(fault("cut", 4.0 * lease, random.choice(("quarantine", "take_quarantined", "clear_quarantined"))))
    if random.random() < 0.15:  # a lost hand-out, and then a lost reply to what gives it another fence
        found += [fault("lose tail", 3.0, "XREADGROUP", 0.002), fault("cut", 3.0, "raise_count")]
    if random.random() < 0.5 and any(task.kind in ("relay", "passes") for task in tasks):
        found.append(fault(random.choice(("cut", "late", "kill")), 5.0, "enqueue_successor", 0.2))
    if random.random() < 0.15:  # unreadable messages, of which a worker gets no reply, or which it releases
        at = round(random.uniform(0.5, 6.0), 3)
        found += [Fault(at, random.choice(("cut", "late", "kill")), 0, 0.2, "XREADGROUP")]
        found += [Fault(at, "garbage", count, 0.0) for count in range(6)]
        found += [Fault(at, "stop", random.randrange(100), 0.0), fault("replay", SPAN)]
    return found


def _fault(random: Random, kind: str, at: float) -> Fault:
    least, most = FAULTS[kind]
    size = math.exp(random.uniform(math.log(least), math.log(most))) if least else 0.0
    on = random.choice(_AIMS.get(kind, _COMMANDS)) if kind in AIMED and random.random() < 0.6 else ""
    return Fault(round(at, 3), kind, random.randrange(100), round(size, 3), on)
