"""Waits of a task: what it asks people and programs for by name, and their answers.

A wait is opened by the run, under an id that it has in every run: `approval`, `approval#2`, `page-3/approval`. It is
answered by its id, by its token or by its name. Waits and answers are fields of the task's inbox (see inbox.py), so
that they have its lifetime, and that a sender needs no right to write the task's record:

    w:ID       an open wait: the time of its opening (ms of Redis' clock), the time after which it takes no answer (0:
               none), the number of the entry, JSON (or encrypted JSON, of the kind `wait:ID`)
    a:ID       its answer: the time (ms), the digest of the answer's id, JSON (kind `answer:ID`, or `early:NAME`), which
               has the digest of the question that it answers
    e:NAME     an answer for the first wait of this name, which no run has opened yet (kind `early:NAME`)
    c:NAME     waits of this name that were opened, those that were closed, and the digests of the ids of the last 20
               answers that closed one, the latest first
    open       open waits
    early      answers that came early, and their bytes

An answer belongs to the wait that its sender has read. By name, it goes to the open wait of this name. If no wait of
this name was opened yet, it is kept for the first; if one was, it is refused, so that a late or a second answer reaches
no other question. Each opening of a wait has a random name, and the question a digest: of its id, of this name and of
what was shown to people. The answer has the digest that its sender has read, and the run drops an answer to anything
else: to another question, or to the same one before it was asked again, by a fresh run as well. So a copy of an answer
is used once. An early answer has no question yet: it is for the first wait of its name, which a task has once.
Names and ids are not encrypted; a field that was moved or changed cannot be decrypted, and no count decides what a run
does.

If workers know approvers (security/approvers.py), the wait says who may answer it, and the answer is signed by one of
them. The run that uses it checks the signature.

`{tag}:waiting` has the tasks with open waits. Tasks that have ended are removed by who reads it and by the janitor.

A token names one open wait in the namespace: a web handler knows the order, not the task. Its key, in a slot of its
own, has the place of the wait, encrypted. The run claims it after the wait is stored, and again in each run, and frees
it after the wait is closed. A run that dies in between leaves a token of a closed wait: the next claim takes it over.
"""

from __future__ import annotations

import hashlib
import heapq
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import orjson
from pydantic_core import PydanticSerializationError

from .delivery.checkpoint import Entry, Kind
from .delivery.settlement import wake_word
from .envelope import DEFAULT_PAYLOAD_LIMIT, check_size, is_task_id, new_task_id, plain_data
from .errors import (
    AnswerRefused,
    ApproverNeeded,
    DecryptionError,
    InvalidAnswer,
    KeyMissing,
    NoKey,
    QueueError,
    Refused,
    TaskEnded,
    TaskNotFound,
    UnreadableRecord,
    WaitNotFound,
)
from .event_log import read_last_events
from .inbox import ACTING_TASK, acting_sender
from .inspection.views import find_task
from .json_form import as_json
from .junk import count_of
from .keys import Namespace, Partition, TokenKey, belongs_to, check_name, tenant_of
from .records import State
from .schemas import UnusableSchema, find_problems
from .transport.gateway import Gateway
from .transport.large_results import scan_fields
from .transport.pipelining import Argument
from .transport.scripts import queue_script
from .wording import counted, listed

if TYPE_CHECKING:
    from .security.approvers import ApproverKey, Statement

_ANSWER = queue_script("answer")
_CLAIM = queue_script("claim_token")
_FORGET = queue_script("forget_waits")

RECORDS: Final = "#wait:"
"""Beginning of the names of the records of waits in the checkpoint."""

MAX_EARLY: Final = 100
"""Answers that a task keeps for waits that were not opened yet."""

EARLY_BYTES: Final = 4 * 1024 * 1024
"""Largest size of these answers together, in bytes."""

TOKEN_LENGTH: Final = 200
"""Most characters of a token."""

_KEPT_AFTER: Final = 30 * 86_400_000
_KEPT: Final = 400 * 86_400_000
"""Milliseconds for which a token is kept after the time-out of its wait, and without a time-out."""

_TRIES: Final = 8
"""Times that a sender reads the waits again, because they have changed."""

_REDIRECTS: Final = 128
"""Successors that an answer follows: more than a chain can have."""

_PAGE: Final = 100
"""Tasks with open waits that are read at once."""

_FARTHEST: Final = 2.0**53
"""Largest score that is an exact number."""

_LATEST: Final = 200
"""Events of a task among which an answer is searched."""

_OVERHEAD: Final = 256
"""Bytes that the record and the event of an answer may add to it."""

_SHOWN_IDS: Final = 10
"""Ids of waits that an error names."""


def wait_id(key: str) -> str:
    """Return the id of a wait by the key of its record."""
    scope, _, name = key.rpartition(RECORDS)
    return scope + name


