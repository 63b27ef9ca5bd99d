"""The record of a session, its history, and lists of sessions."""

from __future__ import annotations

import hashlib
import heapq
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

import orjson

from ..envelope import plain_data
from ..errors import DecryptionError, Refused, SessionNotFound, UnreadableRecord
from ..junk import count_of, split
from ..keys import (
    SESSION_PARTITIONS,
    TENANT_PREFIX,
    Namespace,
    Partition,
    SessionPartition,
    belongs_to,
    tenant_of,
    with_tenant,
    without_tenant,
)
from ..lanes import NORMAL, Lane, read_lane
from ..records import UNPROVEN, number_of
from ..security.encryption import MESSAGE, NO_CIPHER, TaskCipher
from ..security.secret_arguments import SecretPaths
from ..transport.gateway import Gateway
from ..transport.scripts import pairs
from ..wording import iso_time

_MAX_LENGTH: Final = 256
"""Most characters of a session id."""

_DIGEST: Final = re.compile(f"{TENANT_PREFIX}[0-9a-f]{{32}}")
_TURN: Final = re.compile(f"({TENANT_PREFIX})turn-([0-9a-f]{{32}})-([0-9]{{1,16}})\\.([0-9]{{1,15}})(?:\\.h[0-9]+)?")


@dataclass(frozen=True, slots=True)
class TurnId:
    """Parsed task id of a turn. born: time of the first message of its session (ms), as text."""

    digest: str
    born: str
    number: int

    def __str__(self) -> str:
        known = f"turn-{without_tenant(self.digest)}-{self.born}.{self.number}"
        return with_tenant(tenant_of(self.digest), known)


def check_session_id(session_id: str) -> str:
    """Return a valid session id. Raises `ValueError` with the rule for any other, `TypeError` if it is no text."""
    if not isinstance(session_id, str):
        raise TypeError(f"session id must be a text, got {session_id!r}")
    if not 1 <= len(session_id) <= _MAX_LENGTH or not session_id.isprintable():
        raise ValueError(f"session id must be 1 to {_MAX_LENGTH} printable characters, got {session_id!r}")
    return session_id


def is_digest(text: str) -> bool:
    """Return whether a text may be the digest of a session."""
    return _DIGEST.fullmatch(text) is not None


def parse_turn_id(task_id: str) -> TurnId | None:
    """Return the turn whose task, or successor of a task, has this id; None for the id of another task."""
    found = _TURN.fullmatch(task_id)
    return None if found is None else TurnId(found[1] + found[2], found[3], int(found[4]))


@dataclass(frozen=True, slots=True)
class SessionAddress:
    """Keys of a session, by the digest of the name of its agent and its id, with the tenant in front."""

    partition: SessionPartition
    digest: str

    @classmethod
    def of(cls, namespace: Namespace, agent: str, session_id: str) -> SessionAddress:
        """Return the address of a session of the namespace's tenant. Raises `ValueError` for an invalid id."""
        known = with_tenant(namespace.tenant, check_session_id(session_id))
        digest = hashlib.sha256(orjson.dumps([agent, known])).hexdigest()[:32]
        return cls.at(namespace, with_tenant(tenant_of(known), digest))

    @classmethod
    def at(cls, namespace: Namespace, digest: str) -> SessionAddress:
        """Return the address of a session by its digest."""
        return cls(SessionPartition(namespace.name, int(without_tenant(digest)[:4], 16) % SESSION_PARTITIONS), digest)

    @property
    def session(self) -> str:
        return self.partition.session(self.digest)

    @property
    def history(self) -> str:
        return self.partition.history(self.digest)

    @property
    def keys(self) -> list[str]:
        """Keys of the scripts: session, history, due, timeline."""
        return [self.session, self.history, self.partition.due, self.partition.timeline]

    def cipher(self, gateway: Gateway, born: str) -> TaskCipher:
        """Return the cipher of the session's data. born: time of its first message, as text.

        A session that begins again after it was forgotten has another key: nothing of before can be put back.
        """
        return gateway.encryptor.of(Partition(self.partition.namespace, "~sessions", 0), f"{self.digest} {born}")


_PAGE: Final = 25
"""Turns of the history that are read at once."""

_WAITING: Final = 1001
"""Messages that are read of those that wait: as many as a session takes, and the one whose turn runs."""

_STATES: Final = 20
"""States that are read at once."""

