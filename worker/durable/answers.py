"""Waits for answers: `ctx.wait_for`, `ctx.open_wait` and `ctx.ask`, and what becomes of them in later runs.

A wait is opened in one act: its saved beginning (`Kind.SAVED`), what senders read (`Kind.WAIT`), and its event. Its
token is claimed after that, in each run, so that a run which dies in between leaves no wait without its token. An
answer is used in one act as well: the record of the call, the end of the wait (`Kind.WAIT_CLOSED`), and the event. So a
run that is killed uses no answer twice, and loses none. The script refuses answers after the time of a wait, and a run
reads the time before it looks: a wait that has timed out has no answer that its sender believes to be stored.

A call finds its record by who is asked, what is shown and why, then by order. A call that shows something else, or asks
another person, is another question: an open wait is opened again under its id, which drops an answer to the former one;
a recorded answer is not used, but raises `StepMismatch`.

Each opening has a random name, which is saved with the digest of the question. An answer must have this digest: a copy
of one to another question, to an earlier opening, or to the run before a fresh start is dropped. If the worker knows
approvers, the answer must be signed by one whom the question names. A dropped answer leaves the wait open, and an event
that says why.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Generic, NamedTuple, Self, TypeVar

import orjson
from pydantic import PydanticUserError, ValidationError
from pydantic_core import PydanticSerializationError, from_json

from ...queues.defaults import MAX_SECONDS
from ...queues.delivery.checkpoint import Entry, Kind
from ...queues.delivery.settlement import WakeCondition, message_after
from ...queues.durations import Moment, seconds_until
from ...queues.envelope import check_size
from ...queues.errors import PayloadTooLarge, Refused
from ...queues.json_form import as_json
from ...queues.keys import check_name
from ...queues.runtime import RUNTIME
from ...queues.schemas import UnusableSchema, check_schema
from ...queues.transport.backoff import retry_while_unavailable
from ...queues.waits import (
    RECORDS,
    Answer,
    check_token,
    claim_token,
    closing,
    free_token,
    look_at_wait,
    opening,
    question_digest,
    void_answer,
    wait_id,
    wait_name,
)
from ...queues.wording import shortened
from ..errors import StepDefinitionError, StepMismatch, TokenTaken, WaitClosed, WaitTimedOut, first_problem
from ..log import FirstOfEach, log_wait, logger
from .attempt_end import AttemptEnd
from .journal.event import Event
from .journal.event_redaction import redacted_data
from .journal.run_events import AnswerDropped, Answered, Waited, WaitStarted
from .journal.step_record import StepRecord
from .json_types import type_problem
from .messaging import InboxOwner
from .promises import drop_owed, save_owed
from .run import Run
from .steps.codec import Codec
from .steps.current import DEFAULT_OPTIONS, StepOptions, check_call
from .steps.keys import changed_scope, forget_steps
from .steps.matching import read_recorded_steps
from .waiting import (
    OPEN,
    REQUIRED,
    TIMED_OUT,
    Closing,
    Condition,
    WaitEnd,
    look_again,
    match_wait,
    note_taken,
    redis_time,
    save_wait,
    saved_wait,
    taking,
    wait_until,
)

T = TypeVar("T")

QUESTION: Final = "question"
"""Name of the waits of `ctx.ask` without a name."""

_SHOWN_BYTES: Final = 16_384
"""Largest value that senders can read; of a larger one they have the digest only."""

_SHOWN_TEXT: Final = 200
"""Most characters of a reason, and of what is shown, in errors."""


class AnswerCodec(Codec):
    """Codec of answers, which come from other programs: a field has its alias there, or its name."""

    def schema(self) -> dict[str, Any] | None:
        if self._type is None:
            return None
        try:
            return self._type.adapter.json_schema()
        except PydanticUserError:
            return None

    def decode(self, data: bytes) -> Any:
        return from_json(data) if self._type is None else self._type.read(data, by_alias=True)


_ANY: Final = AnswerCodec(Any)

_codecs: dict[Any, tuple[AnswerCodec, dict[str, Any] | None]] = {}
_reported: Final = FirstOfEach()


@dataclass(frozen=True, slots=True)
class WaitCall:
    """The checked arguments of a call that waits for an answer.

    Attributes:
        who, why: Person or group that is asked, and the reason or question.
        type: Declared type of the answer. schema: its JSON schema.
        seconds: Time until it times out.
        shows, shown: Digest of what people are shown, and its JSON data, unless that is too large.
        asked: Text of the question for errors.
        digest: Hash by which its record is found: of the question, a colon, of the reason.
    """

    name: str
    who: str
    why: str
    codec: AnswerCodec
    schema: dict[str, Any] | None
    seconds: float | None
    default: Any
    shows: str | None
    shown: Any
    token: str | None
    asked: str
    digest: str

    @property
    def takes_early(self) -> bool:
        """Whether an answer that came before the wait is for it: none that people were to see, or had a token for."""
        return self.shows is None and self.token is None


def describe_wait(
    run: Run,
    name: str,
    kind: Any,
    *,
    timeout: Moment | None = None,
    default: Any = REQUIRED,
    who: str = "",
    why: str = "",
    shows: Any = None,
    token: str | None = None,
    asked: str = "",
) -> WaitCall:
    """Check the arguments of a call. Raises `StepDefinitionError`, `PayloadTooLarge`."""
    try:
        check_name("name of a wait", name)
        if token is not None:
            check_token(token)
    except ValueError as error:
        raise StepDefinitionError(str(error)) from None
    texts: dict[str, object] = {"who": who, "why": why}
    for text, value in texts.items():
        if not isinstance(value, str):
            raise StepDefinitionError(f"{text} of wait {name!r} must be a text, got {value!r}")
    seconds = None if timeout is None else seconds_until(timeout, "timeout")
    if seconds is not None and not seconds > 0:
        raise StepDefinitionError(f"timeout of wait {name!r} must be more than 0 seconds, got {seconds}")
    codec, schema = _codec(name, kind)
    digest, shown = (None, None) if shows is None else _shown(name, shows)
    if run.redact is not None:
        why, shown = run.redact(why), redacted_data(shown, run.redact)
    question, reason = _hash([who, digest]), _hash([why])
    asked = asked or _asked(name, who, why, shown)
    call = WaitCall(
        name, who, why, codec, schema, seconds, default, digest, shown, token, asked, f"{question}:{reason}"
    )
    check_size(f"wait {name!r}", len(orjson.dumps(wait_fields(call))), run.payload_limit)
    return call


def _asked(name: str, who: str, why: str, shown: Any) -> str:
    """Return a question as errors name it."""
    seen = "" if shown is None else f" for {shortened(orjson.dumps(shown).decode(), _SHOWN_TEXT)}"
    return f"{name}{f' by {who}' if who else ''}{f' ({shortened(why, _SHOWN_TEXT)})' if why else ''}{seen}"


def _hash(data: Any) -> str:
    return hashlib.blake2b(orjson.dumps(data), digest_size=12).hexdigest()


def _codec(name: str, kind: Any) -> tuple[AnswerCodec, dict[str, Any] | None]:
    """Return the codec of a type, and the schema that senders check answers by. Raises `StepDefinitionError`."""
    if kind is Any or kind is inspect.Signature.empty:
        return _ANY, None
    try:
        found = _codecs.get(kind)
    except TypeError:  # an annotation that cannot be hashed
        found = None
    if found is not None:
        return found
    try:
        codec = AnswerCodec(kind)
    except PydanticUserError as error:
        raise StepDefinitionError(f"type of wait {name!r} cannot be used: {type_problem(kind, error)}") from None
    if codec.problem is not None:
        raise StepDefinitionError(f"type of wait {name!r} cannot be used: {codec.problem}")
    schema = codec.schema()
    if schema is not None:
        try:
            check_schema(schema, thorough=False)
        except UnusableSchema:
            schema = None  # the run checks answers all the same
    with suppress(TypeError):
        _codecs[kind] = codec, schema
    return codec, schema


def _shown(name: str, shows: Any) -> tuple[str, Any]:
    """Return the digest of what people are shown, and its data. Raises `StepDefinitionError`."""
    try:
        plain = from_json(as_json(shows))
    except (PydanticSerializationError, ValueError, RecursionError) as error:
        raise StepDefinitionError(f"shows of wait {name!r} must be JSON-serialisable: {error}") from None
    data = orjson.dumps(plain, option=orjson.OPT_SORT_KEYS)
    digest = hashlib.blake2b(data, digest_size=32).hexdigest()
    return digest, plain if len(data) <= _SHOWN_BYTES else None


def wait_fields(call: WaitCall) -> dict[str, Any]:
    """Return what senders read of a wait."""
    found = {"who": call.who, "why": call.why, "schema": call.schema, "shows": call.shows, "token": call.token}
    found["shown"] = call.shown
    return {name: value for name, value in found.items() if value not in (None, "")}


class Opened(NamedTuple):
    """One opening of a wait.

    Attributes:
        fields: What senders read of it.
        name: Random name of this opening.
        question: Digest of the question, which an answer to it has.
    """

    fields: dict[str, Any]
    name: str
    question: str

    @classmethod
    def of(cls, run: Run, wait: str, call: WaitCall, name: str = "") -> Self:
        """Return a new opening, or the one of a name again."""
        name = name or RUNTIME.token(12)
        keys = run.gateway.answer_keys
        fields = wait_fields(call) | {"opening": name}
        if keys is not None and keys.approvers is not None:
            fields["approvers"] = sorted(keys.approvers.who_may_answer(call.who))
        return cls(fields, name, question_digest(wait, fields))


def void_here(run: Run, wait: str, who: str, question: str, answer: Answer) -> str | None:
    """Return why an answer is void for a wait of a run, see `void_answer`."""
    return void_answer(run.gateway, run.delivery.partition, run.id, wait, answer, question=question, who=who)


async def open_wait(run: Run, name: str, kind: Any, options: StepOptions, **given: Any) -> Wait[Any]:
    """Open a wait. See `Context.open_wait`."""
    return await _begin(run, describe_wait(run, name, kind, **given), options)


async def ask(
    run: Run,
    who: str,
    question: str,
    kind: Any,
    *,
    name: str | None,
    timeout: Moment | None,
    default: Any,
    options: StepOptions,
) -> Any:
    """Ask a question. See `Context.ask`. Without a name, the text is what was shown."""
    shows = question if name is None else None
    asked = orjson.dumps([who, question]).decode()[1:-1]
    given: dict[str, Any] = {"timeout": timeout, "default": default, "who": who, "why": question, "shows": shows}
    call = describe_wait(run, QUESTION if name is None else name, kind, **given, asked=asked)
    return await (await _begin(run, call, options)).result()


async def _begin(run: Run, call: WaitCall, options: StepOptions) -> Wait[Any]:
    """Return the wait of a call: one that an earlier run has opened or recorded, or a new one."""
    with run.calling():
        return await _begin_in_call(run, call, options)


async def _begin_in_call(run: Run, call: WaitCall, options: StepOptions) -> Wait[Any]:
    record = RECORDS + call.name
    await check_call(run, record, own=True)
    _check_options(options)
    key, recorded, former = await match_wait(run, record, call.digest)
    if former is not None and _same_question(StepRecord.decode(former).digest, call):
        recorded = StepRecord.decode(former).result
    if recorded is not None:
        run.touch()
        return Wait(run, call, key, options, orjson.loads(recorded))
    if run.stopping:
        await run.boundary()
    wait = Wait[Any](run, call, key, options)
    started = saved_wait(run, key)
    if former is not None:
        asked = StepRecord.decode(former).arguments
        if options.on_mismatch != "rerun" and changed_scope(run.keys.within) not in run.history.saved:
            raise StepMismatch(key, asked, call.asked, after_new=run.steps_recorded > 0, question=True)
        await wait._open(withdrawn=asked, following=True)
    elif started is None:
        await wait._open()
    elif not _same_question(started["h"], call):
        await wait._open(withdrawn=started["a"])
    else:
        wait._resume(started)
        await wait._claim()
    return wait


def _same_question(digest: str, call: WaitCall) -> bool:
    return digest.partition(":")[0] == call.digest.partition(":")[0]


def _check_options(options: StepOptions) -> None:
    plain = DEFAULT_OPTIONS[options.durability]
    if options is not plain and options not in (plain, StepOptions(durability=plain.durability, on_mismatch="rerun")):
        raise StepDefinitionError("options of a wait must be durability and on_mismatch; its time-out is its own")


class _OpenedNames(set[str]):
    """Names of the waits that a run has opened."""


class _Gone:
    """Result of a look at a wait that the inbox does not have: of an imported task, or Redis has lost it."""


GONE: Final = _Gone()


class AnswerCame(Condition):
    """The condition that a wait has an answer."""

    __slots__ = ("_run", "_wait")

    def __init__(self, run: Run, key: str, wait: str, until: int | None) -> None:
        super().__init__(key, "answer", until)
        self._run = run
        self._wait = wait

    @property
    def parked(self) -> WakeCondition:
        return ("answer", self._wait)

    @property
    def also(self) -> Sequence[WakeCondition]:
        """An agent is woken by messages, too: it delivers them, and corrections, before it asks again."""
        run = self._run
        if run.observer(InboxOwner) is None:
            return ()
        return (message_after(max(run.recorder.mail, run.history.mail)),)

    async def look(self) -> Answer | _Gone | WaitEnd:
        run = self._run
        found = await look_at_wait(run.gateway, run.delivery.partition, run.id, self._wait)
        if not found.open:
            return GONE
        if found.answer is not None and found.answer.no_key:
            _report_unreadable(run, self._wait, found.answer)
            return OPEN
        return OPEN if found.answer is None else found.answer


def _report_unreadable(run: Run, wait: str, answer: Answer) -> None:
    """Log once in this process that an answer cannot be read here: it may be for a worker that has the key."""
    level = "WARNING" if _reported.is_first(run.id, wait, answer.digest) else "DEBUG"
    log = logger.bind(task=run.envelope.task, id=run.id)
    log.log(level, "the answer to wait {} of task {} could not be read: {}", wait, run.id, answer.problem)


class Wait(Generic[T]):
    """An open wait for an answer: `await wait` returns the answer. See `Context.open_wait`.

    Attributes:
        id: By which it is answered: its name, with its scope and its number, such as `approval#2`.
        token: By which it is answered as well, if it has one.
    """

    def __init__(
        self, run: Run, call: WaitCall, key: str, options: StepOptions, outcome: dict[str, Any] | None = None
    ) -> None:
        self.id = wait_id(key)
        self.token = call.token
        self._run = run
        self._call = call
        self._key = key
        self._options = options
        self._until: int | None = None
        self._first = False
        """Whether it was the first of its name when it was opened."""
        self._name = ""
        """Name of the last opening."""
        self._question = ""
        """Digest of the question as it was opened last."""
        self._outcome = outcome
        self._stored = True
        """Whether the outcome, if there is one, is certainly stored."""
        self._waiting = asyncio.Lock()

    def __await__(self) -> Generator[Any, None, T]:
        return self.result().__await__()

    def __repr__(self) -> str:
        return f"<Wait {self.id} of task {self._run.id}>"

    @property
    def name(self) -> str:
        """Its name."""
        return self._call.name

    @property
    def by(self) -> str | None:
        """The name of the approver who has signed the answer, else what its sender gave; None without an answer."""
        return None if self._outcome is None else self._outcome.get("by")

    async def result(self) -> T:
        """Wait for the answer, and return it. The same as `await wait`.

        Raises:
            WaitTimedOut: Its time has passed, and it has no default.
            WaitClosed: `close` was called.
            TokenTaken: Another open wait has its token.
        """
        await check_call(self._run, self._key, own=True)
        async with self._waiting:  # another call that waits for it is none in progress: the run may park
            with self._run.calling():
                while self._outcome is None:
                    await self._await_answer()
                if not self._stored:
                    await self._run.flush()
        outcome = self._outcome
        if "answer" in outcome:
            note_taken()
            value: T = self._call.codec.decode_record(self._key, orjson.dumps(outcome["answer"]))
            return value
        if "closed" in outcome:
            raise WaitClosed(self.id)
        if self._call.default is not REQUIRED:
            default: T = self._call.default
            return default
        error = WaitTimedOut(self.id, self._call.who)
        # the next attempt waits again, unless the handler has continued after the time-out
        AttemptEnd.of(self._run).undone.append((error, {self._key: ()}))
        raise error

    async def close(self) -> None:
        """Close the wait, if it is open: it takes no answer any more. Recorded once."""
        await check_call(self._run, self._key, own=True)
        with self._run.calling():
            await self._end({"closed": True}, Waited(closed=True, wait=self.id))
            if not self._stored:
                await self._run.flush()
            look_again(self._run, self._key)

    async def _await_answer(self) -> None:
        """Wait for an answer or for the end, and record it; an answer that is void is dropped."""
        run = self._run
        came = await wait_until(run, AnswerCame(run, self._key, self.id, self._until))
        if self._outcome is not None:  # `close` was called
            return
        if came is TIMED_OUT:
            await self._end({"timeout": True}, Waited(wait=self.id))
        elif isinstance(came, _Gone):
            await self._run.recorder.put(*self._opening(lost=True), wait=True)
        else:
            await self._use(came)

    async def _use(self, answer: Answer) -> None:
        """Record an answer, or drop it if it is void: in one act each."""
        problem = self._void(answer)
        if problem is None:
            event = Answered(wait=self.id, by=answer.by, value=answer.value, early=answer.early)
            outcome = {"answer": answer.value, "by": answer.by, "at": answer.at}
            try:
                check_size(f"the answer to wait {self.id!r}", len(orjson.dumps(outcome)), self._run.payload_limit)
                async with taking():
                    await self._end(outcome, event, answer)
            except PayloadTooLarge as error:
                problem = str(error)
        if problem is not None:
            bound = logger.bind(task=self._run.envelope.task, id=self._run.id)
            bound.warning("an answer to wait {} was dropped, which stays open: {}", self.id, problem)
            dropped = self._run.next_entry(AnswerDropped(wait=self.id, by=answer.by, why=problem))
            await self._run.recorder.put(*self._opening(), dropped, wait=True)

    def _void(self, answer: Answer) -> str | None:
        """Return why an answer is void, None if it is not."""
        if (problem := void_here(self._run, self.id, self._call.who, self._question, answer)) is not None:
            return problem
        if answer.early and not self._call.takes_early:
            return "it is an answer to something else than what is asked now"
        if answer.early and not self._first:
            return "it came before another wait of this name"
        try:
            self._call.codec.decode(orjson.dumps(answer.value))
        except ValidationError as error:
            return first_problem(error)
        except ValueError as error:
            return str(error)
        return None

    async def _is_first(self) -> bool:
        """Return whether no wait of this name was opened in this task: an early answer is for the first one only."""
        run, name = self._run, self._call.name
        opened = run.extras.of(_OpenedNames, _OpenedNames)
        known = name in opened
        opened.add(name)
        if known:
            return False
        keys = (*run.history.saved, *await read_recorded_steps(run))
        return not any(_is_record(key) and wait_name(wait_id(key)) == name for key in keys)

    async def _end(self, outcome: dict[str, Any], event: Event, answer: Answer | None = None) -> None:
        """Record how the wait has ended, and close it, in one act, unless it has ended. Then free its token.

        The outcome counts from the moment its entries are put, for they are stored also if the call is cancelled then.
        """
        if self._outcome is not None:
            return
        run = self._run
        record = StepRecord(orjson.dumps(outcome), self._call.digest, self._call.asked)
        logged = run.next_entry(event)
        entries = [Entry(Kind.DONE_WITH_EVENT, self._key, record.encode()), closing(run.id, self.id, answer), logged]
        entries += drop_owed(run, self.id)
        replicated = self._options.durability == "replicated"
        self._outcome, self._stored = outcome, False
        await run.recorder.put(*entries, wait=True, replicated=replicated, progress=True)
        self._stored = True
        run.history.saved.pop(self._key, None)
        run.touch()
        run.progressed()
        if self.token is not None:
            await self._repeat(
                lambda: free_token(run.gateway, run.delivery.partition, run.id, self.id, self.token or "")
            )

    async def _open(self, withdrawn: str = "", *, following: bool = False) -> None:
        """Open the wait, in place of another question if there was one, and claim its token.

        following: Close the open waits of this name that an earlier run has opened after the other question was
        answered: they are asked for again, so that no answer to them counts for what follows from this one.
        """
        run, call = self._run, self._call
        self._first = not withdrawn and await self._is_first()
        now = await redis_time(run)
        endless = call.seconds is None or call.seconds > MAX_SECONDS
        self._until = None if endless or call.seconds is None else now + round(call.seconds * 1000)
        dropped = []
        if withdrawn:
            logger.bind(id=run.id).warning(
                "question {} was withdrawn, the handler asks {} now: an answer to the former one is dropped. A "
                "question whose text differs in each run needs a name: ctx.ask(..., name=...)",
                withdrawn,
                call.asked,
            )
            dropped = forget_steps([self._key], run.history)
            for key in self._later() if following else ():
                wait = wait_id(key)
                dropped += [*forget_steps([key], run.history), closing(run.id, wait), *drop_owed(run, wait)]
                dropped.append(run.next_entry(Waited(closed=True, wait=wait)))
        event = WaitStarted(
            what="answer", on=call.who, why=call.why, withdrawn=withdrawn, wait=self.id, until=self._until
        )
        opened = [*self._opening(), run.next_entry(event)]
        opened += save_owed(run, call.who, call.why or call.name, self._until, self.id)
        await run.recorder.put(*dropped, *opened, wait=True)
        run.touch()
        await self._claim()

    def _later(self) -> list[str]:
        """Return the keys of the open waits of this name that an earlier run opened after this one."""
        run, (name, _, number) = self._run, self._key.partition(f"{RECORDS}{self._call.name}")
        first, found = int(number[1:] or 1), []
        for key in run.history.saved:
            scope, mark, tail = key.partition(f"{RECORDS}{self._call.name}#")
            if mark and scope == name and tail.isdigit() and int(tail) > first and not run.keys.is_given(key):
                found.append(key)
        return found

    def _resume(self, started: dict[str, Any]) -> None:
        """Continue a wait that an earlier run has opened. started: what that has saved."""
        self._until, self._first = started["until"], started["first"]
        self._name, self._question = started["o"], started["q"]

    def _opening(self, *, lost: bool = False) -> list[Entry]:
        """Return the entries that open the wait, and that save how.

        lost: Redis has lost it. If another run has opened it again meanwhile, it stays as it is: so it keeps the name
        of its opening, and an answer to it counts. Each other opening is a new one, to which no earlier answer counts.
        """
        run, call = self._run, self._call
        opened = Opened.of(run, self.id, call, self._name if lost else "")
        self._name, self._question = opened.name, opened.question
        started = {"h": call.digest, "until": self._until, "a": call.asked, "first": self._first, "token": self.token}
        saved = save_wait(run, self._key, "answer", started | {"o": opened.name, "q": opened.question})
        early = self._first and call.takes_early
        return [saved, opening(run.id, self.id, opened.fields, until=self._until, early=early, lost=lost)]

    async def _claim(self) -> None:
        """Claim the token of the open wait; close that if another one has it. Raises `TokenTaken`."""
        run, token = self._run, self.token
        if token is None:
            return
        left = None if self._until is None else max(0, self._until - await redis_time(run))
        place = (run.gateway, run.delivery.partition, run.id, self.id, token)
        holder = await self._repeat(lambda: claim_token(*place, timeout_ms=left))
        if holder is not None:
            dropped = [*forget_steps([self._key], run.history), closing(run.id, self.id)]
            dropped += (run.next_entry(Waited(wait=self.id)), *drop_owed(run, self.id))
            await run.recorder.put(*dropped, wait=True)
            raise TokenTaken(token, holder.task_id, holder.wait)

    async def _repeat(self, call: Any) -> Any:
        """Repeat a call while Redis is unavailable."""
        run = self._run
        return await retry_while_unavailable(call, on_wait=log_wait(f"the waits of task {run.id}", run.touch))


class UnitWait(Wait[Any]):
    """A wait of a unit test, whose answers are given."""

    def __init__(self, run: Run, call: WaitCall, key: str, answers: list[Any]) -> None:
        super().__init__(run, call, key, DEFAULT_OPTIONS["sync"])
        self._answers = answers

    async def _await_answer(self) -> None:
        call = self._call
        if self._answers:
            value = orjson.loads(as_json(self._answers.pop(0)))
            call.codec.decode(orjson.dumps(value))
            self._outcome = {"answer": value, "by": call.who}
        elif call.seconds is not None:
            self._outcome = {"timeout": True}
        else:
            remedy = f"pass make_context(answers={{{call.name!r}: ...}})"
            raise Refused(f"the handler waits for ever for an answer to {self.id!r}: {remedy}")

    async def close(self) -> None:
        self._outcome = self._outcome or {"closed": True}


def close_wait(run: Run, key: str, saved: dict[str, Any], end: Closing) -> None:
    """Close the wait of a cancelled branch, and free its token."""
    wait, token = wait_id(key), saved.get("token")
    entries = [*forget_steps([key], run.history), closing(run.id, wait)]
    entries += (run.next_entry(Waited(closed=True, wait=wait)), *drop_owed(run, wait))
    free = None if token is None else partial(free_token, run.gateway, run.delivery.partition, run.id, wait, token)
    end.add(*entries, then=free)


def _is_record(key: str) -> bool:
    return key.rpartition("/")[2].startswith(RECORDS)
