"""One child: its process, what it has said, and how it ended.

The supervisor's end of the line to one child; the other end, and what is said, is worker/runtime/supervisor_link.py.

Waiting for whichever of several events comes first.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Self

import anyio
import orjson

from ...queues import ChildInfo
from ..runtime.supervisor_link import SUPERVISED, Role

__all__ = ["Child", "ChildPipe", "OnSaid", "how_it_ended", "wait_any"]

_LONGEST: Final = 1 << 20
"""Bytes of one line. A child that says more at once has gone mad, and is not listened to."""


class ChildPipe:
    """Two pipes. Saying and hearing never wait."""

    def __init__(self) -> None:
        self._on_said: Callable[[str, dict[str, Any]], None] = lambda what, told: None
        self._rest = b""
        child_reads, self._write = os.pipe()
        self._read, child_writes = os.pipe()
        self.theirs = (child_reads, child_writes)
        """The child's file descriptors: to be passed on, then `give_away`."""
        for own in (self._read, self._write):
            os.set_blocking(own, False)
        self._open = True

    def give_away(self) -> None:
        """The child has its ends, or there is none: close them here, so that its end can be noticed."""
        for descriptor in self.theirs:
            os.close(descriptor)

    def listen(self, on_said: Callable[[str, dict[str, Any]], None]) -> None:
        """on_said: hears each word of the child, with what it tells besides."""
        self._on_said = on_said
        asyncio.get_running_loop().add_reader(self._read, self.hear)

    def say(self, what: str) -> None:
        """A child that is gone hears nothing, and one that has not listened for long either."""
        with suppress(OSError):
            os.write(self._write, orjson.dumps({"say": what}) + b"\n")

    def hear(self) -> None:
        """Take what has been said since."""
        while True:
            try:
                data = os.read(self._read, 65_536)
            except BlockingIOError:
                return
            if not data:  # it has closed its end, which its death alone need not do: others may have inherited it
                asyncio.get_running_loop().remove_reader(self._read)
                return
            *lines, self._rest = (self._rest + data).split(b"\n")
            if len(self._rest) > _LONGEST:
                self._rest = b""
            for line in lines:
                self._take(line)

    def _take(self, line: bytes) -> None:
        try:
            told = orjson.loads(line)
            what = told.pop("say")
        except (ValueError, TypeError, AttributeError, KeyError):
            return  # the user's code has the descriptor too, and may write into it what it likes
        if isinstance(what, str):
            self._on_said(what, told)

    def close(self) -> None:
        if self._open:
            self._open = False
            asyncio.get_running_loop().remove_reader(self._read)
            os.close(self._read)
            os.close(self._write)


async def wait_any(*events: anyio.Event) -> None:
    """Return when one of them has happened."""
    async with anyio.create_task_group() as waiting:

        async def wait(event: anyio.Event) -> None:
            await event.wait()
            waiting.cancel_scope.cancel()

        for event in events:
            waiting.start_soon(wait, event)


OnSaid = Callable[["Child", str], None]
"""Called with each event of a child."""

_LAST_WORDS: Final = 2.0
"""Seconds that a stalled child has to write its stacks to the log."""