_CURSOR: Final = re.compile(f"[0-9]{{1,16}}-{_DIGEST.pattern}")

# Kinds of encrypted data, each with a number: data cannot be decrypted in the place of another number. A turn has the
# number of its message.


def message_field(turn: int) -> str:
    """Return the kind of a message."""
    return f"{MESSAGE}:{turn}"


def inputs_field(turn: int) -> str:
    """Return the kind of the inputs that came with a message."""
    return f"inputs:{turn}"


def answer_field(turn: int) -> str:
    """Return the kind of an answer."""
    return f"answer:{turn}"


def basis_field(turn: int) -> str:
    """Return the kind of the basis that a turn has left."""
    return f"basis:{turn}"


def state_field(turn: int) -> str:
    """Return the kind of the state that a turn has left."""
    return f"state:{turn}"


def workspace_field(turn: int) -> str:
    """Return the kind of the link of the files that a turn has left."""
    return f"workspace:{turn}"


def corrections_field(serial: int) -> str:
    """Return the kind of the corrections with a serial number."""
    return f"corrections:{serial}"


class SessionInputs(NamedTuple):
    """Inputs of an agent without its goal, as plain data, and the paths of their secrets."""

    values: dict[str, Any]
    secrets: SecretPaths

    @classmethod
    def decode(cls, found: object) -> SessionInputs:
        """Read inputs from plain data. Raises `ValueError` for data that no version has written."""
        values, secrets = found if isinstance(found, list) and len(found) == 2 else (None, None)
        if (
            not isinstance(values, dict)
            or not isinstance(secrets, list)
            or not all(isinstance(path, list) and all(isinstance(name, str) for name in path) for path in secrets)
        ):
            raise ValueError("could not decode the inputs: they must be an object, with the paths of its secrets")
        return cls(values, tuple(map(tuple, secrets)))


class Basis(NamedTuple):
    """Basis of the next turn, left by the one that ended: its values that count, and what a message leaves out.

    It is encrypted under the number of the turn that ended last, so each number is used once, and the value of an
    earlier turn does not count again. All processes that end a turn write it.

    Attributes:
        state: Turn that left the state; 0 before the first one.
        files: Turn that left the link of the files; 0 without one.
        read: Serial number of the last corrections that a turn has read which left a state.
        queue, app: Of the task of the turn before.
        inputs: Of the turn before; None if its message could not be read.
    """

    state: int = 0
    files: int = 0
    read: int = 0
    queue: str = ""
    app: str | None = None
    inputs: SessionInputs | None = SessionInputs({}, ())

    def encode(self) -> bytes:
        return orjson.dumps({**self._asdict(), "inputs": None if self.inputs is None else list(self.inputs)})

    @classmethod
    def decode(cls, data: bytes) -> Basis:
        """Raises `ValueError` for data that no version has written."""
        try:
            fields = plain_data(data)
            inputs = fields["inputs"]
            found = cls(**{**fields, "inputs": None if inputs is None else SessionInputs.decode(inputs)})
        except (TypeError, LookupError):
            raise ValueError("it has other fields than a basis") from None
        numbers, texts = [found.state, found.files, found.read], [found.queue, found.app or ""]
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError("its numbers must not be negative")
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("its queue and app must be texts")
        return found


def decode_basis(cipher: TaskCipher, ended: int, stored: bytes | None) -> Basis | None:
    """Return the basis that the turn which ended last has left; None if no turn of the session has ended.

    Raises `DecryptionError`.
    """
    if not stored:
        return None
    data = cipher.decrypt(basis_field(ended), stored)
    try:
        return Basis.decode(data)
    except ValueError as error:
        raise DecryptionError(f"the basis of turn {ended + 1}", str(error)) from None


def decode_state(cipher: TaskCipher, basis: Basis | None, stored: bytes | None) -> bytes | None:
    """Return the state that counts; None before the first one. Raises `DecryptionError`."""
    if basis is None or not basis.state:
        return None
    return cipher.decrypt(state_field(basis.state), stored or b"")


def decode_files(cipher: TaskCipher, basis: Basis | None, stored: bytes | None) -> bytes | None:
    """Return the link of the files that counts; None without one. Raises `DecryptionError`."""
    if basis is None or not basis.files:
        return None
    return cipher.decrypt(workspace_field(basis.files), stored or b"")


