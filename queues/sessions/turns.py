"""The steps of the protocol between a session and the tasks of its turns."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import orjson

from ..derived_tasks import MOST_HAND_OFFS
from ..enqueueing import BatchEnqueuer
from ..envelope import DEFAULT_PAYLOAD_LIMIT, EnvelopeTemplate, Options, TaskMessage, check_size, new_task_id
from ..inspection import find_task
from ..json_form import as_json, encodable
from ..junk import set_aside, split
from ..keys import Namespace
from ..partitions import PartitionRouter
from ..records import Record, State, read_record
from ..security import MESSAGE, RESULT, SecretPaths, arguments_field, inputs_field
from ..transport import Argument, Gateway, LargeValue, queue_script
from .address import SessionAddress, TurnId, is_digest
from .errors import SessionFailed, SessionFull, SessionOfOtherApp, TurnEarly, TurnRefused
from .record import (
    NOTE_SENDER,
    STATE,
    WORKSPACE,
    SessionCorrection,
    answer_field,
    decode_corrections,
    decode_message,
)

__all__ = [
    "SessionTurnEnd",
    "TurnStart",
    "begin_turn",
    "check_session",
    "due_sessions",
    "end_turn",
    "enqueue_turn",
    "send_to_session",
]

_SEND = queue_script("session_send")
_BEGIN = queue_script("session_begin")
_END = queue_script("session_end")
_LOOK = queue_script("session_look")

MOST_WAITING: Final = 1000
"""Messages of a session that wait for their turn."""

MOST_IDS: Final = 100
"""Message ids that a session remembers, those of its last messages."""

MOST_TURNS: Final = 10_000
"""Most turns in the history of a session; up to some 100 more, since Redis trims whole nodes of a stream."""

_TURN_TTL: Final = 86_400.0
"""Seconds for which the record of a turn's task is kept. The session has its message, answer and state."""

_PAGE: Final = 100
"""Sessions of a partition that are looked at in one round."""


async def send_to_session(
    gateway: Gateway,
    namespace: Namespace,
    agent: str,
    session_id: str,
    text: str,
    *,
    queue: str,
    app: str | None = None,
    aliases: Collection[str] = (),
    sender: str = "",
    message_id: str | None = None,
    inputs: tuple[bytes, SecretPaths] | None = None,
    headers: Mapping[str, str] | None = None,
    skip_failed: bool = False,
    limit: int = DEFAULT_PAYLOAD_LIMIT,
) -> TurnId:
    """Add a message to a session, and store the task of its turn if no other turn runs; return the turn.

    Args:
        queue: Queue of the agent.
        app: App whose workers run the turns; None for the app of the messages before, or for any.
        aliases: Former names of the app.
        message_id: A message that is sent again under the same id is stored once.
        inputs: JSON object of the inputs of the agent without its goal, and the paths of its secrets; None to keep
            those of the message before.
        headers: Headers of the task of its turn.
        skip_failed: Pass over a turn that is a dead letter.
        limit: Largest size of message, headers and inputs in bytes.

    Raises:
        SessionFailed: A turn is a dead letter; the message was not stored.
        SessionOfOtherApp: The session belongs to another app.
        SessionFull: Too many messages wait.
        PayloadTooLarge: The message is too large.
    """
    if not isinstance(text, str):
        raise TypeError(f"a message to a session must be a string, got {text!r}")
    if sender.startswith("~"):
        raise ValueError(f"sender must not start with '~', got {sender!r}")
    address, cipher = (found := SessionAddress.of(namespace, agent, session_id)), found.cipher(gateway)
    text = encodable(text)
    data = as_json({"sender": sender, "content": text, **({"headers": dict(headers)} if headers else {})})
    given, secrets = inputs or (b"", ())
    check_size("the message and the inputs", len(data) + len(given), limit)
    digest = hashlib.blake2b((message_id or new_task_id()).encode(), digest_size=12).hexdigest()
    args: list[Argument] = [
        agent,
        session_id,
        queue,
        cipher.encrypt(inputs_field(secrets), given) if given else b"",
        orjson.dumps(secrets),
        MOST_IDS,
    ]
    message, passed = cipher.encrypt(MESSAGE, data), ""
    while True:
        answer, *rest = await gateway.run(
            _SEND, address.keys, [address.digest, digest, message, MOST_WAITING, passed, *args, app or ""]
        )
        if answer == b"app":
            if (owner := rest[0].decode()) not in aliases:
                raise SessionOfOtherApp(f"{session_id!r} of agent {agent!r}", owner, app or "")
            app = owner
            continue
        if answer == b"full":
            raise SessionFull(f"{session_id!r} of agent {agent!r}", int(rest[0]))
        if answer == b"sent":
            break
        turn, reason, born = int(rest[0]), rest[1].decode(), rest[2].decode()
        if not skip_failed:
            failed = str(TurnId(address.digest, born, turn))
            raise SessionFailed(f"{session_id!r} of agent {agent!r}", turn, failed, reason)
        passed = str(turn)
    number, turn, ended, born = int(rest[0]), int(rest[1]), int(rest[2]), rest[3].decode()
    if ended < turn <= number:
        # The turn of this message, or of one before it whose sender may have died: it is stored at most once.
        await enqueue_turn(gateway, address, TurnId(address.digest, born, turn))
    return TurnId(address.digest, born, number)


