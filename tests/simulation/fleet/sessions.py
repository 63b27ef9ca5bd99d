"""Sessions: callers that send messages to an agent, each until it is stored, and may be killed at any time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import anyio
import orjson
from perdure.queues import QueueError, Unavailable
from perdure.queues.keys import Namespace
from perdure.queues.sessions.record import SessionAddress, parse_turn_id
from perdure.worker.agents.journal.snapshot import decode_snapshot
from perdure.worker.session import Session, TurnHandle

from ..app import AGENT, NAMESPACE, Entry, make_app

if TYPE_CHECKING:
    from ..loop import Machine
    from ..plan import Fault
    from ..world import Process, World
    from .elements import SessionPlan

__all__ = ["Caller", "check_turn", "kill_caller"]

_PATIENCE: Final = 300.0
"""Seconds for which a caller waits for an answer."""

_RETRY: Final = 0.2
"""Seconds after which a message is sent again that may not be stored."""


class Caller:
    """A process that sends the messages of one session in order, and starts again after it was killed.

    Attributes:
        sent: Messages that are stored.
    """

    def __init__(self, world: World, plan: SessionPlan) -> None:
        self.plan = plan
        self.sent = 0
        self.machine: Machine | None = None
        self._world = world
        self._address = SessionAddress.of(Namespace(NAMESPACE), AGENT, plan.id)

    def start(self) -> None:
        """Start the process."""
        self.machine = self._world.spawn(f"caller of {self.plan.id}", self._run)

    def kill(self) -> None:
        """End the process as SIGKILL does."""
        if self.machine is not None:
            self._world.end_machine(self.machine)
            self.machine = None

    async def _run(self) -> None:
        await anyio.sleep(max(0.0, self._world.begin + self.plan.at - self._world.loop.now))
        while True:
            try:
                await self._talk()
                return
            except Unavailable as error:
                self._world.tell(f"the caller of {self.plan.id} starts again: {error}")

    async def _talk(self) -> None:
        """Send the messages that are not stored yet, and wait for the answer of the last one."""
        world, plan = self._world, self.plan
        app = make_app(world.journal, world.url, world.plan.worker(0))
        async with app:
            session = app.session(app.agents[AGENT], plan.id, steps=plan.steps, pause=plan.pause)
            while self.sent < plan.messages:
                turn = await self._send(session, plan.text(self.sent))
                self.sent += 1
                world.journal.write("sent", turn.task_id, value=plan.text(self.sent - 1))
                await anyio.sleep(plan.gap)
            try:
                turn = await self._send(session, plan.text(plan.messages - 1))  # again: it is stored once
                world.journal.write("answered", turn.task_id, value=await turn.result(timeout=_PATIENCE))
            except (QueueError, TimeoutError) as error:
                world.tell(f"waiting for the answer: {error}")

    async def _send(self, session: Session[Any], text: str) -> TurnHandle:
        while True:
            try:
                return await session.send(text, message_id=text)
            except QueueError as error:
                self._world.tell(f"sending {text!r}: {error}")
                await anyio.sleep(_RETRY)

    # what the server has

    @property
    def _fields(self) -> dict[bytes, bytes]:
        item = self._world.server.items.get(self._address.session.encode())
        return {} if item is None else item.value._values

    @property
    def is_busy(self) -> bool:
        """Return whether a message is not stored yet, or a turn has not ended."""
        fields = self._fields
        return self.sent < self.plan.messages or int(fields.get(b"ended", 0)) < int(fields.get(b"sent", 0))

    def check(self) -> None:
        """Check at the end that each message was answered once and in order, and that nothing is left behind."""
        add, fields, shown = self._world.checks.add, self._fields, self.plan.id
        kept = [plan for plan in map(self.plan.text, range(self.plan.messages)) if not self._world.checks.lost(plan)]
        item = self._world.server.items.get(self._address.history.encode())
        turns = [] if item is None else [dict(zip(pairs[::2], pairs[1::2], strict=True)) for _, pairs in item.value]
        texts = [_content(turn[b"message"]) for turn in turns]
        if self.is_busy:
            add("no progress", f"session {shown} has {fields!r}"[:600])
        elif [text for text in texts if text in kept] != kept:
            add("session", f"{shown} has the messages {texts}, not {kept}")
        elif unanswered := [text for text, turn in zip(texts, turns, strict=True) if b"answer" not in turn]:
            add("session", f"{shown} has no answer to {unanswered}: {turns[-1]!r}"[:600])
        elif turns:
            said = [(role, text) for text, turn in zip(texts, turns, strict=True) for role, text in _said(text, turn)]
            known = decode_snapshot(shown, fields[b"state"]).state["messages"]
            if [(one["role"], one["content"]) for one in known] != said:
                add("session", f"the state of {shown} has the messages {known}, its history {said}"[:900])
        left = [name for name in fields if name.startswith((b"m:", b"i:", b"failed", b"wake"))]
        due = self._world.server.items.get(self._address.partition.due.encode())
        if not self.is_busy and (left or (due is not None and self._address.digest.encode() in due.value)):
            add("leak", f"the idle session {shown} has {left}, or is due")

    def check_turn(self, number: int) -> None:
        """Check that no other turn runs while a turn executes a step."""
        fields = self._fields
        turn, ended = int(fields.get(b"turn", 0)), int(fields.get(b"ended", 0))
        if ended >= number or ((turn, ended) != (number, number - 1) and not self._world.server.lost):
            self._world.checks.add(
                "turns", f"turn {number} of {self.plan.id} runs: {turn} is claimed, {ended} has ended"
            )

    @property
    def digest(self) -> str:
        return self._address.digest


def _content(stored: bytes) -> str:
    return str(orjson.loads(stored.partition(b" ")[2])["content"])


def _said(text: str, turn: dict[bytes, bytes]) -> list[tuple[str, str]]:
    """Return a message and its answer, as the state has them."""
    answer = orjson.loads(turn[b"answer"])
    return [("user", text), ("assistant", answer if isinstance(answer, str) else turn[b"answer"].decode())]


def check_turn(world: World, process: Process, entry: Entry) -> None:
    """Check a step of a turn that a healthy worker executes."""
    if world.callers and (turn := parse_turn_id(entry.task)) is not None and world.is_healthy(process):
        for caller in world.callers:
            if caller.digest == turn.digest:
                caller.check_turn(turn.number)


async def kill_caller(world: World, fault: Fault) -> None:
    """Kill the caller of a session; it is started again after a while."""
    if world.callers:
        caller = world.callers[fault.target % len(world.callers)]
        if caller.machine is not None:
            caller.kill()
            world.later(fault.size, caller.start)