@dataclass(frozen=True, slots=True)
class SessionMessage:
    """A message of a session: one that was sent to it, or an answer.

    Attributes:
        turn: Number of the turn; that of a message and that of its answer are the same.
        role: `user` for a message, `assistant` for an answer, `system` for a note that a commitment fell due.
        content: Text; JSON for an answer that is not a text.
        at: Time in milliseconds of Redis' clock since the epoch.
        sender: Name of the sender.
        status: `answered`, `running`, `waiting`, or why the turn has no answer: `cancelled`, or the reason of its dead
            letter; after `(not encrypted)` where encryption is required, since scripts write it.
    """

    turn: int
    role: Literal["user", "assistant", "system"]
    content: str
    at: int
    sender: str = ""
    status: str = "answered"

    def summary(self) -> dict[str, Any]:
        """Return the message as plain data, its time as ISO 8601."""
        return {
            "turn": self.turn,
            "role": self.role,
            "content": self.content,
            "sender": self.sender,
            "at": iso_time(self.at),
            "status": self.status,
        }


@dataclass(frozen=True, slots=True)
class SessionCorrection:
    """A correction of the state, stored once under its id. changes: JSON data by the path of a field. by: a person."""

    id: str
    by: str
    changes: dict[str, Any]


def corrections_serial(stored: bytes | None) -> int:
    """Return the serial number of corrections as they are stored; 0 without any."""
    return count_of((stored or b"").partition(b" ")[0])


def decode_corrections(cipher: TaskCipher, basis: Basis | None, stored: bytes | None) -> list[SessionCorrection]:
    """Return the stored corrections in order, without those that an earlier turn has read. Raises `DecryptionError`."""
    serial, data = corrections_serial(stored), (stored or b"").partition(b" ")[2]
    if serial <= (0 if basis is None else basis.read):
        return []
    return [SessionCorrection(**one) for one in orjson.loads(cipher.decrypt(corrections_field(serial), data))]


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """A session at the time of the read. Times are milliseconds of Redis' clock since the epoch.

    Attributes:
        app: App whose workers run the turns; None if no message named one.
        born: Time of the first message.
        at: Time of the last message, correction or end of a turn.
        sent: Messages that were sent, which is the number of the last one.
        turn: Number of the last turn that was claimed.
        ended: Number of the last turn that has ended.
        failed: Reason of the dead letter of turn `turn`; None if it has not failed.
        state: State after the last turn as it is stored; None before the first turn has ended, and in lists.
        state_bytes: Size of the stored state.
        corrections: Corrections that wait for the next turn, as they are stored; None without any, and in lists.
        workspace, basis: Link of the files, and what the last turn left to the next, likewise.
    """

    address: SessionAddress
    agent: str
    id: str
    queue: str
    born: int
    at: int
    sent: int
    turn: int
    ended: int
    failed: str | None = None
    state: bytes | None = field(default=None, repr=False)
    state_bytes: int = 0
    corrections: bytes | None = field(default=None, repr=False)
    workspace: bytes | None = field(default=None, repr=False)
    basis: bytes | None = field(default=None, repr=False)
    app: str | None = None
    cipher: TaskCipher = field(default=NO_CIPHER, repr=False, compare=False)

    @property
    def status(self) -> Literal["idle", "running", "failed"]:
        if self.failed is not None:
            return "failed"
        return "running" if self.turn > self.ended else "idle"

    @property
    def shown_failed(self) -> str | None:
        """The reason of the dead letter for people, marked where encryption is required: it is plain."""
        return self.failed if self.failed is None else _marked(self.cipher, self.failed)

    @property
    def tenant(self) -> str | None:
        """The tenant that the session belongs to; None without one."""
        return tenant_of(self.address.digest)

    @property
    def name(self) -> str:
        return f"{self.id!r} of agent {self.agent!r}"

    def task_id(self, turn: int) -> str:
        """Return the id of the task of a turn."""
        return str(TurnId(self.address.digest, str(self.born), turn))

    def opened_state(self) -> bytes | None:
        """Return the decrypted state. Raises `DecryptionError`."""
        return decode_state(self.cipher, self.opened_basis(), self.state)

    def opened_basis(self) -> Basis | None:
        """Return what the last turn left to the next one, None before the first end. Raises `DecryptionError`."""
        return decode_basis(self.cipher, self.ended, self.basis)

    def waiting_corrections(self) -> list[SessionCorrection]:
        """Return the corrections that wait for the next turn, in order. Raises `DecryptionError`."""
        return decode_corrections(self.cipher, self.opened_basis(), self.corrections)

    def summary(self) -> dict[str, Any]:
        """Return the record as plain data, times as ISO 8601."""
        shown: dict[str, Any] = {
            "agent": self.agent,
            "app": self.app,
            "id": self.id,
            "queue": self.queue,
            "status": self.status,
            "turns": self.ended,
            "waiting": self.sent - self.turn,
            "first_at": iso_time(self.born),
            "last_at": iso_time(self.at),
            "state_bytes": self.state_bytes,
        }
        if self.tenant is not None:
            shown["tenant"] = self.tenant
        if self.turn > self.ended:
            shown["task"] = self.task_id(self.turn)
        if self.failed is not None:
            shown["failed"] = self.shown_failed
        if not self.cipher.accepts_plain:
            shown["not_encrypted"] = [name for name in shown if name not in _PROVEN]
        return shown