def wait_name(wait: str) -> str:
    """Return the name of a wait by its id."""
    return wait.rpartition("/")[2].partition("#")[0]


def is_wait_field(name: str) -> bool:
    """Return whether a field of an inbox is of waits and answers."""
    return name[:2] in ("w:", "a:", "e:", "c:") or name in ("open", "early")


def answer_digest(answer_id: str) -> str:
    """Return the digest of an answer's id, by which a repeated answer is known."""
    return hashlib.blake2b(answer_id.encode(), digest_size=12).hexdigest()


@dataclass(frozen=True, slots=True)
class OpenWait:
    """An open wait of a task.

    Attributes:
        id: Unique in the task: its name, with its number and its scope, such as `approval#2`.
        who: Person or group that is asked.
        why: Reason or question.
        opened: Time of its opening, in milliseconds of Redis' clock since the epoch.
        until: Time after which it takes no answer; None without a time-out.
        schema: JSON schema of the answer; None for any JSON.
        shows: Digest of what people were shown, without which an answer is void; None if nothing was shown.
        shown: What they were shown; None if it is too large.
        opening: Random name of this opening of the wait.
        approvers: Names of those whose signature the answer needs; None if it needs none.
        token: By which it is answered as well.
        answered: Whether it has an answer, which the run has not read yet.
        problem: Why it cannot be read, if it cannot.
    """

    id: str
    who: str = ""
    why: str = ""
    opened: int = 0
    until: int | None = None
    schema: dict[str, Any] | None = None
    shows: str | None = None
    shown: Any = None
    token: str | None = None
    answered: bool = False
    problem: str | None = None
    head: str = ""
    opening: str = ""
    approvers: Sequence[str] | None = None

    @property
    def name(self) -> str:
        return wait_name(self.id)

    @property
    def digest(self) -> str:
        """Digest of the question, see `question_digest`."""
        fields = {"opening": self.opening, "who": self.who, "why": self.why, "schema": self.schema}
        return question_digest(self.id, fields | {"shows": self.shows, "shown": self.shown})

    def summary(self) -> dict[str, Any]:
        """Return the wait as plain data."""
        shown: dict[str, Any] = {
            "wait": self.id,
            "name": self.name,
            "who": self.who,
            "why": self.why,
            "since": self.opened,
            "until": self.until,
            "schema": self.schema,
            "shown": self.shown,
            "shows": self.shows,
            "token": self.token,
            "approvers": self.approvers,
            "answered": self.answered,
        }
        return shown if self.problem is None else shown | {"problem": self.problem}


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer to a wait.

    Attributes:
        value: JSON data.
        by: Name of the sender.
        at: Time of the answer, in milliseconds of Redis' clock since the epoch.
        question: Digest of the question that its sender has read; empty if it came before.
        signature: That of the sender, an approver; empty without one.
        digest: That of its id.
        early: Whether it came before a wait of its name was opened.
        problem: Why it cannot be read, if it cannot.
        no_key: Whether a process with another key may read it.
    """

    value: Any
    by: str = ""
    at: int = 0
    question: str = ""
    signature: str = ""
    digest: str = ""
    early: bool = False
    problem: str | None = None
    no_key: bool = False


class Waits(NamedTuple):
    """Waits of a task: those that are open, and by name the answers that came early."""

    open: list[OpenWait]
    early: dict[str, Answer]


class GivenAnswer(NamedTuple):
    """Sender and time of an answer that a wait has got. at: milliseconds of Redis' clock since the epoch."""

    by: str
    at: int


class AnswerReceipt(NamedTuple):
    """Receipt of an answer.

    Attributes:
        task_id: Of the task that has it: the last successor.
        wait: Id of the wait; the name, if the answer is kept for the first wait of it.
        state: State of the task.
        early: Whether it is kept.
    """

    task_id: str
    wait: str
    state: State
    early: bool = False


_QUESTION: Final = ("opening", "who", "why", "schema", "shows", "shown")


def question_digest(wait: str, fields: Mapping[str, Any]) -> str:
    """Return the digest of a question: the id of the wait, this opening of it, who is asked, why, and what is shown.

    fields: what senders read of it, see `opening`.
    """
    question = [wait, *(fields.get(name) or None for name in _QUESTION)]
    return hashlib.blake2b(orjson.dumps(question, option=orjson.OPT_SORT_KEYS), digest_size=32).hexdigest()


def void_answer(
    gateway: Gateway, partition: Partition, task_id: str, wait: str, answer: Answer, *, question: str, who: str
) -> str | None:
    """Return why an answer is void for a wait: it is for another question, or no approver has signed it.

    Args:
        question: Digest of the question as the run has opened it.
        who: Whom it asks.
    """
    if answer.problem is not None:
        return answer.problem
    approvers = None if gateway.answer_keys is None else gateway.answer_keys.approvers
    if answer.early:
        return None if approvers is None else "it came before the question, so no approver has signed it for that"
    if answer.question != question:
        return "it is an answer to something else than what is asked now"
    if approvers is None:
        return None
    place = (partition.namespace, partition.queue, task_id, wait)
    return approvers.problem(_statement(place, question, answer.value, answer.by), answer.signature, who)


