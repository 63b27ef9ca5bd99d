"""Worker processes that are cut off at a write, inside this process, as `kill -9` would cut them off there.

A process that was cut off does nothing more: its commands reach no server, no reply reaches it, and its loop ends. Its
leases are then expired by hand, so that the next worker claims what it left without waiting.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, Final, Literal, NamedTuple
from unittest.mock import patch

from redis.exceptions import ConnectionError as ConnectionLost

from ...queues.errors import Refused
from ...queues.joins import sweep_notices
from ...queues.keys import GROUP, Partition
from ...queues.transport.gateway import Gateway
from ...queues.transport.pipelining import Command, PipelinedConnection
from ...queues.transport.scripts import queue_scripts

WRITES: Final = frozenset(
    (
        "add_children",
        "ask_for_budget",
        "bury",
        "charge_budget",
        "claim_token",
        "close_join",
        "confirm_launch",
        "enqueue",
        "enqueue_child",
        "enqueue_one",
        "enqueue_successor",
        "finish",
        "notice_sent",
        "notify_join",
        "park",
        "raise_budget",
        "release",
        "reschedule",
        "send_message",
        "update_value",
        "watch",
        "write_checkpoint",
    )
)
"""Scripts with which a run writes."""

IS_DEAD: ContextVar[Callable[[], bool]] = ContextVar("perdure_is_dead", default=lambda: False)
"""Returns whether the process of the code that runs here was cut off, so that what it still does never happened."""

Cut = Literal["before", "after", "reply"]
"""Place at which a process is cut off: before a write reaches the server, or when it is done and its reply is not read
yet. With `reply`, the reply alone is lost, and the process continues."""

_EXPIRED: Final = 3_600_000
"""Milliseconds of idle time after which every lease has expired."""

_Submit = Callable[[PipelinedConnection, Command], "asyncio.Future[Any]"]


class RunWrite(NamedTuple):
    """A write of a process: its number from 1, the name of its script and its command."""

    number: int
    script: str
    command: Command

    def entries(self) -> Iterator[tuple[str, str]]:
        """Yield kind and step of each entry of a write into the checkpoint; nothing for other scripts."""
        if self.script == "write_checkpoint":
            given = self.command[
                3 + int(self.command[2]) + 6 :
            ]  # after the keys, the fence, the first number and the head
            for at in range(0, len(given), 4):
                yield _text(given[at]), _text(given[at + 1])

    def __str__(self) -> str:
        shown = [f"records {_record(step)}" for kind, step in self.entries() if kind in ("done", "mark")]
        shown += [f"logs {step}" for kind, step in self.entries() if kind in ("event", "base")]
        return ", ".join(shown) or _WORDS.get(self.script, self.script)


_WORDS: Final = {
    "bury": "stores the dead letter",
    "enqueue": "enqueues tasks",
    "enqueue_child": "enqueues a child",
    "enqueue_one": "enqueues a task",
    "finish": "stores the result",
    "park": "parks the task",
    "release": "puts the task back",
    "reschedule": "schedules a retry",
    "send_message": "sends a message",
    "write_checkpoint": "writes the checkpoint",
}


def _record(step: str) -> str:
    """Return what a record is of, in words: those of the runtime begin with #."""
    return f"the {step[1:].replace(':', ' ', 1)}" if step.startswith("#") else f"step {step!r}"