_PROVEN: Final = ("agent", "id")
"""Parts of a summary that the key of the session proves."""


def _marked(cipher: TaskCipher, text: str) -> str:
    """Return a plain text of a session, marked where plain data are refused."""
    return text if cipher.accepts_plain else f"{UNPROVEN} {text}"


_FARTHEST: Final = 2.0**53
"""Largest score that is an exact number."""

_REMEDY: Final = "forget the session"

_FIELDS: Final = ("agent", "id", "queue", "app", "born", "at", "sent", "turn", "ended", "failed")

_VALUES: Final = ("state", "corrections", "workspace", "basis")


def _record(
    address: SessionAddress,
    gateway: Gateway,
    found: Sequence[bytes | None],
    size: int,
    values: Sequence[bytes | None] = (),
) -> SessionRecord | None:
    fields = dict(zip(_FIELDS, found, strict=True))
    if fields["born"] is None:
        return None
    try:
        agent, session_id, queue = ((fields[name] or b"").decode() for name in ("agent", "id", "queue"))
        reason = None if fields["failed"] is None else fields["failed"].decode()
        owner = None if fields["app"] is None else fields["app"].decode()
    except ValueError as error:
        raise UnreadableRecord(address.session, f"a field is damaged ({error})", _REMEDY) from None
    key = address.session
    if not is_session_of(address, agent, session_id):
        raise UnreadableRecord(key, "agent and id are not those of its key", _REMEDY)
    born, at, sent, turn, ended = (
        number_of(key, name, fields[name], _REMEDY) for name in ("born", "at", "sent", "turn", "ended")
    )
    return SessionRecord(
        address,
        agent,
        session_id,
        queue,
        born,
        at,
        sent,
        turn,
        ended,
        failed=reason,
        state_bytes=size,
        app=owner,
        cipher=address.cipher(gateway, str(born)),
        **dict(zip(_VALUES, values, strict=False)),
    )


def _listed(
    address: SessionAddress, gateway: Gateway, found: Sequence[bytes | None] | Refused, size: int | Refused
) -> SessionRecord | None:
    """Return the record of a session; of one that cannot be read, what can be, and the problem as its failure."""
    if isinstance(found, Refused) or isinstance(size, Refused):
        return SessionRecord(address, "?", address.digest, "?", 0, 0, 0, 0, 0, failed=f"key {address.session}: {found}")
    try:
        return _record(address, gateway, found, size)
    except UnreadableRecord as error:
        agent, session_id, queue = ((text or b"?").decode("utf-8", "backslashreplace") for text in found[:3])
        return SessionRecord(address, agent, session_id, queue, 0, 0, 0, 0, 0, failed=str(error), state_bytes=size)


def is_session_of(address: SessionAddress, agent: str, session_id: str) -> bool:
    """Return whether the session with these names has this address: any client may have written them."""
    try:
        return SessionAddress.of(Namespace(address.partition.namespace), agent, session_id) == address
    except ValueError:
        return False


async def read_session(gateway: Gateway, address: SessionAddress) -> SessionRecord | None:
    """Return the record of a session, None if there is no such session."""
    found = await gateway.command("HMGET", address.session, *_FIELDS, *_VALUES)
    known, values = found[: len(_FIELDS)], found[len(_FIELDS) :]
    return _record(address, gateway, known, len(values[0] or b""), values)