def _statement(place: tuple[str, str, str, str], question: str, value: Any, approver: str) -> Statement:
    from .security.approvers import Statement

    return Statement(*place, question, value, approver)


def opening(
    task_id: str, wait: str, fields: Mapping[str, Any], *, until: int | None, early: bool, lost: bool = False
) -> Entry:
    """Return the entry that opens a wait, or opens it again without the answer that it has.

    Args:
        fields: What senders read: `opening`, `who`, `why`, `schema`, `shows`, `shown`, `token`, `approvers`.
        until: Time after which it takes no answer, in milliseconds of Redis' clock.
        early: Whether it takes an answer that came before it, if it is the first of its name.
        lost: Whether Redis has lost it: one that is there, since an earlier entry came again, is left as it is.
    """
    return Entry(Kind.WAIT, wait, orjson.dumps(fields), f"{until or 0} {early:d} {lost:d} {task_id}".encode())


def closing(task_id: str, wait: str, answer: Answer | None = None) -> Entry:
    """Return the entry that closes a wait. answer: the one that the run has used."""
    return Entry(Kind.WAIT_CLOSED, wait, b"" if answer is None else answer.digest.encode(), task_id.encode())


class WaitLook(NamedTuple):
    """State of one wait, as its run sees it. open: whether it is stored."""

    open: bool
    answer: Answer | None


async def look_at_wait(gateway: Gateway, partition: Partition, task_id: str, wait: str) -> WaitLook:
    """Read whether a wait is stored and answered."""
    stored, answer = await gateway.command("HMGET", partition.inbox(task_id), f"w:{wait}", f"a:{wait}")
    found = None if answer is None else _read_answer(gateway, partition, task_id, wait, answer)
    return WaitLook(stored is not None, found)


async def read_waits(gateway: Gateway, partition: Partition, task_id: str) -> Waits:
    """Return the open waits of a task, the oldest first, and the answers that came early. None for an unknown task."""
    found: list[OpenWait] = []
    early: dict[str, Answer] = {}
    answered: set[str] = set()
    inbox = partition.inbox(task_id)
    async for field, stored in scan_fields(gateway, inbox, "[wae]:*"):
        kind, _, name = field.partition(":")
        if kind == "a":
            answered.add(name)
        elif kind == "w":
            found.append(_read_wait(gateway, partition, task_id, name, stored))
        else:
            early[name] = _read_answer(gateway, partition, task_id, name, stored, early=True)
    waits = [replace(wait, answered=True) if wait.id in answered else wait for wait in found]
    return Waits(sorted(waits, key=_opened_at), early)


async def find_answer(gateway: Gateway, partition: Partition, task_id: str, wait: str) -> GivenAnswer | None:
    """Return who has answered a wait, by its id or name; None if no answer is stored or among the latest events.

    Raises `DecryptionError` if the task's data is encrypted, and this process has no key.
    """
    wait = _plain_id(wait)
    if (answer := (await look_at_wait(gateway, partition, task_id, wait)).answer) is not None:
        return GivenAnswer(answer.by, answer.at)
    for event in await read_last_events(gateway, partition, task_id, _LATEST):
        data = event.data
        if event.type == "answered" and isinstance(data, dict) and wait in (data.get("wait"), _named(data)):
            by = data.get("by")
            return GivenAnswer(by if isinstance(by, str) else "", event.at)
    return None


def _named(data: Mapping[str, Any]) -> str:
    wait = data.get("wait")
    return wait_name(wait) if isinstance(wait, str) else ""


async def read_live_waits(gateway: Gateway, partition: Partition, task_id: str) -> Waits:
    """Return the waits of a task as `read_waits`; a task that has ended has no open ones, whatever it has left open."""
    waits = await read_waits(gateway, partition, task_id)
    if waits.open:
        state = await gateway.command("HGET", partition.record(task_id), "state")
        if state in (None, b"succeeded", b"cancelled"):
            return waits._replace(open=[])
    return waits


def _opened_at(wait: OpenWait) -> tuple[int, int, str]:
    return wait.opened, count_of(wait.head.rpartition(" ")[2].encode()), wait.id


