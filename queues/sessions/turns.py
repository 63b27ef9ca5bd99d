"""The steps of the protocol between a session and the tasks of its turns.

Corrections of a session's state that wait for a turn.

A turn that runs has a task, whose inbox takes corrections. While none runs, the record of the session keeps them, the
next run of a turn puts them into that inbox when it begins, and the end of the turn removes them with the state that it
stores. A turn that fails or is cancelled stores no state, so they wait for its replay or the turn after it.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Final, Literal, NamedTuple, NoReturn, Self, TypeAlias

import orjson

from ..defaults import MAX_TURNS
from ..derived_tasks import MAX_HAND_OFFS
from ..enqueueing import BatchEnqueuer
from ..envelope import (
    DEFAULT_LARGE_LIMIT,
    DEFAULT_PAYLOAD_LIMIT,
    EnvelopeTemplate,
    Options,
    TaskMessage,
    check_size,
    new_task_id,
    plain_data,
)
from ..errors import (
    DecryptionError,
    KeyMissing,
    NoKey,
    SessionError,
    SessionFailed,
    SessionFull,
    SessionNotFound,
    TamperedData,
    TurnEarly,
    TurnRefused,
    WrongType,
)
from ..inspection.views import find_task
from ..json_form import as_json, encodable
from ..junk import count_of, report_once, set_aside, split
from ..keys import Namespace, Partition, check_name, with_tenant
from ..lanes import NORMAL, Lane
from ..partitions.router import PartitionRouter
from ..records import Record, State, read_record
from ..security.encryption import RESULT, TaskCipher, arguments_field, is_encrypted
from ..security.secret_arguments import SecretPaths
from ..transport.gateway import Gateway
from ..transport.large_values import LargeValue
from ..transport.pipelining import Argument
from ..transport.scripts import milliseconds, queue_script
from .record import (
    NOTE_SENDER,
    Basis,
    SessionAddress,
    SessionCorrection,
    SessionInputs,
    SessionRecord,
    StoredMessage,
    TurnId,
    answer_field,
    basis_field,
    corrections_field,
    corrections_serial,
    decode_basis,
    decode_corrections,
    decode_files,
    decode_message,
    decode_state,
    inputs_field,
    is_digest,
    is_session_of,
    message_field,
    parse_turn_id,
    state_field,
    workspace_field,
)
from .removal import forget_task, is_forgotten

_SEND = queue_script("session_send")
_BEGIN = queue_script("session_begin")
_END = queue_script("session_end")
_LOOK = queue_script("session_look")

MAX_WAITING: Final = 1000
"""Messages of a session that wait for their turn."""

WAITING_BYTES: Final = DEFAULT_LARGE_LIMIT
"""Largest size of these messages together, in bytes."""

MAX_IDS: Final = 100
"""Message ids that a session remembers, those of its last messages."""

_TURN_TTL: Final = 86_400.0
"""Seconds for which the record of a turn's task is kept. The session has its message, answer and state."""

_KEY_PATIENCE: Final = 3600.0
"""Seconds for which a turn waits for a process that has the key of its message."""

_PAGE: Final = 100
"""Sessions of a partition that are looked at in one round."""


