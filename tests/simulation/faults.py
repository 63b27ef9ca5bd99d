"""Faults of the simulated world, by their names in a plan."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from perdure import PerdureError
from perdure.deadletter.letters import Filter, list_letters
from perdure.deadletter.replay import Replay, replay
from perdure.queues import QueueError, TaskHandle
from perdure.queues.inspection.views import queue_partitions
from perdure.queues.transport.scripts import loaded_scripts
from perdure.worker.agents.journal.forks import fork

from .fleet.families import PARENTS
from .fleet.pages import kill_page
from .fleet.releases import deploy
from .fleet.resharding import reshard
from .fleet.sessions import kill_caller
from .fleet.settings import REREAD, lease_change_left, set_lease
from .fleet.supervisors import (
    SUPERVISOR_COMMANDS,
    freeze_supervisor,
    kill_host,
    kill_supervisor,
    note_trouble,
    reload,
    stop_supervisor,
)
from .fleet.waits import WAITING
from .network import Connection
from .plan import AIMED, FAULTS, LISTENING, PRODUCER_COMMANDS, Fault

if TYPE_CHECKING:
    from .world import Process, World

__all__ = ["FAULT_TYPES", "strike"]

_RESTART: Final = 0.3
"""Seconds after which the server starts again with a shorter file."""

_TASK: Final = re.compile(rb":record:([^\r]+)\r")

_CONFIRMED: Final = 0.002
"""Seconds within which the reply to a command arrives."""


def _worker(world: World, fault: Fault) -> Process | None:
    alive = [process for process in world.processes if not process.machine.dead]
    return alive[fault.target % len(alive)] if alive else None


def _connection(world: World, fault: Fault) -> Connection | None:
    lines = [one for one in world.network.connections if one.open]
    return lines[fault.target % len(lines)] if lines else None


async def _kill(world: World, fault: Fault) -> None:
    """Kill a worker; it is started again after a while."""
    if process := _worker(world, fault):
        world.kill(process.machine, fault.size)


async def _freeze(world: World, fault: Fault) -> None:
    """Stop all threads of a worker, as SIGSTOP does."""
    if process := _worker(world, fault):
        process.machine.frozen = True
        world.checks.supervisors.stands_still(process, fault.size)
        world.trouble(process.machine, fault.size)
        world.later(fault.size, lambda: world.thaw(process.machine))


async def _block(world: World, fault: Fault) -> None:
    """Block the event loop of a worker; its other threads run."""
    if process := _worker(world, fault):
        process.machine.blocked = True
        world.checks.supervisors.stands_still(process, fault.size)
        world.trouble(process.machine, fault.size)
        world.later(fault.size, lambda: world.unblock(process.machine))


async def _stop(world: World, fault: Fault) -> None:
    """Stop a worker gracefully, as a deploy does."""
    if process := _worker(world, fault):
        world.signal(process)


async def _cut(world: World, fault: Fault) -> None:
    """Break a connection, and lose what is on its way."""
    if line := _connection(world, fault):
        line.cut()
        world.trouble(line.machine)


async def _late(world: World, fault: Fault) -> None:
    """Break a connection; what is on its way to the server arrives later, perhaps after what the next one sends."""
    if line := _connection(world, fault):
        line.cut(late=fault.size)
        world.trouble(line.machine, fault.size)


async def _deaf(world: World, fault: Fault) -> None:
    """Lose all replies of a connection, without a sign."""
    if line := _connection(world, fault):
        line.swallow()
        line.on_close = partial(world.trouble, line.machine)
        world.trouble(line.machine)


async def _hold(world: World, fault: Fault) -> None:
    """Keep a worker from the server; all bytes arrive when the line is repaired."""
    if process := _worker(world, fault):
        world.network.hold(process.machine)
        world.trouble(process.machine, fault.size)
        world.later(fault.size, lambda: world.network.repair(process.machine))


async def _restart(world: World, fault: Fault) -> None:
    """Stop the server, and start it again with all that it had."""
    if world.server.up:
        world.server.stop()
        world.later(fault.size, world.server.start)


async def _lose_tail(world: World, fault: Fault) -> None:
    """Restart the server without its last writes, as a power cut or a failover to a lagging replica does."""
    _lose_now(world, fault)


def _lose_now(world: World, fault: Fault) -> None:
    if world.server.up:
        if world.loop.now < world.server.lost_at + world.plan.longest_lease:  # the renewals since then may be lost, too
            world.doubt_leases(_RESTART)
        world.server.stop()
        world.later(_RESTART, lambda: world.server.start(losing=fault.size))


async def _step_clock(world: World, fault: Fault) -> None:
    """Set the clock of the server forward."""
    _step_now(world, fault)


def _step_now(world: World, fault: Fault) -> None:
    if fault.size < world.plan.longest_lease / 2:  # leases expire earlier by so much
        world.doubt_leases()
    left = lease_change_left(world)
    if 0 < left < fault.size + REREAD:  # a worker may not have read the new lease when the change ends
        world.doubt_leases(REREAD)
    world.server.offset += fault.size


async def _step_clock_back(world: World, fault: Fault) -> None:
    """Set the clock of the server back."""
    world.server.offset -= fault.size
    world.set_back += fault.size


async def _flush_scripts(world: World, fault: Fault) -> None:
    """Let the server forget its scripts."""
    world.server.flush_scripts()


async def _full(world: World, fault: Fault) -> None:
    """Let the server refuse writes that need memory."""
    world.server.full = True
    world.later(fault.size, lambda: setattr(world.server, "full", False))


async def _pause_server(world: World, fault: Fault) -> None:
    """Let the server stand still."""
    world.server.machine.frozen = True
    world.later(fault.size, lambda: setattr(world.server.machine, "frozen", False))


async def _newcomer(world: World, fault: Fault) -> None:
    """Start one more worker."""
    world.start_worker()


async def _cancel(world: World, fault: Fault) -> None:
    """Cancel a task that was enqueued."""
    names = sorted(world.handles)
    if not names:
        return
    _cancel_now(world, world.handles[names[fault.target % len(names)]])


def _cancel_now(world: World, handle: TaskHandle[Any]) -> None:
    async def cancel() -> None:
        world.cancelled.add(handle.id)
        try:
            await handle.cancel()
        except QueueError as error:
            world.tell(f"cancelling {handle.id}: {error}")

    world.on_producer(cancel)


def _cancel_at(world: World, fault: Fault, line: Connection, data: bytes) -> None:
    """Cancel the task of the command."""
    line.deliver(data)
    found = _TASK.search(data)
    handle = world.handles.get(found[1].decode()) if found else None
    if handle is not None:
        _cancel_now(world, handle)


async def _replay(world: World, fault: Fault) -> None:
    """Replay a dead letter, once there is one."""

    async def replay_one() -> None:
        producer = world.producer
        if producer is None:
            return
        try:
            partitions = await queue_partitions(producer.gateway, producer.namespace, "sim")
            letters = [letter async for letter in list_letters(producer.gateway, partitions, Filter())]
            if letters:
                letter, fresh = letters[fault.target % len(letters)], fault.target % 2 == 0
                world.replays[letter.id] += 1
                if fresh:
                    world.journal.write("fresh", letter.id)
                await replay(producer.gateway, letter, Replay(fresh=fresh))
        except QueueError as error:
            world.tell(f"replaying: {error}")

    world.on_producer(replay_one)


async def _fork(world: World, fault: Fault) -> None:
    """Fork a task, from what it has recorded so far."""
    apart = {*LISTENING, *WAITING, *PARENTS}
    names = sorted(task.id for task in world.plan.tasks if task.id in world.handles and task.kind not in apart)
    producer = world.producer
    if not names or producer is None:
        return
    name = names[fault.target % len(names)]

    async def fork_one() -> None:
        world.forks += 1
        try:
            await fork(producer, name, new_id=f"fork{world.forks}")
        except PerdureError as error:
            world.tell(f"forking {name}: {error}")

    world.on_producer(fork_one)


async def _message(world: World, fault: Fault) -> None:
    """Send a message to a task, whether or not it waits for one."""
    names = sorted(task.id for task in world.plan.tasks if task.id in world.handles and task.kind not in LISTENING)
    if not names:
        return
    handle = world.handles[names[fault.target % len(names)]]

    async def send() -> None:
        try:
            await handle.send("by the way", sender="producer")
        except QueueError as error:
            world.tell(f"sending to {handle.id}: {error}")

    world.on_producer(send)


async def _garbage(world: World, fault: Fault) -> None:
    """Put a message on a ready stream that is no task."""
    producer = world.producer
    if producer is None:
        return

    async def add() -> None:
        try:
            (partition,) = await queue_partitions(producer.gateway, producer.namespace, "sim")
            await producer.gateway.command("XADD", partition.ready, "*", "env", "garbage", repeatable=False)
        except QueueError as error:
            world.tell(f"adding a message: {error}")

    world.on_producer(add)


def _cut_at(world: World, fault: Fault, line: Connection, data: bytes) -> None:
    """Let the server execute the command, and break the connection before its reply."""
    line.deliver(data)
    line.cut()


def _late_at(world: World, fault: Fault, line: Connection, data: bytes) -> None:
    """Break the connection; the command arrives later."""
    line.cut(late=fault.size, data=data)


def _kill_at(world: World, fault: Fault, line: Connection, data: bytes) -> None:
    """Let the server execute the command, and kill its sender."""
    line.deliver(data)
    world.kill(line.machine, fault.size)


def _freeze_at(world: World, fault: Fault, line: Connection, data: bytes) -> None:
    """Let the server execute the command, and stop its sender."""
    line.deliver(data)
    world.trouble(line.machine, fault.size)
    line.machine.frozen = True
    world.later(fault.size, lambda: world.thaw(line.machine))


def _lose_tail_at(world: World, fault: Fault, line: Connection, data: bytes) -> None:
    """Restart the server without its last writes, soon after it has confirmed the command."""
    line.deliver(data)
    world.later(_CONFIRMED, lambda: _lose_now(world, fault))


def _step_clock_at(world: World, fault: Fault, line: Connection, data: bytes) -> None:
    """Set the clock of the server forward just before it executes the command."""
    _step_now(world, fault)
    line.deliver(data)


_AIMED: Final[dict[str, Callable[[World, Fault, Connection, bytes], None]]] = {
    "cut": _cut_at,
    "late": _late_at,
    "kill": _kill_at,
    "freeze": _freeze_at,
    "lose tail": _lose_tail_at,
    "step clock": _step_clock_at,
    "cancel": _cancel_at,
}
assert _AIMED.keys() == AIMED


def strike(world: World, fault: Fault) -> Awaitable[None]:
    """Let a fault occur: now, or with the next command of a worker that it is aimed at."""
    if not fault.on:
        note_trouble(world, fault)
    return FAULT_TYPES[fault.kind](world, fault) if not fault.on else _aim(world, fault)


async def _aim(world: World, fault: Fault) -> None:
    digest = next((script.sha for script in loaded_scripts() if script.name == fault.on), fault.on)

    def act(line: Connection, data: bytes) -> bool:
        if fault.on in PRODUCER_COMMANDS:
            meant = world.is_producer(line.machine)
        elif fault.on in SUPERVISOR_COMMANDS:
            meant = world.is_supervisor(line.machine)
        else:
            meant = world.is_worker(line.machine)
        if not meant or not world.server.up:
            return False
        world.tell(f"with {fault.on}: {fault.kind}")
        note_trouble(world, fault)
        world.struck = world.loop.now
        world.on(world.main, lambda: world.trouble(line.machine))
        _AIMED[fault.kind](world, fault, line, data)
        return True

    world.network.traps.append((digest.encode(), act))


FAULT_TYPES: Final[dict[str, Callable[[World, Fault], Awaitable[None]]]] = {
    "kill": _kill,
    "freeze": _freeze,
    "block": _block,
    "stop": _stop,
    "cut": _cut,
    "late": _late,
    "deaf": _deaf,
    "hold": _hold,
    "restart": _restart,
    "lose tail": _lose_tail,
    "step clock": _step_clock,
    "step clock back": _step_clock_back,
    "full": _full,
    "flush scripts": _flush_scripts,
    "pause server": _pause_server,
    "newcomer": _newcomer,
    "cancel": _cancel,
    "replay": _replay,
    "fork": _fork,
    "message": _message,
    "garbage": _garbage,
    "set lease": set_lease,
    "reshard": reshard,
    "deploy": deploy,
    "kill caller": kill_caller,
    "kill page": kill_page,
    "kill supervisor": kill_supervisor,
    "kill host": kill_host,
    "freeze supervisor": freeze_supervisor,
    "stop supervisor": stop_supervisor,
    "reload": reload,
}
assert FAULT_TYPES.keys() == FAULTS.keys()