def _read_wait(gateway: Gateway, partition: Partition, task_id: str, wait: str, stored: bytes) -> OpenWait:
    """Decode an open wait. One that cannot be read hides no other."""
    opened, until, entry, *rest = [*stored.split(b" ", 3), b"", b"", b""]
    head = b" ".join((opened, until, entry)).decode("ascii", "replace")
    since, limit = count_of(opened), count_of(until) or None
    try:
        fields = plain_data(gateway.encryptor.of(partition, task_id).decrypt(f"wait:{wait}", rest[0]))
        if not isinstance(fields, dict):
            raise ValueError("it must be a JSON object")
        who, why, token, shows, name = (_text(fields, name) for name in ("who", "why", "token", "shows", "opening"))
        schema, approvers = fields.get("schema"), fields.get("approvers")
    except (DecryptionError, ValueError) as error:
        problem = str(error) if isinstance(error, DecryptionError) else f"could not decode the wait: {error}"
        return OpenWait(wait, opened=since, until=limit, problem=problem, head=head)
    return OpenWait(
        wait,
        who or "",
        why or "",
        since,
        limit,
        schema if isinstance(schema, dict) else None,
        shows,
        fields.get("shown"),
        token,
        head=head,
        opening=name or "",
        approvers=[str(approver) for approver in approvers] if isinstance(approvers, list) else None,
    )


def _text(fields: dict[str, Any], name: str) -> str | None:
    value = fields.get(name)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{name} must be a text")
    return value


def _read_answer(
    gateway: Gateway, partition: Partition, task_id: str, wait: str, stored: bytes, *, early: bool = False
) -> Answer:
    """Decode an answer. wait: the id of its wait, or the name if it is kept for the first.

    One that came before its wait was moved to it as it was, so it is of the other kind.
    """
    at, digest, data, *_ = [*stored.split(b" ", 2), b"", b""]
    cipher = gateway.encryptor.of(partition, task_id)
    known = (count_of(at), digest.decode("ascii", "replace"))
    problem, no_key = "", False
    kinds = (
        [(f"early:{wait_name(wait)}", True)]
        if early
        else [(f"answer:{wait}", False), (f"early:{wait_name(wait)}", True)]
    )
    for kind, is_early in kinds:
        try:
            fields = plain_data(cipher.decrypt(kind, data))
            if not isinstance(fields, dict) or "value" not in fields:
                raise ValueError("it must be a JSON object with a value")
            if bool(fields.get("early")) is not is_early:
                raise ValueError("it is of another kind")
            by, question, signature = (_text(fields, name) or "" for name in ("by", "question", "signature"))
            return Answer(fields["value"], by, known[0], question, signature, known[1], is_early)
        except (DecryptionError, ValueError) as error:
            problem, no_key = problem or f"could not read the answer: {error}", isinstance(error, KeyMissing)
    return Answer(None, at=known[0], digest=known[1], problem=problem, no_key=no_key)


async def answer_wait(
    gateway: Gateway,
    partition: Partition,
    task_id: str,
    wait: str,
    value: Any,
    *,
    by: str = "",
    answer_id: str | None = None,
    limit: int = DEFAULT_PAYLOAD_LIMIT,
    token: str | None = None,
    shows: str | None = None,
    question: str | None = None,
    approver: ApproverKey | Path | str | None = None,
) -> AnswerReceipt:
    """Answer a wait of a task, or of its last successor.

    An answer by name goes to the open wait of the successor. One by id is for the question of this task, and one for
    which the successor has no open wait may be a second answer to the last question of this task: they are refused
    there if this task has asked by that name.

    Args:
        wait: Id of the wait (`approval#2`; `approval#1` is the first one), or its name.
        value: JSON data, pydantic models included.
        by: Name of the sender. An answer that is signed has the name of the approver, one from a task's handler its id.
        answer_id: An answer that is sent again under the same id is stored once.
        limit: Largest size in bytes.
        token: By which the wait was found: one with another token does not take the answer.
        shows: Digest of what the sender was shown: a wait that shows something else does not take the answer. None for
            what it shows now.
        question: `OpenWait.digest` of the question that the sender has read: a wait with another question, or that was
            opened again since, does not take the answer. None for the question that is open now.
        approver: Key that signs the answer, or its file. None for the key of this process, if it has one.

    Raises:
        WaitNotFound: The task has no such wait, or several.
        AnswerRefused: It takes no answer: it has one, was closed, or has timed out; or the task itself answers.
        ApproverNeeded: An approver must sign it, and the caller has no key of one who may.
        ValueError: A task names another sender than itself.
        InvalidAnswer: The value does not fit its JSON schema.
        TaskNotFound, TaskEnded: There is no such task, or it has ended.
        NoKey, DecryptionError: The task's data is encrypted, and this process cannot read the wait.
        PayloadTooLarge: The value is over the limit.
        TypeError: The value is not JSON.
    """
    try:
        encoded = as_json(value)
    except (PydanticSerializationError, ValueError, RecursionError) as error:
        raise TypeError(f"an answer must be JSON-serialisable: {error}") from None
    check_size("the answer", len(encoded) + len(orjson.dumps([by, wait])) + _OVERHEAD, limit)
    if not is_wait_id(wait):
        check_name("name of a wait", wait)
    by_id = token is not None or is_wait_id(wait)
    digest, by = answer_digest(answer_id or new_task_id()), acting_sender("an answer", by)
    sent = _Sent(_plain_id(wait), by_id, encoded, by, digest, token, shows, question, signer=_signer(gateway, approver))
    known: Partition | None = partition
    for _ in range(_REDIRECTS):
        if known is None:
            break
        if (acting := ACTING_TASK.get()) is not None and acting == (known.namespace, known.queue, task_id):
            raise AnswerRefused(task_id, wait, "a task cannot answer its own question")
        target, (reply, *rest) = await _send(gateway, known, task_id, sent)
        if reply in (b"answered", b"kept", b"used"):
            return AnswerReceipt(
                task_id, sent.wait if reply == b"used" else target, State(rest[0].decode()), reply == b"kept"
            )
        if reply == b"missing":
            break
        if reply != b"moved":
            raise _refusal(reply, rest, task_id, target)
        asked = sent.asked or await _has_asked(gateway, known, task_id, sent.wait)
        if asked and sent.by_id and token is None:
            problem = f"the task continues as {rest[0].decode()}: an answer by id is for the question that it had here"
            raise AnswerRefused(task_id, wait, problem)
        sent = sent._replace(asked=asked)
        task_id = rest[0].decode()
        known = await find_task(gateway, Namespace(partition.namespace), task_id)
    raise TaskNotFound(task_id, f"namespace {partition.namespace!r} on {gateway.address.shown}")