def how_it_ended(code: int) -> str:
    """An exit code as the operating system's own word: 'SIGKILL', 'exit code 1'."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


class Child:
    """A worker process. Events tell how far it has come: `loaded`, `ready`, `gone`, and `settled` when everything that
    follows from its end is done.
    """

    def __init__(self, role: Role, process: asyncio.subprocess.Process, line: ChildPipe, on_said: OnSaid) -> None:
        """on_said: hears each word of the child, once it has been taken note of here."""
        self.role: Role = role
        self.pid = process.pid
        self.code = 0
        """Once it is gone, its exit code; below zero, the signal that ended it."""
        self.loaded = anyio.Event()
        self.ready = anyio.Event()
        self.gone = anyio.Event()
        self.settled = anyio.Event()
        self.told: Mapping[str, Any] = {}
        self.worker = ""
        self.queues: tuple[str, ...] = ()
        self.doing: dict[str, str] = {}
        self.looking = True
        self.stops = 0
        self.outdated = False
        self.stalled = ""
        self.crashes = 0
        """Once it is settled, how many crashes there were within the window, its own included."""
        self.began = self.idle_since = time.monotonic()
        self.heard: float | None = None
        self.lag = 0.0
        self.health: Mapping[str, Any] = {}
        """What it said last of how it is."""
        self._on_said = on_said
        self._process = process
        self._line = line
        line.listen(self._hear)

    # its life

    @classmethod
    async def begin(cls, role: Role, command: Sequence[str], on_said: OnSaid) -> Self:
        """Start a process; `OSError` where the machine has no room for it.

        It leads a process group of its own: a terminal's Ctrl-C reaches the supervisor alone, who passes it on.
        """
        line = ChildPipe()
        read, write = line.theirs
        try:
            with anyio.CancelScope(shield=True):
                process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=asyncio.subprocess.DEVNULL,
                    pass_fds=line.theirs,
                    process_group=0,
                    env=os.environ | {SUPERVISED: f"{role}:{read}:{write}"},
                )
        except BaseException:
            line.close()
            raise
        finally:
            line.give_away()
        return cls(role, process, line, on_said)

    async def wait(self) -> None:
        """Return when the process has ended, and its last words are heard."""
        self.code = await self._process.wait()
        self._line.hear()
        self._line.close()
        self.gone.set()

    async def come_up(self) -> bool:
        """Wait until it works, or has ended before it did; returns whether it works."""
        await wait_any(self.ready, self.gone)
        return self.ready.is_set()

    @property
    def how(self) -> str:
        """How it ended, in words. Once it is gone."""
        return f"{self.stalled}, {how_it_ended(self.code)}" if self.stalled else how_it_ended(self.code)

    @property
    def crashed(self) -> bool:
        """Whether it ended otherwise than by coming to its end. Once it is gone."""
        return self.code != 0

    @property
    def counts(self) -> bool:
        """Whether its end counts against the supervisor: an ordinary child that worked, or that was killed before. One
        that says in its own words why it cannot start is merely tried again.
        """
        return self.crashed and self.role == "worker" and (self.ready.is_set() or self.code < 0)

    @property
    def busy(self) -> bool:
        """Whether it runs a suspect, as far as it has told."""
        return bool(self.doing)

    @property
    def quiet(self) -> bool:
        """Whether it runs no suspect and has found none to run."""
        return not self.doing and not self.looking

    @property
    def info(self) -> ChildInfo:
        if self.stops:
            state = "stopping"
        elif not self.ready.is_set():
            state = "starting"
        elif self.role == "isolated":
            state = "busy" if self.busy else "idle"
        else:
            state = "working"
        return ChildInfo(self.pid, self.role, state, self.worker)

    # what it is told

    def work(self) -> None:
        self._line.say("work")

    def isolate(self) -> None:
        self.looking = True
        self._line.say("isolate")

    def stop(self) -> None:
        """Stop gracefully; told twice, at once."""
        self.stops += 1
        self._line.say("stop")

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()

    async def abort(self, why: str) -> None:
        """End a child that does not answer: it writes its stacks to the log, and dies of that or soon after."""
        self.stalled = why
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGABRT)  # caught by faulthandler, which needs no interpreter for it
        with anyio.move_on_after(_LAST_WORDS):
            await self.gone.wait()
        if not self.gone.is_set():
            self.kill()

    def sweep_up(self) -> None:
        """Kill what a dead child's tasks had started and left behind: they are being run again elsewhere."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    # what it says

    def _hear(self, what: str, told: dict[str, Any]) -> None:
        with suppress(TypeError, ValueError):  # of another version, or not Perdure's word at all
            self._take(what, told)
            self._on_said(self, what)

    def _take(self, what: str, told: dict[str, Any]) -> None:
        match what:
            case "loaded":
                self.told = told
                self.loaded.set()
            case "ready":
                self.worker = str(told.get("worker", ""))
                self.queues = tuple(map(str, told.get("queues", ())))
                self.ready.set()
            case "alive":
                self.heard = time.monotonic()
                self.lag = float(told.get("lag") or 0.0)
                self.health = dict(told.get("health") or {})
            case "begins":
                self.doing[str(told.get("id"))] = ""
                self.looking = False
            case "step":
                self.doing[str(told.get("id"))] = str(told.get("step"))
            case "ends":
                self.doing.pop(str(told.get("id")), None)
                self.looking = True  # it looks for another one by itself
            case "idle":
                self.looking = False
            case _:
                pass