async def enqueue_turn(gateway: Gateway, address: SessionAddress, turn: TurnId) -> None:
    """Store the task of a claimed turn, unless the turn has ended or failed. Idempotent while its record exists."""
    fields = ("born", "turn", "ended", "failed", "agent", "id", "queue", "app", "inputs", "secrets", f"m:{turn.number}")
    born, claimed, ended, failed, *rest = await gateway.command("HMGET", address.session, *fields)
    if failed is not None or [born, claimed] != [turn.born.encode(), b"%d" % turn.number] or claimed == ended:
        return
    agent, session_id, queue, app, inputs, secrets, stored = rest
    cipher, name = address.cipher(gateway), agent.decode()
    message = decode_message(cipher, stored)
    marks: SecretPaths = tuple(map(tuple, orjson.loads(secrets or b"[]")))
    known = {} if inputs is None else orjson.loads(cipher.decrypt(inputs_field(marks), inputs))
    arguments = orjson.dumps({**known, "goal": message.content})
    headers = {**message.headers, "session": session_id.decode()}
    owner = None if app is None else app.decode()
    template = EnvelopeTemplate(name, headers, Options(result_ttl=_TURN_TTL), app=owner)
    task = template.message(arguments, marks, task_id=str(turn))
    await _store(gateway, Namespace(address.partition.namespace), queue.decode(), name, marks, task)


async def _store(
    gateway: Gateway, namespace: Namespace, queue: str, task: str, secrets: SecretPaths, message: TaskMessage
) -> None:
    task_cipher = gateway.encryptor.of(namespace.partition(queue), message.id)
    message = message._replace(arguments=task_cipher.encrypt(arguments_field(task, secrets), message.arguments))
    await BatchEnqueuer(gateway, PartitionRouter(gateway, namespace, queue), 0.0).one(message)


@dataclass(frozen=True, slots=True)
class TurnStart:
    """The start of a turn: message, state, and when the turn was claimed.

    Attributes:
        sender: Name of the sender of the message.
        note: Whether the message is the note that a commitment fell due.
        state: State that the turns before left, as it was stored; None in the first turn.
        workspace: Link of the files that they left, None if there are none.
        claimed: Time at which the turn was claimed (ms).
        corrections: Corrections of the state that came while no turn ran, in order.
    """

    text: str
    sender: str
    note: bool
    state: bytes | None
    claimed: int
    workspace: bytes | None = None
    corrections: Sequence[SessionCorrection] = ()


async def begin_turn(gateway: Gateway, address: SessionAddress, turn: TurnId, task_id: str) -> TurnStart:
    """Begin or resume the run of a turn. Idempotent. task_id: of the run's task.

    Raises:
        TurnRefused: The turn has ended or was passed over, or the session was forgotten.
        TurnEarly: The turn is not claimed any more.
        DecryptionError: State or message cannot be decrypted.
    """
    keys = [address.session, address.partition.due]
    answer, *rest = await gateway.run(_BEGIN, keys, [address.digest, turn.born, turn.number])
    if answer == b"missing":
        raise TurnRefused(task_id, "its session was forgotten")
    if answer == b"early":
        raise TurnEarly(str(turn), int(rest[0]))
    if answer == b"ended":
        raise TurnRefused(task_id, f"turn {turn.number} of its session has ended or was passed over")
    stored, state, claimed, workspace, corrections = rest
    cipher = address.cipher(gateway)
    _, sender, text, _ = decode_message(cipher, stored)
    opened = cipher.decrypt(STATE, state) if state else None
    files = cipher.decrypt(WORKSPACE, workspace) if workspace else None
    return TurnStart(
        text,
        "" if sender == NOTE_SENDER else sender,
        sender == NOTE_SENDER,
        opened,
        int(claimed),
        files,
        decode_corrections(cipher, corrections),
    )


@dataclass(frozen=True, slots=True)
class SessionTurnEnd:
    """The end of a turn.

    Attributes:
        outcome: `failed` keeps the turn claimed, until it is replayed or passed over.
        value: Answer as JSON, or the reason.
        state: State to store; None to keep the one before.
        workspace: Link of the files to store; None to keep the one before.
        wake: Time (ms) at which a commitment falls due, and the note about it that a turn then gets.
    """

    outcome: Literal["answered", "cancelled", "failed"]
    value: bytes
    state: bytes | None = None
    wake: tuple[int, str] | None = None
    workspace: bytes | None = None