async def session_data(gateway: Gateway, namespace: Namespace) -> AsyncIterator[tuple[str, bytes | None, bytes | None]]:
    """Yield the digest of each session, its state and the link of its files. Raises `DecryptionError`."""
    for partition in namespace.session_partitions:
        cursor = b"0"
        while True:
            cursor, page = await gateway.command("ZSCAN", partition.timeline, cursor, "COUNT", _STATES)
            addresses = [SessionAddress(partition, digest) for digest in split(page[::2], is_digest).good]
            found = await gateway.pipeline([("HMGET", one.session, *_FIELDS, *_VALUES) for one in addresses])
            for address, stored in zip(addresses, found, strict=True):
                record = _record(address, gateway, stored[: len(_FIELDS)], 0, stored[len(_FIELDS) :])
                if record is not None:
                    basis = record.opened_basis()
                    files = decode_files(record.cipher, basis, record.workspace)
                    yield address.digest, decode_state(record.cipher, basis, record.state), files
            if cursor == b"0":
                break


async def read_history(gateway: Gateway, address: SessionAddress, *, after: int = 0) -> AsyncIterator[SessionMessage]:
    """Yield messages and answers of the turns after a number, in order, and then the messages that wait.

    Raises `SessionNotFound`, `DecryptionError`.
    """
    if (record := await read_session(gateway, address)) is None:
        raise SessionNotFound(address.digest)
    cipher, born, last = record.cipher, record.born, after
    while True:
        page = await gateway.command("XRANGE", address.history, f"({last}-0", "+", "COUNT", _PAGE)
        for entry, flat in page:
            last = int(entry.partition(b"-")[0])
            for message in _turn_messages(cipher, last, pairs(flat)):
                yield message
        if len(page) < _PAGE:
            break
    record = await read_session(gateway, address)
    if record is None or record.born != born:
        raise SessionNotFound(address.digest)
    first = max(record.ended, last) + 1
    waiting = range(first, min(record.sent, first + _WAITING) + 1)
    for number in waiting:
        stored = await gateway.command("HGET", address.session, f"m:{number}")
        if stored is not None:  # its turn has ended meanwhile
            running = record.shown_failed or "running"
            yield _sent_message(cipher, number, stored, running if number == record.turn else "waiting")


async def read_turn(gateway: Gateway, address: SessionAddress, turn: TurnId) -> tuple[bytes | None, str] | None:
    """Return the answer of a turn that has ended, as JSON, or None and why it has none.

    Returns None if the turn is not in the history. Raises `DecryptionError`.
    """
    found = await gateway.command("XRANGE", address.history, f"{turn.number}-0", f"{turn.number}-0")
    if not found:
        return None
    fields = pairs(found[0][1])
    if (answer := fields.get(b"answer")) is None:
        return None, fields.get(b"error", b"").decode()
    return address.cipher(gateway, turn.born).decrypt(answer_field(turn.number), answer), ""


class StoredMessage(NamedTuple):
    """A message as it is stored.

    Attributes:
        headers, lane: Of the task of its turn.
        queue, app: Of that task; None for those of the turn before.
        first: Whether it is the first one of its session: no turn before it has left anything.
        inputs: Whether inputs came with it; otherwise those of the turn before count.
    """

    at: int
    sender: str
    content: str
    headers: dict[str, str]
    lane: Lane = NORMAL
    queue: str | None = None
    app: str | None = None
    first: bool = False
    inputs: bool = False


def decode_message(cipher: TaskCipher, turn: int, stored: bytes | None) -> StoredMessage:
    """Read the message of a turn. Raises `DecryptionError`, and `ValueError` for bytes that no version has written."""
    if stored is None:
        raise ValueError("the message is missing")
    at, _, data = stored.partition(b" ")
    try:
        fields = plain_data(cipher.decrypt(message_field(turn), data))
    except ValueError as error:
        raise ValueError(f"could not decode the message: {error}") from None
    if not isinstance(fields, dict) or fields.keys() - set(StoredMessage._fields) or not count_of(at):
        raise ValueError("could not decode the message: it has other fields than those of a message, or no time")
    given = {"headers": {}, **fields, "at": count_of(at), "lane": read_lane(fields.get("lane"))}
    headers = given["headers"]
    texts = [given.get("sender"), given.get("content"), *(headers.values() if isinstance(headers, dict) else [None])]
    texts += [given[name] for name in ("queue", "app") if given.get(name) is not None]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("could not decode the message: its sender, content, headers, queue and app must be texts")
    if not all(isinstance(given.get(name, False), bool) for name in ("first", "inputs")):
        raise ValueError("could not decode the message: first and inputs must be true or false")
    return StoredMessage(**given)


