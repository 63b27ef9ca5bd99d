"""A run of a task that is a turn of a session: the state that it starts from, and what it leaves."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Container
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, Generic, TypeVar

import orjson

from ...queues.errors import TurnEarly, TurnRefused
from ...queues.inbox import send_correction
from ...queues.inspection.views import checkpoint_fields, find_task
from ...queues.keys import Namespace
from ...queues.lanes import NORMAL
from ...queues.records import Record
from ...queues.sessions.record import SessionAddress, TurnId, parse_turn_id
from ...queues.sessions.turns import SessionTurnEnd, begin_turn, end_turn
from ...queues.transport.backoff import retry_while_unavailable
from ...queues.transport.gateway import Gateway
from ...queues.wording import shown_time
from ..durable.journal.chat import FROM_INBOX, Message
from ..durable.journal.quoting import quoted_line, quoted_name
from ..durable.journal.step_record import WORKSPACE
from ..durable.run import Run
from ..durable.steps.codec import codec_of
from ..errors import Snooze, StateError
from ..log import log_wait, logger
from ..workspace.task_workspace import restore_workspace, workspace_link
from .agent import Agent, S
from .journal.history import state_at
from .journal.snapshot import decode_snapshot, encode_snapshot
from .journal.state import Commitment
from .state_type import StateType

_OF_A_TURN: Final = frozenset({"goal", "plan", "current", "results", "waiting_for", "archive"})
"""Fields of the state that start with their defaults in each turn: they belong to the work on one message."""


_PATIENCE: Final = 3600.0
"""Seconds for which a task waits for its lost claim, after it was stored."""

_CLAIM_INTERVAL: Final = 1.0
"""Seconds after which such a task looks again."""

R = TypeVar("R")


class Carried(Generic[S]):
    """The state that earlier turns of a session left, and the message of this turn."""

    def __init__(self, task_id: str, state_type: StateType[S], stored: dict[str, Any], message: Message) -> None:
        self._task_id = task_id
        self._state_type = state_type
        self._stored = stored
        self._message = message

    @property
    def goal(self) -> str:
        """The text of the message. The task may have another one, if a failover lost that and this took its number."""
        return self._message.content

    @property
    def turn(self) -> Message:
        """The message without its text, which the event of the start has as the goal."""
        return self._message.model_copy(update={"content": ""})

    def apply(self, state: S) -> None:
        """Set the fields of a new state; the event of the start adds the message. Raises `StateMismatch`."""
        names = self._state_type.fields.keys() - self._state_type.ephemeral - _OF_A_TURN
        carried = {name: value for name, value in self._stored.items() if name in names}
        for name in ("decisions", "discoveries", "messages"):  # their events are in the logs of other tasks
            if name in carried:
                carried[name] = [{**one, "n": 0} for one in carried[name]]
        self._state_type.assign(self._task_id, state, carried)


class SessionTurn(Generic[S]):
    """The turn that a run is the task of.

    Attributes:
        is_own: whether the agent is that of the session. Another one, as which it continued, answers the message, and
            has a state of its own: that of the session stays as it was.
    """

    def __init__(self, run: Run, turn: TurnId, agent: Agent[S], state_type: StateType[S]) -> None:
        self._run = run
        self._turn = turn
        self._agent = agent
        self._state_type = state_type
        self._namespace = Namespace(run.delivery.partition.namespace)
        self._address = SessionAddress.at(self._namespace, turn.digest)
        self._wait = log_wait(f"task {run.id}", run.touch)
        self._claimed = 0
        session_id = run.envelope.headers.get("session", "")
        own = SessionAddress.of(self._namespace, state_type.agent, session_id).digest if session_id else turn.digest
        self.is_own = own == turn.digest

    @classmethod
    def of(cls, run: Run, agent: Agent[S], state_type: StateType[S]) -> SessionTurn[S] | None:
        """Return the turn of a run; None for a task that is not a turn of a session."""
        turn = parse_turn_id(run.id)
        return None if turn is None else cls(run, turn, agent, state_type)

    async def begin(self) -> Carried[S] | None:
        """Return what the turn starts from, None for another agent, after the files of earlier turns are restored.

        Corrections that the session has stored are put into the inbox of the task, under their ids, so each once.

        Raises `TurnRefused`, `Snooze`, `DecryptionError`, `BadSnapshot` if this version cannot read the state, and
        `WorkspaceError` and `ArtifactError`.
        """
        run = self._run
        start = await self._claimed_turn(lambda: begin_turn(run.gateway, self._address, self._turn, run.id))
        self._claimed = start.claimed
        stored: dict[str, Any] = {}
        if self.is_own and start.state is not None:
            stored = decode_snapshot(run.id, start.state, owner=self._state_type.agent).state
        if start.workspace is not None:
            await restore_workspace(run, start.workspace)
        if not self.is_own:
            return None
        for one in start.corrections:
            options: dict[str, Any] = {"sender": one.by, "message_id": one.id, "limit": sys.maxsize, "passes_on": True}
            store = partial(send_correction, run.gateway, run.delivery.partition, run.id, one.changes, **options)
            sent = await retry_while_unavailable(store, on_wait=self._wait)
            run.history.mail = max(run.history.mail, sent.number)
        sender = FROM_INBOX if start.note else start.sender
        message = Message(role="user", content=start.text, name=sender or None)
        return Carried(run.id, self._state_type, stored, message)

    async def end(self, state: dict[str, Any] | None, result: Any) -> None:
        """Store answer, state and the link of the files in the session. A repeated end changes nothing.

        state: None to keep that of the turn before.

        Raises `TurnRefused`, `Snooze`.
        """
        run = self._run
        answer, _ = codec_of(self._agent.finish).encode("method", "finish", result)
        data = wake = None
        if state is not None:
            data = _left(state, answer, self._turn, self._state_type.agent)
            # A run that only repeats the end does not begin the turn; the task is stored when the turn is claimed.
            wake = _wake(state, self._claimed or self._stored) if self._agent.wake_when_due else None
        end = SessionTurnEnd("answered", answer, data, wake, workspace_link(run), run.delivery.partition.lane)
        keep = run.settings.session_turns
        store = partial(end_turn, run.gateway, self._address, self._turn, end, keep_turns=keep)
        if not await self._claimed_turn(store):
            logger.bind(task=run.envelope.task, id=run.id).warning("the session of the turn was forgotten meanwhile")

    async def _claimed_turn(self, act: Callable[[], Awaitable[R]]) -> R:
        """Act on the turn. If Redis has lost its claim, let the task wait until it is claimed again."""
        run = self._run
        try:
            return await retry_while_unavailable(act, on_wait=self._wait)
        except TurnEarly as early:
            if early.now - self._stored > _PATIENCE * 1000:
                raise TurnRefused(run.id, "Redis has lost its claim") from early
            logger.bind(task=run.envelope.task, id=run.id).warning("{}", early)
            raise Snooze(_CLAIM_INTERVAL) from early

    @property
    def _stored(self) -> int:
        """Time at which the task was stored (ms)."""
        return self._run.history.enqueued or int(self._run.delivery.entry.partition(b"-")[0])


def _left(state: dict[str, Any], answer: bytes, turn: TurnId, agent: str) -> bytes:
    """Return what a turn leaves to the next one, from its last state and its answer."""
    value = orjson.loads(answer)
    text = value if isinstance(value, str) else answer.decode()
    messages = list(state["messages"])
    if not (messages and messages[-1]["role"] == "assistant" and messages[-1]["content"] == text):
        messages.append(Message(role="assistant", content=text, n=0).model_dump(mode="json"))
    left = {name: value for name, value in state.items() if name not in _OF_A_TURN} | {"messages": messages}
    return encode_snapshot(left, turn.number, agent)


async def lost_end(
    gateway: Gateway,
    namespace: Namespace,
    waking: Container[str],
    turn: TurnId,
    record: Record,
    agent: str,
    answer: bytes,
) -> SessionTurnEnd:
    """Rebuild the end of a turn that Redis has lost while its task was settled, from the log of the task.

    waking: names of agents with `wake_when_due`.
    """
    partition = await find_task(gateway, namespace, record.id)
    state = workspace = wake = None
    if partition is not None and record.task == agent:
        try:
            past = await state_at(gateway, partition, record.id)
        except (StateError, ValueError) as error:
            logger.bind(task=agent, id=record.id).warning("could not rebuild the state of a turn: {}", error)
        else:
            state = _left(past.state, answer, turn, agent)
            if agent in waking and record.enqueued_at is not None:
                wake = _wake(past.state, record.enqueued_at)
            workspace = (await checkpoint_fields(gateway, partition, record.id, WORKSPACE)).get(WORKSPACE)
    lane = NORMAL if partition is None else partition.lane
    return SessionTurnEnd("answered", answer, state, wake, workspace, lane)


def _wake(state: dict[str, Any], began: int) -> tuple[int, str] | None:
    """Return when the next commitment falls due after the start of a turn (ms), and the note about it."""
    start = datetime.fromtimestamp(began / 1000, UTC)
    listed = [Commitment.model_validate(one) for one in state["commitments"]]
    open_ = [one for one in listed if not one.done and not one.wait]
    due = [(one.due, one) for one in open_ if one.due is not None and one.due > start]
    if not due:
        return None
    at, first = min(due, key=lambda one: one[0])
    return round(at.timestamp() * 1000), _note(first, at)


def _note(commitment: Commitment, at: datetime) -> str:
    """Return the note that a commitment has fallen due, in one line."""
    what, by, to = quoted_line(commitment.what), quoted_name(commitment.by), quoted_name(commitment.to or "me")
    return f"A commitment fell due at {shown_time(at.timestamp() * 1000)}: {what} (promised by {by} to {to})"