class _Sent(NamedTuple):
    """An answer on its way. wait: id or name, by_id says which. encoded: its JSON. shows: digest of what was shown.

    question: digest of the question that its sender has read. signer: key that signs it.
    asked: whether a task that this one continues has asked by this name.
    """

    wait: str
    by_id: bool
    encoded: bytes
    by: str
    digest: str
    token: str | None
    shows: str | None = None
    question: str | None = None
    asked: bool = False
    signer: ApproverKey | None = None


def _signer(gateway: Gateway, approver: ApproverKey | Path | str | None) -> ApproverKey | None:
    """Return the key that signs an answer. A task signs with none of the process that runs it."""
    if isinstance(approver, (str, Path)):
        from .security.approvers import ApproverKey

        return ApproverKey.read(Path(approver))
    if approver is not None or gateway.answer_keys is None or ACTING_TASK.get() is not None:
        return approver
    return gateway.answer_keys.own


def _signed(gateway: Gateway, partition: Partition, task_id: str, wait: OpenWait, sent: _Sent) -> dict[str, Any]:
    """Return the sender of an answer, and the signature if it has a key.

    Raises `ApproverNeeded` if the wait, or what this process knows of approvers, says that the run would drop it.
    """
    allowed, signer = wait.approvers, sent.signer
    known = None if gateway.answer_keys is None else gateway.answer_keys.approvers
    if known is not None:
        allowed = sorted(known.who_may_answer(wait.who))
    if signer is None:
        if allowed is not None:
            needed = f"an approver must sign it: set PERDURE_APPROVER_KEY_FILE to the key of {_listed(allowed)}"
            raise ApproverNeeded(task_id, wait.id, needed)
        return {"by": sent.by}
    if allowed is not None and signer.name not in allowed:
        problem = f"approver {signer.name!r} may not answer it: it needs the signature of {_listed(allowed)}"
        raise ApproverNeeded(task_id, wait.id, problem)
    place = (partition.namespace, partition.queue, task_id, wait.id)
    signature = signer.sign(_statement(place, wait.digest, plain_data(sent.encoded), signer.name))
    return {"by": signer.name, "signature": signature}


def _listed(names: Sequence[str]) -> str:
    return listed([repr(name) for name in names], _SHOWN_IDS)


async def _has_asked(gateway: Gateway, partition: Partition, task_id: str, wait: str) -> bool:
    """Return whether a task has opened a wait of this name."""
    counts = await gateway.command("HGET", partition.inbox(task_id), f"c:{wait_name(wait)}")
    return count_of((counts or b"").partition(b" ")[0]) > 0