async def end_turn(
    gateway: Gateway, address: SessionAddress, turn: TurnId, end: SessionTurnEnd, *, keep_turns: int = MOST_TURNS
) -> bool:
    """End a turn, and store the task of the next one if a message waits. Idempotent.

    Args:
        keep_turns: Turns that stay in the history.

    Returns:
        False if the session was forgotten.

    Raises:
        TurnEarly: The turn is not claimed any more.
    """
    cipher = address.cipher(gateway)
    value = cipher.encrypt(answer_field(turn.number), end.value) if end.outcome == "answered" else end.value
    state = b"" if end.state is None else cipher.encrypt(STATE, end.state)
    wake_at, note = "", b""
    if end.wake is not None:
        wake_at = str(end.wake[0])
        note = cipher.encrypt(MESSAGE, as_json({"sender": NOTE_SENDER, "content": end.wake[1]}))
    args: list[Argument] = [
        address.digest,
        turn.born,
        turn.number,
        end.outcome,
        value,
        state,
        wake_at,
        note,
        keep_turns,
        b"" if end.workspace is None else cipher.encrypt(WORKSPACE, end.workspace),
    ]
    answer, *rest = await gateway.run(_END, address.keys, args)
    if answer == b"missing":
        return False
    if answer == b"early":
        raise TurnEarly(str(turn), int(rest[0]))
    claimed, ended = int(rest[0]), int(rest[1])
    if answer == b"ended" and claimed > ended:
        await enqueue_turn(gateway, address, TurnId(turn.digest, turn.born, claimed))
    return True


async def due_sessions(gateway: Gateway, namespace: Namespace) -> list[SessionAddress]:
    """Return sessions to look at: a turn was claimed some time ago, or a commitment has fallen due."""
    partitions = namespace.session_partitions
    seconds, fraction = await gateway.command("TIME", node_of=partitions[0].due)
    now = int(seconds) * 1000 + int(fraction) // 1000
    pages = await gateway.pipeline(
        [("ZRANGE", one.due, "-inf", now, "BYSCORE", "LIMIT", 0, _PAGE) for one in partitions]
    )
    due: list[SessionAddress] = []
    for partition, page in zip(partitions, pages, strict=True):
        digests, foreign = split(page, is_digest)
        await set_aside(gateway, partition, partition.due, "zset", foreign)
        due += [SessionAddress(partition, digest) for digest in digests]
    return due


LostEnd: TypeAlias = Callable[[TurnId, Record, str, bytes], Awaitable[SessionTurnEnd]]
"""Rebuilds the end of a turn that Redis has lost: from the record of its task, the name of the agent and the answer."""


async def check_session(gateway: Gateway, address: SessionAddress, lost_end: LostEnd | None = None) -> None:
    """Look at a session that is due: store the task of a claimed turn that has none, end the turn of an ended task.

    lost_end: rebuilds the end of a turn whose task has succeeded; None to keep the state of the turn before it.
    """
    found = await gateway.run(
        _LOOK, [address.session, address.partition.due, address.partition.timeline], [address.digest]
    )
    if not found:
        return
    turn = TurnId(address.digest, found[0].decode(), int(found[1]))
    record = await _last_record(gateway, Namespace(address.partition.namespace), str(turn))
    if record is None:
        await enqueue_turn(gateway, address, turn)
    elif record.state is State.DEAD:
        await end_turn(gateway, address, turn, SessionTurnEnd("failed", (record.reason or "unknown").encode()))
    elif record.state is State.CANCELLED:
        await end_turn(gateway, address, turn, SessionTurnEnd("cancelled", b"cancelled"))
    elif record.state is State.SUCCEEDED:  # a successor that is no agent of the session, or Redis has lost the end
        answer, end = _result(record), None
        if lost_end is not None:
            agent = await gateway.command("HGET", address.session, "agent") or b""
            end = await lost_end(turn, record, agent.decode(), answer)
        await end_turn(gateway, address, turn, end or SessionTurnEnd("answered", answer))


async def _last_record(gateway: Gateway, namespace: Namespace, task_id: str) -> Record | None:
    """Return the record of a task, or of its last successor."""
    record: Record | None = None
    for _ in range(MOST_HAND_OFFS):
        partition = await find_task(gateway, namespace, task_id)
        found = None if partition is None else await read_record(gateway, partition, task_id)
        if found is None or found.handed_to is None:
            return found or record
        record, task_id = found, found.handed_to
    return record


def _result(record: Record) -> bytes:
    data = b"null" if record.result is None else record.cipher.decrypt(RESULT, record.result)
    return b"null" if LargeValue.decode(data) is not None else data