class CutOffProcess:
    """One worker process, whose loop ends when it is cut off.

    Attributes:
        writes: writes so far, those of processes before included.
        dead: whether it was cut off.
        held: the write that did not reach the server.
    """

    def __init__(
        self,
        choose: Callable[[RunWrite], Cut | None],
        *,
        writes: int = 0,
        bound: float = 60.0,
        dies: Callable[[], None] | None = None,
    ) -> None:
        """Create the process.

        Args:
            choose: says at each write whether it is cut off there.
            writes: how many there were before.
            bound: seconds that it may work.
            dies: ends the process; by default it is only cut off.
        """
        self.writes = writes
        self.dead = self._cleaning = False
        self.held: Command | None = None
        self._choose = choose
        self._bound = bound
        self._dies = dies
        self._died = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lost: list[asyncio.Future[Any]] = []
        self._names = {script.sha: script.name for script in queue_scripts()}

    def run(self, main: Callable[[], Awaitable[Any]]) -> None:
        """Run an async function in a loop of its own, until it ends or the process is cut off.

        Raises `TimeoutError` if it does neither in time, and what the function raises.
        """
        asyncio.run(self._run(main))

    async def _run(self, main: Callable[[], Awaitable[Any]]) -> None:
        IS_DEAD.set(lambda: self.dead)
        self._loop = asyncio.get_running_loop()
        submit = PipelinedConnection.submit

        def submitting(connection: PipelinedConnection, command: Command) -> asyncio.Future[Any]:
            if asyncio.get_running_loop() is not self._loop:  # of a client that is not in this process
                return submit(connection, command)
            return self._submit(connection, command, submit)

        with patch.object(PipelinedConnection, "submit", submitting):
            working, dying = asyncio.ensure_future(main()), asyncio.ensure_future(self._died.wait())
            await asyncio.wait((working, dying), timeout=self._bound, return_when=asyncio.FIRST_COMPLETED)
            dying.cancel()
            if self.dead:
                self._cleaning = True
                for lost in self._lost:  # no shutdown waits for a reply
                    if not lost.done():
                        lost.set_exception(Refused("the process is dead"))
                self._loop.set_exception_handler(lambda *_: None)
                working.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await working
                return
            if not working.done():
                working.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await working
                raise TimeoutError(f"the worker did not end within {self._bound:g} s")
            await working

    def _die(self) -> None:
        if self._dies is not None:
            self._dies()
        self.dead = True
        self._died.set()

    def _submit(self, connection: PipelinedConnection, command: Command, submit: _Submit) -> asyncio.Future[Any]:
        if self.dead:
            lost = self._without_reply()
            if self._cleaning:
                lost.set_exception(Refused("the process is dead"))
            return lost
        script = self._names.get(_text(command[1])) if command[0] == "EVALSHA" else None
        if script not in WRITES:
            return submit(connection, command)
        self.writes += 1
        cut = self._choose(RunWrite(self.writes, script, command))
        if cut is None:
            return submit(connection, command)
        if cut == "before":
            self.held = command
            self._die()
            return self._without_reply()
        sent = submit(connection, command)
        if cut == "reply":
            lost = asyncio.get_running_loop().create_future()
            sent.add_done_callback(lambda _: _lose(lost))
            return lost
        sent.add_done_callback(lambda done: None if done.cancelled() or done.exception() else self._die())
        connection.flush()
        return self._without_reply()

    def _without_reply(self) -> asyncio.Future[Any]:
        """Return the reply of a command of a dead process, which does not come."""
        lost: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._lost.append(lost)
        return lost


def _text(argument: object) -> str:
    return argument.decode("utf-8", "replace") if isinstance(argument, bytes) else str(argument)


def _lose(reply: asyncio.Future[Any]) -> None:
    if not reply.done():
        reply.set_exception(ConnectionLost("the reply is lost"))


async def expire_leases(gateway: Gateway, partitions: Sequence[Partition]) -> None:
    """Let the leases of all deliveries of these partitions expire, as if time had passed."""
    for partition in partitions:
        ready = partition.ready
        if not await gateway.command("EXISTS", ready):
            continue
        for entry, consumer, *_ in await gateway.command("XPENDING", ready, GROUP, "-", "+", 1000):
            await gateway.command("XCLAIM", ready, GROUP, consumer, 0, entry, "IDLE", _EXPIRED, "JUSTID")


async def deliver_notices(gateway: Gateway, partition: Partition) -> None:
    """Do what a dead process has left of joins, as if time had passed: notify parents, and launch children."""
    for key in (partition.outbox, partition.joins):
        for member in await gateway.command("ZRANGE", key, 0, -1):
            await gateway.command("ZADD", key, "XX", 0, member)
    await sweep_notices(gateway, partition, retention=3600.0)
