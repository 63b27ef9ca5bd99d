"""Hosts with a supervisor and its child processes, what goes wrong with them, and checks of both.

A child runs the code of a supervised worker: it reports its app, waits for work, and reports what it does. A task of
the kind `poison` ends the process that runs it.
"""

from __future__ import annotations

import asyncio
import math
import signal
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

from perdure import Worker
from perdure.queues import QueueError
from perdure.queues.keys import GROUP, RELEASED, Namespace
from perdure.queues.runtime import RUNTIME
from perdure.queues.supervisors import resume_supervisor
from perdure.worker.cli.support.probe import ProbeOptions
from perdure.worker.cli.support.worker_process import SupervisedWorker, serve
from perdure.worker.runtime.children.child import SupervisorTimings
from perdure.worker.runtime.supervisor_link import Role, SupervisorLink
from perdure.worker.supervise.config import SupervisorConfig
from perdure.worker.supervise.supervisor import Supervisor

from ..app import NAMESPACE, make_app
from ..loop import Machine, current
from .processes import SimulatedProcess
from .settings import worker_type

if TYPE_CHECKING:
    from ..app import Entry
    from ..plan import Fault
    from ..world import Process, World
    from .elements import SupervisorPlan, WorkerPlan

__all__ = [
    "SUPERVISOR_COMMANDS",
    "Host",
    "SupervisorChecks",
    "freeze_supervisor",
    "kill_host",
    "kill_supervisor",
    "note_trouble",
    "reload",
    "start_child",
    "stop_supervisor",
]

SUPERVISOR_COMMANDS: Final = ("report_crash", "count_crash", "register_supervisor")
"""Scripts of supervisors."""

_COMPUTERS: Final = 2
"""Hosts of a run: a supervisor that starts after another one has ended often has its name."""

_FORK: Final = 0.002
_START: Final = 0.03
_IMPORT: Final = (0.05, 0.4)
"""Seconds in which a process is created, in which Python starts, and in which it imports the app."""

_REFILL: Final = 4.0
"""Seconds within which a supervisor has replaced a child: the longest delay, and the start of another one."""

_OPERATOR: Final = 3.0
"""Seconds after which an operator lifts the pause of a supervisor."""

_PROMPT: Final = 2.0
"""Seconds after the death of a child within which others continue its tasks."""

_ABORT: Final = 2.3
"""Seconds after which a process dies that does not even dump its stacks."""

_ORPHANS: Final = 13.0
"""Seconds within which a child ends without its supervisor: the grace of the app, ten more, and some latency."""

_RECOVERY: Final = 3.0
"""Seconds after a trouble of the server or of a supervisor in which its commands may still wait."""

_SERVER: Final = frozenset({"restart", "lose tail", "full", "pause server"})
"""Faults of the server, with which no command succeeds for a while."""

_MAX_SHARED: Final = 2
"""Processes that also run other tasks, of which one task may be the end."""