async def _send(gateway: Gateway, partition: Partition, task_id: str, sent: _Sent) -> tuple[str, list[bytes]]:
    """Store an answer. Return the id or the name of its wait, and the reply of the script.

    An open wait that has changed since it was read is read again.
    """
    cipher = gateway.encryptor.of(partition, task_id)
    keys = [partition.record(task_id), partition.inbox(task_id), partition.due, partition.nudge]
    for _ in range(_TRIES):
        found = await _target(gateway, partition, task_id, sent)
        fields: dict[str, Any] = {"value": orjson.Fragment(sent.encoded), "by": sent.by}
        if found is not None:
            if sent.shows not in (None, found.shows):
                raise AnswerRefused(task_id, found.id, "it shows something else now than what this answer is for")
            if sent.question not in (None, found.digest):
                raise AnswerRefused(task_id, found.id, "it asks another question now than what this answer is for")
            if found.schema is not None:
                _check_schema(task_id, found, sent.encoded)
            shown, kind, target = found.id, f"answer:{found.id}", (found.id, found.head)
            fields |= {"question": found.digest, **_signed(gateway, partition, task_id, found, sent)}
        else:
            if not sent.by_id and gateway.answer_keys is not None and gateway.answer_keys.approvers is not None:
                raise ApproverNeeded(
                    task_id, sent.wait, "none of this name is open, and approvers answer what is asked"
                )
            fields["early"] = True
            shown, kind, target = sent.wait, f"early:{sent.wait}", (sent.wait if sent.by_id else "", "")
        stored = cipher.encrypt(kind, orjson.dumps(fields))
        args: list[Argument] = [task_id, wait_name(shown), *target, wake_word("answer", shown), sent.digest, stored]
        kept = 0 if sent.asked or sent.shows is not None else MAX_EARLY
        reply = await gateway.run(_ANSWER, keys, [*args, kept, EARLY_BYTES])
        if reply[0] == b"full" and not kept:
            before = f", and the task that {task_id} continues had one" if sent.asked else ""
            raise AnswerRefused(task_id, sent.wait, f"none of this name is open{before}: an answer is for one question")
        if reply[0] != b"changed":
            return shown, reply
        if found is None and sent.by_id:
            waits = [wait.id for wait in (await read_waits(gateway, partition, task_id)).open]
            problem = f"open are: {listed(waits, _SHOWN_IDS)}" if waits else "no wait of the task is open"
            raise WaitNotFound(task_id, sent.wait, problem)
    raise AnswerRefused(task_id, sent.wait, "its waits change all the time; try again")


def _refusal(reply: bytes, rest: Sequence[bytes], task_id: str, wait: str) -> QueueError:
    """Return the error of an answer that was not stored."""
    match reply:
        case b"ended":
            return TaskEnded(task_id, rest[0].decode(), what="takes no more answers")
        case b"encrypted":
            return NoKey(f"an answer to task {task_id}", "the task")
        case b"late":
            problem = "its time has passed"
        case b"taken" if rest[0] == b"early":
            problem = "an answer is kept already for the first wait of this name"
        case b"taken":
            problem = "it has an answer already"
        case b"closed":
            waits = counted(int(rest[0]), "wait")
            problem = f"{waits} of this name had an end already, and no other is open: an answer is for one question"
        case _:
            kept = counted(int(rest[0]), "answer")
            problem = f"no wait of this name is open yet, and {kept} with {int(rest[1]):,} bytes came early already"
    return AnswerRefused(task_id, wait, problem)


def is_wait_id(text: str) -> bool:
    """Return whether a text is an id of a wait and not a name: it has a scope or a number."""
    return "/" in text or "#" in text


def _plain_id(text: str) -> str:
    return text.removesuffix("#1")


async def _target(gateway: Gateway, partition: Partition, task_id: str, sent: _Sent) -> OpenWait | None:
    """Return the open wait that an answer is for, or None. Raises `WaitNotFound` if there are several."""
    wait = sent.wait
    if sent.by_id:
        stored = await gateway.command("HGET", partition.inbox(task_id), f"w:{wait}")
        found = [] if stored is None else [_read_wait(gateway, partition, task_id, wait, stored)]
        if sent.token is not None and not (found and found[0].token == sent.token):
            raise WaitNotFound(task_id, wait, f"no open wait has the token {sent.token!r}")
    else:
        waits = (await read_waits(gateway, partition, task_id)).open
        found = [one for one in waits if one.name == wait]
        if len(found) > 1:
            ids = listed([one.id if is_wait_id(one.id) else f"{one.id}#1" for one in found], _SHOWN_IDS)
            raise WaitNotFound(task_id, wait, f"several waits of this name are open ({ids}): answer one by its id")
    if found and found[0].problem is not None:
        raise AnswerRefused(task_id, found[0].id, found[0].problem)
    return found[0] if found else None


def _check_schema(task_id: str, wait: OpenWait, encoded: bytes) -> None:
    """Raise `InvalidAnswer` if an answer does not fit."""
    if problems := answer_problems(wait.schema or {}, encoded):
        raise InvalidAnswer(task_id, wait.id, problems)


def answer_problems(schema: dict[str, Any], encoded: bytes) -> list[str]:
    """Return what is wrong with an answer, each with its path from `answer`.

    A schema that cannot be used checks nothing: the run does.

    Args:
        schema: JSON schema of the answer, or of a part of it with the definitions of the whole.
        encoded: The answer as JSON.
    """
    whole = {"type": "object", "properties": {"answer": schema}}
    definitions = schema.get("$defs")
    if definitions is not None:
        whole["$defs"] = definitions
    try:
        return find_problems(whole, b'{"answer":' + encoded + b"}")
    except UnusableSchema:
        return []


# the index