async def send_to_session(
    gateway: Gateway,
    namespace: Namespace,
    agent: str,
    session_id: str,
    text: str,
    *,
    queue: str | None,
    lane: Lane = NORMAL,
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
        queue, lane: Queue of the agent, None for that of the message before, and its lane.
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
        SessionError: The session belongs to another app.
        SessionFull: Too many messages wait.
        SessionNotFound: There is no message before whose queue is meant.
        DecryptionError: A turn is to be passed over, and what the turns before it left cannot be read.
        NoKey: The data of the session is encrypted, and this process has no key.
        PayloadTooLarge: The message is too large.
    """
    if not isinstance(text, str):
        raise TypeError(f"a message to a session must be a string, got {text!r}")
    if sender.startswith("~"):
        raise ValueError(f"sender must not start with '~', got {sender!r}")
    address = SessionAddress.of(namespace, agent, session_id)
    session_id = with_tenant(namespace.tenant, session_id)
    fields: dict[str, object] = {"sender": sender, "content": encodable(text)}
    fields |= {"headers": dict(headers)} if headers else {}
    fields |= {} if lane == NORMAL else {"lane": lane}
    fields |= {} if queue is None else {"queue": queue}
    given = b"" if inputs is None else b"[%b,%b]" % (inputs[0], orjson.dumps(inputs[1]))
    fields |= {"inputs": True} if given else {}
    check_size("the message and the inputs", len(as_json(fields)) + len(given), limit)
    digest = hashlib.blake2b((message_id or new_task_id()).encode(), digest_size=12).hexdigest()
    place, passed = await _next_place(gateway, address), ""
    while True:
        if place.first and queue is None:
            raise SessionNotFound(f"{session_id!r} of agent {agent!r}")
        cipher = address.cipher(gateway, place.born)
        message = as_json(fields | ({"app": app} if app else {}) | ({"first": True} if place.first else {}))
        args: list[Argument] = [
            address.digest,
            digest,
            cipher.encrypt(message_field(place.number), message),
            MAX_WAITING,
            passed,
            agent,
            session_id,
            queue or "",
            cipher.encrypt(inputs_field(place.number), given) if given else b"",
            MAX_IDS,
            app or "",
            WAITING_BYTES,
            place.born,
            place.number,
            "1" if place.first else "",
            *(await _passed_over(gateway, address, place.born, int(passed)) if passed else (b"", b"")),
        ]
        answer, *rest = await gateway.run(_SEND, [*address.keys, address.partition.last_forgotten], args)
        if answer == b"changed":
            place = _Place(rest[0].decode(), int(rest[1]), rest[2] == b"1")
            continue
        if answer == b"app":
            if (owner := rest[0].decode()) not in aliases:
                raise SessionError(
                    f"session {session_id!r} of agent {agent!r} belongs to app {owner!r}, not to {app or ''!r}; "
                    "nothing was stored: give the agent or the session another name, or one of the apps another "
                    "PERDURE_NAMESPACE"
                )
            app = owner
            continue
        if answer == b"full":
            limits = (MAX_WAITING, WAITING_BYTES)
            raise SessionFull(f"{session_id!r} of agent {agent!r}", int(rest[0]), int(rest[1]), most=limits)
        if answer == b"encrypted":
            raise NoKey(f"a message to session {session_id!r} of agent {agent!r}", "the session")
        if answer == b"sent":
            break
        turn, reason = int(rest[0]), rest[1].decode()
        if not skip_failed:
            failed = str(TurnId(address.digest, rest[2].decode(), turn))
            raise SessionFailed(f"{session_id!r} of agent {agent!r}", turn, failed, reason)
        passed = str(turn)
    number, turn, ended, born = int(rest[0]), int(rest[1]), int(rest[2]), rest[3].decode()
    if ended < turn <= number:
        # The turn of this message, or of one before it whose sender may have died: it is stored at most once.
        await enqueue_turn(gateway, address, TurnId(address.digest, born, turn))
    return TurnId(address.digest, born, number)


class _Place(NamedTuple):
    """The place of a message, for which it is encrypted: life of the session, number, and whether none was before."""

    born: str
    number: int
    first: bool


async def _next_place(gateway: Gateway, address: SessionAddress) -> _Place:
    """Return the place of the next message, as long as no other one comes before it."""
    fields = ("born", "sent", "ended", "basis")
    try:
        (born, sent, ended, basis), time = await asyncio.gather(  # in one round trip
            gateway.command("HMGET", address.session, *fields), gateway.command("TIME", node_of=address.session)
        )
    except WrongType:  # the script moves what another program has put there out of the way
        return _Place("", 1, True)
    first = basis is None and count_of(sent) == count_of(ended)
    return _Place(str(milliseconds(time)) if born is None else _text(born), count_of(sent) + 1, first)


async def _passed_over(gateway: Gateway, address: SessionAddress, born: str, turn: int) -> tuple[bytes, bytes]:
    """Return the stored basis of a failed turn, and the one that it leaves. Raises `DecryptionError`.

    The second is empty if the turn has ended since, or the session was forgotten: then the script does not store it.
    """
    cipher = address.cipher(gateway, born)
    former, basis, _ = await _read_basis(gateway, address, cipher, turn)
    if not isinstance(basis, DecryptionError):
        return former, cipher.encrypt(basis_field(turn), basis.encode())
    life, ended = await gateway.command("HMGET", address.session, "born", "ended")
    if _text(life) == born and count_of(ended) < turn:
        raise basis
    return former, b""


def _text(stored: bytes | None) -> str:
    return (stored or b"").decode("utf-8", "backslashreplace")


def _basis_before(cipher: TaskCipher, turn: int, message: StoredMessage, stored: bytes | None) -> Basis:
    """Return what the turn before has left. Raises `DecryptionError`, and `ValueError` if that is missing."""
    found = decode_basis(cipher, turn - 1, stored)
    if found is None and not message.first and not cipher.accepts_plain:
        raise ValueError("what the turn before it has left is missing")
    return found or Basis()


def _with_message(cipher: TaskCipher, turn: int, basis: Basis, message: StoredMessage, inputs: bytes | None) -> Basis:
    """Return a basis with what the message of a turn says. Raises `DecryptionError`, `ValueError`."""
    if message.inputs:
        basis = basis._replace(
            inputs=SessionInputs.decode(plain_data(cipher.decrypt(inputs_field(turn), inputs or b"")))
        )
    return basis._replace(queue=basis.queue if message.queue is None else message.queue, app=message.app or basis.app)


async def _read_basis(
    gateway: Gateway, address: SessionAddress, cipher: TaskCipher, turn: int
) -> tuple[bytes, Basis | DecryptionError, int]:
    """Return the stored basis of a claimed turn, what the turn leaves if it changes nothing, and a serial number.

    The number is that of the corrections which a run of the turn has read: of those that wait, unless the turn has
    failed meanwhile, so that they may be newer. A message that cannot be read leaves no inputs, where plain ones are
    refused.
    """
    names = ("basis", "failed", "corrections", f"m:{turn}", f"i:{turn}")
    former, failed, corrections, stored, inputs = await gateway.command("HMGET", address.session, *names)
    former = former or b""
    try:
        found = decode_basis(cipher, turn - 1, former)
    except DecryptionError as error:
        return former, error, 0
    if found is None and cipher.accepts_plain:
        found = Basis()
    try:
        message = decode_message(cipher, turn, stored)
        found = _with_message(cipher, turn, _basis_before(cipher, turn, message, former), message, inputs)
    except (DecryptionError, ValueError):
        if found is not None and not cipher.accepts_plain:
            found = found._replace(inputs=None)
    if found is None:
        return former, TamperedData(f"what turn {turn - 1} of session {address.digest} has left"), 0
    serial = 0 if failed is not None else corrections_serial(corrections)
    with suppress(DecryptionError):
        if decode_corrections(cipher, found, corrections):
            return former, found, max(serial, found.read)
    return former, found, found.read


async def _left_by(
    gateway: Gateway, address: SessionAddress, cipher: TaskCipher, turn: int, end: SessionTurnEnd
) -> list[Argument]:
    """Return the stored basis of a turn, the one that it leaves, and the serial number of corrections in its state.

    The second is empty where the first cannot be read. Raises `KeyMissing` if another process may read it.
    """
    former, basis, serial = await _read_basis(gateway, address, cipher, turn)
    if isinstance(basis, KeyMissing) and end.outcome != "refused":
        raise basis
    if isinstance(basis, DecryptionError):
        return [former, b"", ""]
    if end.state is not None:
        basis = basis._replace(state=turn, read=serial)
    if end.workspace is not None:
        basis = basis._replace(files=turn)
    return [former, cipher.encrypt(basis_field(turn), basis.encode()), "" if end.state is None else serial]


async def enqueue_turn(gateway: Gateway, address: SessionAddress, turn: TurnId) -> None:
    """Store the task of a claimed turn, unless the turn has ended or failed. Idempotent while its record exists.

    A turn whose message cannot be read ends without an answer, so that the next one can run; so does a turn whose task
    id belongs to another task. Other processes may have the key of a message: the turn waits an hour for them. Where
    what the turn before has left cannot be read, the session stops at this turn.
    """
    following: TurnId | None = turn
    while following is not None:
        following = await _enqueue_or_refuse(gateway, address, following)


async def _enqueue_or_refuse(gateway: Gateway, address: SessionAddress, turn: TurnId) -> TurnId | None:
    """Store the task of a turn, or end the turn. Return the turn that was claimed in its place, if any."""
    fields = ("born", "turn", "ended", "failed", "claimed", *_OF_TASK, f"m:{turn.number}", f"i:{turn.number}")
    born, claimed, ended, failed, since, *rest = await gateway.command("HMGET", address.session, *fields)
    if failed is not None or [born, claimed] != [turn.born.encode(), b"%d" % turn.number] or claimed == ended:
        return None
    try:
        queue, agent, session_id, message, marks = _task_of(address, address.cipher(gateway, turn.born), turn, rest)
    except KeyMissing as error:
        time = await gateway.command("TIME", node_of=address.session)
        if int(time[0]) - count_of(since) / 1000 < _KEY_PATIENCE:
            report_once(f"could not store the task of turn {turn}: {error}; it waits for a process that has the key")
            return None
        problem = str(error)
    except _Stopped as stopped:
        return await _end(gateway, address, turn, SessionTurnEnd("failed", str(stopped).encode()), MAX_TURNS)
    except (DecryptionError, ValueError, TypeError) as error:
        problem = str(error)
    else:
        other = await _store(gateway, Namespace(address.partition.namespace), queue, agent, session_id, marks, message)
        if other is None:
            return None
        problem = other
    return await refuse_turn(gateway, address, turn, problem)


class _Stopped(Exception):
    """No turn can follow, because its basis cannot be read."""


_OF_TASK: Final = ("agent", "id", "basis")
"""Fields of a session that make the task of a turn, with its message and inputs. The key checks agent and id. Queue
and app come from messages: the fields of the session only show those of the last one."""


def _task_of(
    address: SessionAddress, cipher: TaskCipher, turn: TurnId, fields: Sequence[bytes | None]
) -> tuple[str, str, str, TaskMessage, SecretPaths]:
    """Return the queue of a turn's task, the names of agent and session, its message, and the marks of its secrets.

    Raises `DecryptionError` and `_Stopped`; `ValueError` or `TypeError` if a field has what no version has written.
    """
    *texts, former, stored, inputs = fields
    agent, session_id = ((text or b"").decode() for text in texts)
    if not is_session_of(address, agent, session_id):
        raise ValueError("agent and id of the session are not those of its key")
    message = decode_message(cipher, turn.number, stored)
    try:
        basis = _basis_before(cipher, turn.number, message, former)
    except KeyMissing:
        raise
    except DecryptionError as error:
        raise _Stopped(str(error)) from None
    basis = _with_message(cipher, turn.number, basis, message, inputs)
    if basis.inputs is None:
        raise ValueError("the inputs of the message before could not be read, and it has none of its own")
    arguments = orjson.dumps({**basis.inputs.values, "goal": message.content})
    headers = {**message.headers, "session": session_id}
    template = EnvelopeTemplate(agent, headers, Options(result_ttl=_TURN_TTL), app=basis.app, lane=message.lane)
    task = template.message(arguments, basis.inputs.secrets, task_id=str(turn), reserved=True)
    return check_name("queue", basis.queue), agent, session_id, task, basis.inputs.secrets


async def _store(
    gateway: Gateway,
    namespace: Namespace,
    queue: str,
    agent: str,
    session_id: str,
    secrets: SecretPaths,
    message: TaskMessage,
) -> str | None:
    """Store the task of a turn. Return that its id belongs to another task, or None."""
    task_cipher = gateway.encryptor.of(namespace.partition(queue), message.id)
    message = message._replace(arguments=task_cipher.encrypt(arguments_field(agent, secrets), message.arguments))
    enqueuer = BatchEnqueuer(gateway, PartitionRouter(gateway, namespace, queue), 0.0)
    await enqueuer.one(message)
    for partition, _ in enqueuer.take_known():
        if (record := await read_record(gateway, partition, message.id)) is not None:
            return _other_task(record, agent, session_id)
    return None


def _other_task(record: Record, agent: str, session_id: str) -> str | None:
    """Return that the task of this record is not that of a turn of the session; None if it is, or if it is unknown."""
    if record.task is None or (record.task == agent and record.headers.get("session") == session_id):
        return None
    return f"its task id belongs to another task, {record.task!r}"


async def refuse_turn(gateway: Gateway, address: SessionAddress, turn: TurnId, problem: str) -> TurnId | None:
    """End a turn that cannot run, and report it. Return the turn that was claimed in its place; its task is not stored.

    problem: See `refused_end`.
    """
    report_once(f"turn {turn.number} of session {address.digest} ended without an answer: {problem}")
    return await _end(gateway, address, turn, refused_end(problem), MAX_TURNS)


def refused_end(problem: str) -> SessionTurnEnd:
    """Return the end of a turn that cannot run. problem: Why; the history keeps the beginning."""
    return SessionTurnEnd("refused", f"refused: {problem}"[:_MAX_REASON_LENGTH].encode())


_MAX_REASON_LENGTH: Final = 1000
"""Characters of such a reason."""


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
        TurnRefused: The turn has ended or was passed over, the session was forgotten, or the message cannot be read:
            then the turn has ended, and the next one is claimed.
        TurnEarly: The turn is not claimed any more.
        DecryptionError: The state cannot be decrypted, or this process has no key for the message.
    """
    keys = [address.session, address.partition.due]
    answer, *rest = await gateway.run(_BEGIN, keys, [address.digest, turn.born, turn.number])
    if answer == b"missing":
        raise TurnRefused(task_id, "its session was forgotten")
    if answer == b"early":
        raise TurnEarly(str(turn), int(rest[0]))
    if answer == b"ended":
        raise TurnRefused(task_id, f"turn {turn.number} of its session has ended or was passed over")
    stored, state, claimed, workspace, corrections, former = rest
    cipher = address.cipher(gateway, turn.born)
    try:
        message = decode_message(cipher, turn.number, stored or None)
    except KeyMissing:
        raise
    except (DecryptionError, ValueError) as error:
        return await _refuse_run(gateway, address, turn, task_id, str(error))
    try:
        basis = _basis_before(cipher, turn.number, message, former)
    except ValueError as error:
        return await _refuse_run(gateway, address, turn, task_id, str(error))
    return TurnStart(
        message.content,
        "" if message.sender == NOTE_SENDER else message.sender,
        message.sender == NOTE_SENDER,
        decode_state(cipher, basis, state),
        int(claimed),
        decode_files(cipher, basis, workspace),
        decode_corrections(cipher, basis, corrections),
    )


async def _refuse_run(gateway: Gateway, address: SessionAddress, turn: TurnId, task_id: str, problem: str) -> NoReturn:
    if (following := await refuse_turn(gateway, address, turn, problem)) is not None:
        await enqueue_turn(gateway, address, following)
    raise TurnRefused(task_id, f"turn {turn.number} cannot run: {problem}")


@dataclass(frozen=True, slots=True)
class SessionTurnEnd:
    """The end of a turn.

    Attributes:
        outcome: `failed` keeps the turn claimed, until it is replayed or passed over. `refused`: it could not run.
        value: Answer as JSON, or the reason.
        state: State to store; None to keep the one before.
        workspace: Link of the files to store; None to keep the one before.
        wake: Time (ms) at which a commitment falls due, and the note about it that a turn then gets.
        lane: Lane of that turn.
    """

    outcome: Literal["answered", "cancelled", "failed", "refused"]
    value: bytes
    state: bytes | None = None
    wake: tuple[int, str] | None = None
    workspace: bytes | None = None
    lane: Lane = NORMAL


async def end_turn(
    gateway: Gateway, address: SessionAddress, turn: TurnId, end: SessionTurnEnd, *, keep_turns: int = MAX_TURNS
) -> bool:
    """End a turn, and store the task of the next one if a message waits. Idempotent.

    Args:
        keep_turns: Turns that stay in the history.

    Returns:
        False if the session was forgotten.

    Raises:
        TurnEarly: The turn is not claimed any more.
        KeyMissing: This process has no key for what the turn before has left; the turn has not ended.
    """
    try:
        following = await _end(gateway, address, turn, end, keep_turns)
    except SessionNotFound:
        return False
    if following is not None:
        await enqueue_turn(gateway, address, following)
    return True


async def _end(
    gateway: Gateway, address: SessionAddress, turn: TurnId, end: SessionTurnEnd, keep_turns: int
) -> TurnId | None:
    """Store the end of a turn. Return the turn that is claimed then, None without one.

    Raises:
        TurnEarly: The turn is not claimed any more.
        SessionNotFound: The session was forgotten.
    """
    cipher, number = address.cipher(gateway, turn.born), turn.number
    value = cipher.encrypt(answer_field(number), end.value) if end.outcome == "answered" else end.value
    wake_at, note = "", b""
    if end.wake is not None:
        # a message that came before would claim the next turn, whose end removes the note
        fields = {"sender": NOTE_SENDER, "content": end.wake[1]}
        fields |= {} if end.lane == NORMAL else {"lane": end.lane}
        wake_at, note = str(end.wake[0]), cipher.encrypt(message_field(number + 1), as_json(fields))
    args: list[Argument] = [
        address.digest,
        turn.born,
        number,
        end.outcome,
        value,
        b"" if end.state is None else cipher.encrypt(state_field(number), end.state),
        wake_at,
        note,
        keep_turns,
        b"" if end.workspace is None else cipher.encrypt(workspace_field(number), end.workspace),
    ]
    while True:
        left = ["", "", ""] if end.outcome == "failed" else await _left_by(gateway, address, cipher, number, end)
        answer, *rest = await gateway.run(_END, address.keys, [*args, *left])
        if answer != b"changed":
            break
    if answer == b"missing":
        raise SessionNotFound(f"of turn {turn}")
    if answer == b"early":
        raise TurnEarly(str(turn), int(rest[0]))
    claimed, ended = int(rest[0]), int(rest[1])
    return TurnId(turn.digest, turn.born, claimed) if answer == b"ended" and claimed > ended else None


async def due_sessions(gateway: Gateway, namespace: Namespace) -> list[SessionAddress]:
    """Return sessions to look at: a turn was claimed some time ago, or a commitment has fallen due."""
    partitions = namespace.session_partitions
    now = milliseconds(await gateway.command("TIME", node_of=partitions[0].due))
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
    turn, namespace = TurnId(address.digest, found[0].decode(), int(found[1])), Namespace(address.partition.namespace)
    agent, session_id = await gateway.command("HMGET", address.session, "agent", "id")
    own = await _first_record(gateway, namespace, str(turn))
    other = None if own is None else _other_task(own, _text(agent), _text(session_id))
    if other is not None:
        if (following := await refuse_turn(gateway, address, turn, other)) is not None:
            await enqueue_turn(gateway, address, following)
        return
    record = await _last_record(gateway, namespace, turn, own)
    if record is None:
        await enqueue_turn(gateway, address, turn)
    elif record.state is State.DEAD:
        await end_turn(gateway, address, turn, SessionTurnEnd("failed", (record.reason or "unknown").encode()))
    elif record.state is State.CANCELLED:
        await end_turn(gateway, address, turn, SessionTurnEnd("cancelled", b"cancelled"))
    elif record.state is State.SUCCEEDED:  # a successor that is no agent of the session, or Redis has lost the end
        try:
            answer = _result(record)
        except KeyMissing:
            raise
        except DecryptionError as error:  # the session stops, as at a dead letter
            end = SessionTurnEnd("failed", str(error).encode())
        else:
            end = SessionTurnEnd("answered", answer)
            if lost_end is not None:
                end = await lost_end(turn, record, _text(agent), answer)
        await end_turn(gateway, address, turn, end)


async def _first_record(gateway: Gateway, namespace: Namespace, task_id: str) -> Record | None:
    partition = await find_task(gateway, namespace, task_id)
    return None if partition is None else await read_record(gateway, partition, task_id)


async def _last_record(gateway: Gateway, namespace: Namespace, turn: TurnId, record: Record | None) -> Record | None:
    """Return the record of the last successor of a task, as far as there are records."""
    for _ in range(MAX_HAND_OFFS):
        if record is None or record.handed_to is None or parse_turn_id(record.handed_to) != turn:
            break  # the id of a turn's successor is reserved for it: no other task answers in its place
        found = await _first_record(gateway, namespace, record.handed_to)
        if found is None:
            break
        record = found
    return record


def _result(record: Record) -> bytes:
    data = record.cipher.decrypt(RESULT, record.result or b"") or b"null"
    return b"null" if LargeValue.decode(data) is not None else data


_CORRECT = queue_script("session_correct")


async def store_correction(
    gateway: Gateway, record: SessionRecord, correction: SessionCorrection, *, limit: int = DEFAULT_PAYLOAD_LIMIT
) -> Literal["stored", "turn", "changed", "missing"]:
    """Store a correction in a session that is as it was read, and say what is in the way otherwise.

    limit: Largest size of all corrections that wait, in bytes. Raises `PayloadTooLarge`, `DecryptionError`, `NoKey`.
    """
    if not gateway.encryptor.active and is_encrypted(record.state or b""):
        raise NoKey(f"a correction to session {record.name}", "the session")
    waiting, basis = record.waiting_corrections(), record.opened_basis() or Basis()
    if any(one.id == correction.id for one in waiting):
        return "stored"
    data = orjson.dumps([asdict(one) for one in (*waiting, correction)])
    check_size("the corrections that wait for the next turn", len(data), limit)
    keys = [record.address.session, record.address.partition.timeline]
    serial = max(basis.read, corrections_serial(record.corrections)) + 1
    stored = b"%d %b" % (serial, record.cipher.encrypt(corrections_field(serial), data))
    args: list[Argument] = [record.address.digest, str(record.born), record.corrections or b"", stored, record.ended]
    (answer,) = await gateway.run(_CORRECT, keys, args)
    found: Literal["stored", "turn", "changed", "missing"] = answer.decode()
    return found


class SessionTask:
    """The task of a turn, for its worker: what becomes of the turn if the task ends without an answer.

    number: of the turn.
    """

    def __init__(self, gateway: Gateway, partition: Partition, task_id: str, turn: TurnId) -> None:
        self._gateway = gateway
        self._partition = partition
        self._task_id = task_id
        self._turn = turn
        self._address = SessionAddress.at(Namespace(partition.namespace), turn.digest)
        self.number = turn.number

    @classmethod
    def of(cls, gateway: Gateway, partition: Partition, task_id: str) -> Self | None:
        """Return the task with this id; None if the id is not of a turn."""
        turn = parse_turn_id(task_id)
        return None if turn is None else cls(gateway, partition, task_id, turn)

    async def forget_if_removed(self) -> None:
        """Delete the task of a forgotten session."""
        if await is_forgotten(self._gateway, self._address, self._turn):
            await forget_task(self._gateway, self._partition, self._task_id)

    async def refuse(self, problem: str) -> None:
        """End the turn without an answer: the next one runs."""
        await self._end(refused_end(problem))

    async def end(self, outcome: Literal["cancelled", "failed"], value: bytes) -> None:
        """End the turn as failed or cancelled; delete the task if there is no such turn."""
        await self._end(SessionTurnEnd(outcome, value))

    async def _end(self, end: SessionTurnEnd) -> None:
        try:
            there = await end_turn(self._gateway, self._address, self._turn, end)
        except KeyMissing as error:  # the sweeper of a worker with the key ends it
            report_once(f"could not end turn {self._turn}: {error}")
            return
        if not there:
            await forget_task(self._gateway, self._partition, self._task_id)