class Host:
    """A supervisor and the child processes that it has started.

    Attributes:
        machine: That of the supervisor.
        plan: Settings of the children. release: of supervisor and children.
        troubled_until: Virtual time at which the last fault of the supervisor or of its connections ends.
        changed: Virtual time at which it started, or a child of it ended.
    """

    def __init__(self, world: World, number: int, plan: WorkerPlan, release: int, supervisors: SupervisorPlan) -> None:
        self.name = f"s{number}"
        self.machine = world.loop.machine(self.name, f"host{number % _COMPUTERS}")
        self.plan = plan
        self.release = release
        self.troubled_until = -math.inf
        self.started: list[Machine] = []
        self._world = world
        self.supervisors = supervisors
        self.changed = world.loop.now
        self._supervisor: Supervisor | None = None

    def start(self) -> None:
        """Start the supervisor."""
        self._world.hosts.append(self)
        self._world.tell(f"supervisor {self.name} starts on {self.machine.host}")
        self._world.start_on(self.machine, self._run())

    def stop(self) -> None:
        """Stop the supervisor gracefully."""
        self._world.send_signal(self.machine, signal.SIGTERM)

    def asked_to_stop(self, machine: Machine) -> bool:
        """Return whether the supervisor has asked a child to stop, for which the child has more time."""
        supervisor = self._supervisor
        return supervisor is not None and any(
            child.pid == machine.number and child.stop_requests for child in supervisor._running
        )

    def is_held_back(self) -> bool:
        """Return whether the supervisor is paused or stopping, or one of its children is."""
        supervisor = self._supervisor
        if supervisor is None or supervisor._registry is None or supervisor._stopping.is_set():
            return True
        return supervisor._registry.state.paused or any(child.stop_requests for child in supervisor._running)

    async def _run(self) -> None:
        world, plan = self._world, self.supervisors
        config = SupervisorConfig(
            ("perdure", "worker", "run"),
            plan.processes,
            plan.isolated,
            timings=SupervisorTimings(idle_limit=plan.idle_limit, idle_poll=1.0),
        )
        code = 1
        try:
            self._supervisor = Supervisor(config)
            code = await self._supervisor.run()
        except* QueueError as errors:
            world.tell(f"supervisor {self.name} ended: {errors.exceptions[0]}")
        except* BaseException as errors:  # noqa: BLE001 - a defect, which the run reports
            world.checks.add("supervisor failed", f"{self.name}: {errors!r}")
        world.tell(f"supervisor {self.name} has ended with exit code {code}")
        if not world.over:
            if alive := [machine.name for machine in self.started if not machine.dead]:
                world.checks.add("not drained", f"{', '.join(alive)} of {self.name}, which has ended")
            world.on(world.main, lambda: world.later(1.0, world.start_worker))
        world.end_machine(self.machine, code)

    def spawn(self, role: Role) -> SimulatedProcess:
        """Start a child process."""
        world = self._world
        machine = world.loop.machine(f"{self.name}.{len(self.started)}", self.machine.host)
        self.started.append(machine)
        started = world.children[machine] = SimulatedProcess(world, self.machine, machine)
        world.tell(f"{machine.name} starts as {role}")
        world.start_thread(machine, partial(self._main, world.add_process(machine, self), started, role))
        return started

    def _main(self, process: Process, started: SimulatedProcess, role: Role) -> None:
        """Run a supervised worker, as `perdure worker run` does. Called in the main thread of the child."""
        world = self._world
        RUNTIME.sleep(_START)
        link = SupervisorLink(role, started.end)
        process.role = lambda: link.role
        supervised = SupervisedWorker(link)
        RUNTIME.sleep(world.random.uniform(*_IMPORT))
        app = make_app(world.journal, world.url, self.plan, self.release)
        supervised.wait_for_work(app)

        class ObservedWorker(worker_type(self.plan.sweep, world.plan.clean)):  # type: ignore[misc]
            """Worker that the checks know as soon as it is connected."""

            async def __aenter__(self) -> Any:
                await super().__aenter__()
                process.worker, process.connected = self, world.loop.now
                return self

        def make_worker() -> Worker:
            slots = 1 if link.role == "isolated" else self.plan.slots
            worker: Worker = ObservedWorker(app, concurrency=slots, link=link)
            return worker

        world.start_on(started.machine, self._serve(started.machine, make_worker, supervised))

    async def _serve(self, machine: Machine, make_worker: Callable[[], Worker], supervised: SupervisedWorker) -> None:
        world, code = self._world, 1
        try:
            await serve(make_worker, supervised, ProbeOptions(None, None))
            code = 0
        except QueueError as error:
            world.tell(f"{machine.name} ended: {error}")
        except BaseException as error:  # noqa: BLE001 - a defect, which the run reports
            world.checks.add("worker failed", f"{machine.name}: {error!r}")
        world.tell(f"{machine.name} has ended with exit code {code}")
        world.end_machine(machine, code)


async def start_child(
    world: World, arguments: Sequence[str], environment: Mapping[str, str], role: str
) -> SimulatedProcess:
    """Start a child process of the running supervisor; see `StartProcess` in queues/runtime.py."""
    machine = current()
    await asyncio.sleep(_FORK)
    return next(host for host in world.hosts if host.machine is machine).spawn(cast("Role", role))


# faults


def _host(world: World, fault: Fault) -> Host | None:
    return world.hosts[fault.target % len(world.hosts)] if world.hosts else None


async def kill_supervisor(world: World, fault: Fault) -> None:
    """Kill a supervisor. Its children stop, and an init system starts another one after a while."""
    if host := _host(world, fault):
        world.kill(host.machine, fault.size)


async def kill_host(world: World, fault: Fault) -> None:
    """Kill all processes of a supervisor, as a power cut does. The host starts again after a while."""
    if host := _host(world, fault):
        world.kill(host.machine, fault.size)
        for machine in host.started:
            world.end_machine(machine)