class WaitingTask(NamedTuple):
    """A task with open waits."""

    partition: Partition
    task_id: str
    waits: Waits


async def list_waiting(
    gateway: Gateway, partitions: Sequence[Partition], *, tenant: str | None = None
) -> AsyncIterator[WaitingTask]:
    """Yield the tasks with open waits that have not ended, those that have waited longest first, by partition.

    tenant: only tasks of this one; None for all.
    """
    for partition in partitions:
        start = 0
        while ids := await _indexed(gateway, partition, start):
            start += len(ids)
            live = [task_id for task_id, state in ids if state not in _ENDED and belongs_to(tenant, task_id)]
            for task_id in live:
                waits = await _readable_waits(gateway, partition, task_id)
                if waits.open:
                    yield WaitingTask(partition, task_id, waits)


async def _readable_waits(gateway: Gateway, partition: Partition, task_id: str) -> Waits:
    """Return the waits of a task; of an inbox that cannot be read one wait with the problem, which hides no other."""
    try:
        return await read_waits(gateway, partition, task_id)
    except UnreadableRecord as error:
        return Waits([OpenWait("?", problem=str(error))], {})


class WaitingPage(NamedTuple):
    """A page of tasks with open waits, those that have waited longest first.

    Attributes:
        tasks: Those that have not ended and whose waits are open.
        following: Cursor of the next page; empty at the end.
        read: Tasks that were read for this page.
        of: Tasks in the index.
    """

    tasks: list[WaitingTask]
    following: str
    read: int
    of: int


_CURSOR: Final = re.compile(r"[0-9]{1,16}-.{1,200}", re.ASCII)


async def page_waiting(
    gateway: Gateway, partitions: Sequence[Partition], *, limit: int, after: str = "", tenant: str | None = None
) -> WaitingPage:
    """Return a page of the tasks with open waits.

    Args:
        limit: Tasks that are read at most.
        tenant: Only tasks of this one; None for all. Others are read, and not counted.

    Raises:
        ValueError: `after` is not a cursor that this function returned.
    """
    if after and not _CURSOR.fullmatch(after):
        raise ValueError(f"cursor must be one that an earlier page ended with, got {after!r}")
    since, _, last = after.partition("-")
    position = (int(since or 0), last)
    pages = [
        [(since, task_id, at) for since, task_id in await _indexed_after(gateway, partition, position, limit + 1)]
        for at, partition in enumerate(partitions)
    ]
    of = sum(await gateway.pipeline([("ZCARD", partition.waiting) for partition in partitions]))
    merged = list(islice(heapq.merge(*pages), limit + 1))
    chosen, tasks = merged[:limit], list[WaitingTask]()
    states = await gateway.pipeline([("HGET", partitions[at].record(name), "state") for _, name, at in chosen])
    for (_, task_id, at), state in zip(chosen, states, strict=True):
        if state not in _ENDED and belongs_to(tenant, task_id):
            waits = await _readable_waits(gateway, partitions[at], task_id)
            if waits.open:
                tasks.append(WaitingTask(partitions[at], task_id, waits))
    following = f"{chosen[-1][0]}-{chosen[-1][1]}" if len(merged) > limit else ""
    if tenant is not None:  # the number of all tasks is not for a tenant
        return WaitingPage(tasks, following, len(tasks), len(tasks))
    return WaitingPage(tasks, following, len(chosen), of)


async def _indexed_after(
    gateway: Gateway, partition: Partition, position: tuple[int, str], limit: int
) -> list[tuple[int, str]]:
    """Return times and ids of the tasks of an index behind a position. What is no id was written by another program."""
    found: list[tuple[int, str]] = []
    start = 0
    while len(found) < limit:
        page = await gateway.command(
            "ZRANGE", partition.waiting, position[0], "+inf", "BYSCORE", "LIMIT", start, _PAGE, "WITHSCORES"
        )
        entries = [
            (int(min(max(float(score), 0.0), _FARTHEST)), name.decode("utf-8", "replace"))
            for name, score in zip(page[::2], page[1::2], strict=True)
        ]
        found += [entry for entry in entries if entry > position and is_task_id(entry[1])]
        if len(entries) < _PAGE:
            break
        start += _PAGE
    return found[:limit]


_ENDED: Final = frozenset({None, b"succeeded", b"cancelled", b"dead"})


async def _indexed(gateway: Gateway, partition: Partition, start: int) -> list[tuple[str, bytes | None]]:
    """Return a page of the index: ids and states of tasks. What is no id was written by another program."""
    found = await gateway.command("ZRANGE", partition.waiting, start, start + _PAGE - 1)
    ids = [name.decode("utf-8", "replace") for name in found]
    states = await gateway.pipeline([("HGET", partition.record(task_id), "state") for task_id in ids])
    return list(zip(ids, states, strict=True))