NOTE_SENDER: Final = "~commitments"
"""Sender of the note that a commitment fell due; no name that a caller may use."""


def _sent_message(cipher: TaskCipher, turn: int, stored: bytes, status: str) -> SessionMessage:
    try:
        at, sender, content, *_ = decode_message(cipher, turn, stored)
    except (DecryptionError, ValueError) as error:
        return SessionMessage(turn, "user", f"({error})", 0, "", status)
    if sender == NOTE_SENDER:
        return SessionMessage(turn, "system", content, at, "", status)
    return SessionMessage(turn, "user", content, at, sender, status)


def _turn_messages(cipher: TaskCipher, turn: int, fields: Mapping[bytes, bytes]) -> list[SessionMessage]:
    error = fields.get(b"error")
    status = "answered" if error is None else _marked(cipher, error.decode("utf-8", "backslashreplace"))
    found = [_sent_message(cipher, turn, stored, status)] if (stored := fields.get(b"message")) else []
    if (answer := fields.get(b"answer")) is not None:
        try:
            data = cipher.decrypt(answer_field(turn), answer)
            value = orjson.loads(data)
            text = value if isinstance(value, str) else data.decode()
        except (DecryptionError, ValueError) as problem:
            text = f"({problem})"
        found.append(SessionMessage(turn, "assistant", text, count_of(fields.get(b"at"))))
    return found


def _time(score: bytes) -> int:
    """Return a score as milliseconds; another program may have stored any number."""
    return int(min(max(float(score), 0.0), _FARTHEST))


async def list_sessions(
    gateway: Gateway, namespace: Namespace, *, limit: int, before: str = "", agent: str = ""
) -> tuple[list[SessionRecord], str]:
    """Return sessions, those with the latest activity first, and the cursor of the next page, empty at the end.

    Args:
        before: Cursor of an earlier page.
        agent: Only those of this agent.

    Raises:
        ValueError: The cursor is not one that this function returned.
    """
    if before and not _CURSOR.fullmatch(before):
        raise ValueError(f"cursor must be one that an earlier page ended with, got {before!r}")
    found: list[SessionRecord] = []
    partitions = namespace.session_partitions
    while len(found) < limit:
        latest, _, after = before.partition("-")
        upper = latest or "+inf"
        answers = await gateway.pipeline_each(
            [
                ("ZRANGE", one.timeline, upper, "-inf", "BYSCORE", "REV", "LIMIT", 0, _PAGE, "WITHSCORES")
                for one in partitions
            ]
        )
        pages = [[] if isinstance(page, Refused) else page for page in answers]  # a key of another type
        listed = [
            sorted(
                (-_time(score), digest.decode("utf-8", "replace"))
                for digest, score in zip(page[::2], page[1::2], strict=True)
            )
            for page in pages
        ]
        # Beyond the end of a full page of one partition, others may have sessions that belong in between.
        floor = max((page[-1] for page in listed if len(page) == _PAGE), default=None)
        merged = [
            one
            for one in heapq.merge(*listed)
            if (not latest or one > (-int(latest), after)) and (floor is None or one <= floor)
        ]
        chosen = merged[: max(limit - len(found), 1) if not agent and namespace.tenant is None else _PAGE]
        known = [digest for _, digest in chosen if is_digest(digest) and belongs_to(namespace.tenant, digest)]
        addresses = {digest: SessionAddress.at(namespace, digest) for digest in known}
        replies = await gateway.pipeline_each([("HMGET", one.session, *_FIELDS) for one in addresses.values()])
        sizes = await gateway.pipeline_each([("HSTRLEN", one.session, "state") for one in addresses.values()])
        read = dict(zip(addresses, zip(replies, sizes, strict=True), strict=True))
        for score, digest in chosen:
            before = f"{-score}-{digest}"
            if digest not in read:
                continue  # of another tenant; or what another program wrote, which the session sweeper sets aside
            record = _listed(addresses[digest], gateway, *read[digest])
            if record is not None and agent in ("", record.agent):
                found.append(record)
                if len(found) == limit:
                    break
        if not chosen or (len(chosen) == len(merged) and floor is None and len(found) < limit):
            return found, ""
    return found, before