async def freeze_supervisor(world: World, fault: Fault) -> None:
    """Stop a supervisor, as SIGSTOP does. Its children run."""
    if host := _host(world, fault):
        host.machine.frozen = True
        world.trouble(host.machine, fault.size)
        world.later(fault.size, lambda: world.thaw(host.machine))


async def stop_supervisor(world: World, fault: Fault) -> None:
    """Stop a supervisor and its children gracefully, as a service manager does."""
    if host := _host(world, fault):
        host.stop()


async def reload(world: World, fault: Fault) -> None:
    """Let a supervisor replace its children, one at a time."""
    if host := _host(world, fault):
        world.send_signal(host.machine, signal.SIGHUP)


def note_trouble(world: World, fault: Fault) -> None:
    """Note that the server executes no commands for a while."""
    if fault.kind in _SERVER:
        checks = world.checks.supervisors
        checks.disturbed_until = max(checks.disturbed_until, world.loop.now + fault.size)


# checks


class SupervisorChecks:
    """Checks of supervisors and of tasks that kill their processes.

    Attributes:
        disturbed_until: Virtual time until which the server executes no commands.
        judged: Deaths of children after which their tasks were looked for.
        judged_hosts: Supervisors whose children were counted at the end.
    """

    def __init__(self, world: World) -> None:
        self.disturbed_until = -math.inf
        self.judged = self.judged_hosts = 0
        self._world = world
        self._workers: dict[str, str] = {}  # machines by the ids of their workers
        self.shared: defaultdict[str, set[str]] = defaultdict(set)
        self._counted: set[bytes] = set()
        self._lifting: set[bytes] = set()
        self._resumed = -math.inf  # when supervisors know that the last pause was lifted
        self.continued: dict[Machine, float] = {}  # when a process last began to respond again

    def orphaned(self, host: Host) -> None:
        """Look later whether the children of a supervisor have ended, which has ended."""
        world = self._world
        world.loop.call_later(_ORPHANS, self._check_ended, host, context=world.loop.context_of(world.main))

    def _check_ended(self, host: Host) -> None:
        ended = self._world.loop.now - _ORPHANS
        alive = [one for one in host.started if not (one.dead or one.frozen or self.continued.get(one, 0.0) > ended)]
        if alive and not self._world.over:
            self._world.checks.add("orphan", f"{', '.join(one.name for one in alive)}, without {host.name}")

    def dies(self, process: Process, entry: Entry) -> None:
        """Check how many processes that run other tasks have died of a task."""
        shared = self.shared[entry.task]
        if process.role() == "worker":
            shared.add(process.name)
        most = _MAX_SHARED * (1 + self._world.replays[entry.task])
        if len(shared) > most and not self._world.server.lost:
            self._world.checks.add("poison", f"{', '.join(sorted(shared))} have died of {entry.task}")

    def ended(self, process: Process, host: Host, code: int) -> None:
        """Look later whether the tasks of a child that has died were continued. Called before it is removed."""
        world = self._world
        host.changed = world.loop.now
        if process.worker is None or world.over:
            return
        self._workers[process.worker.id] = process.name
        held = {place: worker for place, worker in self._pending() if worker[0] == process.worker.id.encode()}
        if code != 0 and held and not host.machine.dead:
            world.loop.call_later(
                _PROMPT, self._check_continued, host, held, world.loop.now, context=world.loop.context_of(world.main)
            )

    def stands_still(self, process: Process, seconds: float) -> None:
        """Look later whether a child that does not respond for so long was killed."""
        host, world = process.host, self._world
        limit = 2 * process.plan.stall_limit + _ABORT
        if host is not None and process.worker is not None and seconds > limit:
            world.loop.call_later(
                limit, self._check_killed, process, host, world.loop.now, context=world.loop.context_of(world.main)
            )

    def _check_killed(self, process: Process, host: Host, since: float) -> None:
        machine = process.machine
        continued = self.continued.get(machine, -math.inf) > since or not (machine.frozen or machine.blocked)
        disturbed = host.machine.dead or since < host.troubled_until + _RECOVERY or self._world.over
        if not (machine.dead or continued or disturbed or host.asked_to_stop(machine)):
            self._world.checks.add("not killed", f"{machine.name} has not responded since {since:.3f}")

    def finish(self) -> None:
        """Check that each supervisor has all of its ordinary children, and at most its quarantine children."""
        world = self._world
        for host in world.hosts:
            children = [process for process in world.processes if process.host is host]
            changes = [self.disturbed_until, self._resumed, host.troubled_until, host.changed]
            # The next child starts when the last one runs.
            changes += [self.continued.get(child.machine, -math.inf) for child in children]
            still = any(child.machine.frozen or child.machine.blocked for child in children)
            if (
                world.loop.now < max(changes) + _REFILL
                or still
                or host.is_held_back()
                or world.network.is_deaf(host.machine)
            ):
                continue
            self.judged_hosts += 1
            roles = [child.role() for child in children if child.worker]
            if roles.count("worker") != host.supervisors.processes:
                world.checks.add("children", f"{host.name} has the children {roles}")

    def aborted(self, machine: Machine) -> None:
        """Check that a supervisor takes no child for stalled that responds. Called before the child gets the signal."""
        stood = machine.frozen or machine.blocked
        if not (stood or self.continued.get(machine, -math.inf) > self._world.loop.now - _RECOVERY):
            self._world.checks.add("needless kill", f"{machine.name} responds, but is taken for stalled")

    def _check_continued(self, host: Host, held: Mapping[tuple[bytes, bytes], tuple[bytes, int]], died: float) -> None:
        world = self._world
        quiet = max(self.disturbed_until, host.troubled_until) + _RECOVERY
        if (
            host.machine.dead
            or world.over
            or not world.server.up
            or world.network.is_deaf(host.machine)
            or died < quiet
        ):
            return
        self.judged += 1
        now = dict(self._pending())
        for place, delivery in held.items():
            worker, count = now.get(place, (b"", 0))
            if (worker, count) == delivery:
                world.checks.add("not released", f"{place[1].decode()} of {worker.decode()}, which has died")
            elif worker == RELEASED.encode() and (able := self._able(died)):
                world.checks.add("not continued", f"{place[1].decode()}, though {able[0]} could take it")

    def _able(self, since: float) -> list[str]:
        """Return the healthy workers that have a free slot, and were connected at that time."""
        return [
            process.name
            for process in self._world.processes
            if process.worker is not None
            and process.connected < since
            and process.role() == "worker"
            and self._world.is_healthy(process)
            and not self._world.network.is_deaf(process.machine)
            and not process.worker._stop.is_set()
            and process.worker._slots.free
        ]

    def _pending(self) -> Iterator[tuple[tuple[bytes, bytes], tuple[bytes, int]]]:
        """Yield worker and delivery count of each pending message, by its stream and its id."""
        for key, item in self._world.server.items.items():
            if key.endswith(b":ready") and (group := item.value.group_get(GROUP.encode())) is not None:
                for entry, (worker, _, count) in group.pel.items():
                    yield (key, entry.encode()), (worker, count)

    def check_write(self, fields: list[bytes]) -> None:
        """Check which crashes are counted, and let an operator lift a pause."""
        if len(fields) > 5 and fields[0].upper() == b"EVALSHA":
            for key in fields[3 : 3 + int(fields[2])]:
                if b":registry:crashes:" in key:
                    self._check_counted(key)
                elif b":control:pause:" in key and key in self._world.server.items and key not in self._lifting:
                    self._lifting.add(key)
                    self._world.later(_OPERATOR, partial(self._lift, key))

    def _check_counted(self, key: bytes) -> None:
        """Check that no crash of a worker counts which had made progress."""
        item = self._world.server.items.get(key)
        for worker in () if item is None else [one for one in item.value if one not in self._counted]:
            self._counted.add(worker)
            machine = self._workers.get(worker.decode())
            if machine is not None and self._progressed(machine):
                self._world.checks.add("counted crash", f"{worker.decode()} ({machine}) had made progress")

    def _progressed(self, machine: str) -> bool:
        """Return whether a process has recorded a result of its own."""
        entries = self._world.journal.entries
        made = {(entry.run, entry.value) for entry in entries if entry.what == "effect" and entry.machine == machine}
        return any(entry.what == "got" and (entry.run, entry.value) in made for entry in entries)

    def _lift(self, key: bytes) -> None:
        world, name = self._world, key.rpartition(b":control:pause:")[2].decode()

        async def lift() -> None:
            while (producer := world.producer) is not None:
                try:
                    await resume_supervisor(producer.gateway, Namespace(NAMESPACE), name)
                    break
                except QueueError as error:
                    world.tell(f"resuming {name}: {error}")
                    await asyncio.sleep(0.5)
            self._lifting.discard(key)
            self._resumed = world.loop.now + SupervisorTimings().register_interval
            world.tell(f"supervisor {name} is resumed")

        world.tell(f"supervisor {name} is paused")
        world.on_producer(lift)