async def forget_ended_waits(gateway: Gateway, partition: Partition) -> int:
    """Remove the tasks that have ended from the index of open waits. Return how many."""
    start = removed = 0
    while ids := await _indexed(gateway, partition, start):
        for task_id, _ in ids:
            keys = [partition.waiting, partition.record(task_id), partition.inbox(task_id)]
            gone = await gateway.run(_FORGET, keys, [task_id])
            removed += gone
            start += 1 - gone
    return removed


# tokens


class TokenHolder(NamedTuple):
    """Place of the wait that has a token."""

    queue: str
    partition: int
    task_id: str
    wait: str


async def claim_token(
    gateway: Gateway, partition: Partition, task_id: str, wait: str, token: str, *, timeout_ms: int | None
) -> TokenHolder | None:
    """Claim the token of a wait that is stored. Return the open wait that has it; None if it is claimed. Idempotent.

    timeout_ms: milliseconds until the time-out of the wait, if it has one.
    """
    own = TokenHolder(partition.queue, partition.index, task_id, wait)
    ttl = _KEPT if timeout_ms is None else max(0, timeout_ms) + _KEPT_AFTER
    place = Namespace(partition.namespace, tenant_of(task_id)).token(token)
    cipher = gateway.encryptor.of(place.place, place.digest)
    data, read = cipher.encrypt("token", orjson.dumps([*own])), b""
    while (held := await gateway.run(_CLAIM, [place.key], [data, read, ttl])) is not None:
        holder = _holder(gateway, place, held)
        if holder is not None and holder != own and await _is_open(gateway, partition.namespace, holder, token):
            return holder
        read = held
    return None


async def free_token(gateway: Gateway, partition: Partition, task_id: str, wait: str, token: str) -> None:
    """Free the token of a closed wait, unless another one has taken it over. Idempotent."""
    place = Namespace(partition.namespace, tenant_of(task_id)).token(token)
    held = await gateway.command("GET", place.key)
    own = TokenHolder(partition.queue, partition.index, task_id, wait)
    if held is not None and _holder(gateway, place, held) == own:
        await gateway.run(_CLAIM, [place.key], ["", held, 0])


async def find_token(gateway: Gateway, namespace: Namespace, token: str) -> tuple[Partition, TokenHolder] | None:
    """Return the place of the wait with a token, None if no wait has it."""
    place = namespace.token(token)
    held = await gateway.command("GET", place.key)
    holder = None if held is None else _holder(gateway, place, held)
    if holder is None:
        return None
    partition = await _place(gateway, namespace, holder)
    return None if partition is None else (partition, holder)


async def answer_token(gateway: Gateway, namespace: Namespace, token: str, value: Any, **options: Any) -> AnswerReceipt:
    """Answer the wait with a token. See `answer_wait` for options and errors."""
    check_token(token)
    found = await find_token(gateway, namespace, token)
    if found is None:
        raise WaitNotFound("", token, f"no open wait has the token {token!r}")
    partition, holder = found
    return await answer_wait(gateway, partition, holder.task_id, holder.wait, value, token=token, **options)


def check_token(token: object) -> str:
    """Return a token. Raises `ValueError` for one that cannot be used."""
    if not isinstance(token, str) or not 0 < len(token) <= TOKEN_LENGTH:
        raise ValueError(f"token must be a text of 1 to {TOKEN_LENGTH} characters, got {token!r}")
    return token


def _holder(gateway: Gateway, place: TokenKey, held: bytes) -> TokenHolder | None:
    """Decode what a token refers to; None for what no run has written."""
    try:
        fields = plain_data(gateway.encryptor.of(place.place, place.digest).decrypt("token", held))
        queue, index, task_id, wait = fields
        return TokenHolder(str(queue), int(index), str(task_id), str(wait))
    except (DecryptionError, ValueError, TypeError):
        return None


async def _place(gateway: Gateway, namespace: Namespace, holder: TokenHolder) -> Partition | None:
    """Return the partition of a token's task, which another number of partitions may have moved."""
    try:
        partition = Partition(namespace.name, check_name("queue", holder.queue), holder.partition)
        if await gateway.command("EXISTS", partition.record(holder.task_id)):
            return partition
        return await find_task(gateway, namespace, holder.task_id, holder.queue)
    except (ValueError, Refused):
        return None


async def _is_open(gateway: Gateway, namespace: str, holder: TokenHolder, token: str) -> bool:
    """Return whether the wait of a token is open, and its task has not ended."""
    partition = await _place(gateway, Namespace(namespace), holder)
    if partition is None:
        return False
    inbox, record = partition.inbox(holder.task_id), partition.record(holder.task_id)
    stored, state = await gateway.pipeline([("HGET", inbox, f"w:{holder.wait}"), ("HGET", record, "state")])
    if stored is None or state in (None, b"succeeded", b"cancelled"):
        return False
    wait = _read_wait(gateway, partition, holder.task_id, holder.wait, stored)
    return wait.problem is not None or wait.token == token
