"""Sessions of the run: conversations with an agent that remembers each message that it has heard."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any, Final

import anyio
from perdure import Agent, AgentState, App, Context, PlanStep, Producer, Retry, Unavailable
from perdure.queues import QueueError
from perdure.queues.errors import SessionFailed, SessionFull
from perdure.queues.sessions.record import list_sessions
from pydantic import Field

from .journal import JournalWriter
from .kinds import PATIENT

__all__ = ["LISTENER", "Speaker", "note_sessions", "register_listener", "sessions_settled"]

LISTENER: Final = "listener"
"""Name of the agent of all sessions."""

_SHARED: Final = 2
"""Number of sessions that all producers speak to."""

_MAX: Final = 1000
"""Sessions of a run: more than there are producers."""


class Heard(AgentState):
    """State of a session. heard: all messages so far."""

    heard: list[str] = Field(default_factory=list)


class Listener(Agent[Heard]):
    """Agent that puts each message into its state, and answers with the number of those that it has heard."""

    async def plan(self, ctx: Context, state: Heard) -> list[PlanStep]:
        return [PlanStep(key=key, title=key) for key in ("listen", "think")]

    async def act(self, ctx: Context, state: Heard, step: PlanStep) -> None:
        if step.key == "listen":
            state.heard.append(state.goal)
        await anyio.sleep(0.05)

    async def finish(self, ctx: Context, state: Heard) -> int:
        return len(state.heard)


def register_listener(app: App) -> Any:
    """Register the agent with an app; return its task."""
    retry = Retry(max_attempts=3, max_crashes=PATIENT, base=0.1, cap=1.0)
    return app.agent(Listener, name=LISTENER, queue="default", retry=retry)


class Speaker:
    """Sends messages to sessions, one after the other, each until it is stored."""

    def __init__(self, app: App, name: str, seed: int, journal: JournalWriter) -> None:
        """name: of the sender, which no other process has."""
        self._app = app
        self._agent = register_listener(app)
        self._name = name
        self._dice = random.Random(seed)
        self._journal = journal
        self._said = 0

    async def run(self) -> None:
        """Speak until cancelled."""
        async with self._app:
            while True:
                await asyncio.sleep(self._dice.expovariate(1.0))
                session = f"shared-{self._dice.randrange(_SHARED)}" if self._dice.random() < 0.5 else f"of-{self._name}"
                self._said += 1
                await self._say(session, f"{self._name}:{self._said}")

    async def _say(self, session: str, text: str) -> None:
        self._journal.write("says", session=session, text=text)
        while True:
            try:
                turn = await self._app.session(self._agent, session).send(text, sender=self._name, message_id=text)
            except (Unavailable, SessionFull):
                await asyncio.sleep(0.2)
            except SessionFailed as error:
                self._journal.write("session_failed", session=session, error=str(error)[:200])
                return
            else:
                self._journal.write("said", session=session, text=text, turn=turn.number)
                return


async def sessions_settled(producer: Producer, patience: float) -> bool:
    """Wait at most so many seconds until no turn runs or waits; return whether that happened."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        found, _ = await list_sessions(producer.gateway, producer.namespace, limit=_MAX)
        if all(one.status != "running" for one in found):
            return True
        await asyncio.sleep(0.3)
    return False


async def note_sessions(producer: Producer, journal: JournalWriter) -> None:
    """Write one line per session: its status, and what its agent has heard."""
    async with App("chaos", redis_url=producer.address.url, namespace=producer.namespace.name) as app:
        agent = register_listener(app)
        listed, _ = await list_sessions(producer.gateway, producer.namespace, limit=_MAX)
        for found in listed:
            try:
                heard, problem = (await app.session(agent, found.id).state()).heard, None
            except QueueError as error:
                heard, problem = [], str(error)[:200]
            journal.write(
                "session", session=found.id, status=found.status, turns=found.ended, heard=heard, problem=problem
            )
