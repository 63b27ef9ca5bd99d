"""Questions: what tasks wait for, and the answers of people and programs.

A question is an open wait of a task (`ctx.wait_for`, `ctx.ask`, a used-up budget with `then="ask"`). An answer has the
name of the signed-in user. Where workers know approvers, it is signed with the key that the service holds for the user.
Callers who give the `question` that they have read cannot answer another one: a wait that
was opened again since, or that shows something else, refuses the answer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Final

from pydantic import Field

from ....queues.errors import AnswerRefused, ApproverNeeded, DecryptionError, InvalidAnswer, PerdureError, TaskEnded
from ....queues.keys import Partition
from ....queues.records import read_tasks
from ....queues.waits import (
    TOKEN_LENGTH,
    AnswerReceipt,
    OpenWait,
    Waits,
    answer_token,
    answer_wait,
    find_answer,
    find_token,
    page_waiting,
    read_live_waits,
)
from ....queues.wording import iso_time
from ..filters import known_partitions
from ..operation import MAX_LIMIT, Call, Inputs, QueueText, ResultModel, TaskIdText, operation
from ..problems import Problem, ProblemError
from ..users import Role

WaitText = Annotated[
    str, Field(min_length=1, max_length=1024, description="Id of the wait, such as approval#2, or its name.")
]
Token = Annotated[str, Field(min_length=1, max_length=TOKEN_LENGTH, description="Token of the wait.")]


class QuestionView(ResultModel):
    """An open wait of a task. Times are milliseconds of Redis' clock since the epoch."""

    task_id: str
    queue: str
    task: str | None = Field(description="Name of the task; null if its record cannot be read.")
    wait: str = Field(description="Id of the wait, unique in its task.")
    name: str
    who: str = Field(description="Person or group that is asked.")
    why: str = Field(description="Reason or question.")
    opened: int
    until: int | None = Field(description="Time after which it takes no answer; null without a time-out.")
    json_schema: dict[str, Any] | None = Field(description="JSON schema of the answer; null for any JSON.")
    shown: Any = Field(description="What people see before they answer; null for nothing, or if it is too large.")
    shows: str | None = Field(description="Digest of what people see; null for nothing.")
    token: str | None = Field(description="Token by which it is answered as well.")
    approvers: list[str] | None = Field(description="Users whose signature the answer needs; null if it needs none.")
    answered: bool = Field(description="Whether it has an answer that the task has not read yet.")
    answered_by: str | None = Field(description="Sender of that answer.")
    question: str = Field(description="Digest of the question; send it with the answer, which then fits no other.")
    problem: str | None = Field(description="Why the question cannot be read.")


class QuestionPage(ResultModel):
    """Open questions, those of the task that has waited longest first."""

    items: list[QuestionView]
    next: str | None = Field(description="Cursor of the next page.")
    read: int = Field(description="Tasks that were read for this page.")
    of: int = Field(description="Tasks that wait for an answer.")


class EarlyAnswerView(ResultModel):
    """An answer that came before its question. `by`: its sender. `at`: milliseconds of Redis' clock."""

    name: str
    by: str
    at: int
    value: Any
    problem: str | None


class TaskQuestions(ResultModel):
    """The open questions of a task, and the answers that came before their questions."""

    items: list[QuestionView]
    early: list[EarlyAnswerView]


class ListQuestions(Inputs):
    """Page of the open questions."""

    queue: QueueText | None = Field(None, description="Only tasks of this queue.")
    token: Token | None = Field(None, description="Only the question with this token.")
    limit: int = Field(100, ge=1, le=MAX_LIMIT, description="Tasks of one page.")
    cursor: str | None = Field(None, max_length=200, description="Cursor of an earlier page.")


class TaskOfQuestions(Inputs):
    """A task whose questions are read."""

    task_id: TaskIdText
    queue: QueueText | None = Field(None, description="Queue of the task, if several queues have one of this id.")


class GivenValue(Inputs):
    """An answer."""

    value: Any = Field(description="The answer; it must fit the schema of the question.")
    question: str | None = Field(
        None, max_length=64, description="Digest of the question that was read: refuse the answer if it is another now."
    )
    shows: str | None = Field(
        None, max_length=64, description="Digest of what was shown: refuse the answer if it is something else now."
    )
    answer_id: str | None = Field(
        None, min_length=1, max_length=200, description="Id of the answer: one that is sent again is stored once."
    )


class AnswerQuestion(GivenValue):
    """An answer to a question of a task."""

    task_id: TaskIdText
    queue: QueueText | None = Field(None, description="Queue of the task, if several queues have one of this id.")
    wait: WaitText


class AnswerToken(GivenValue):
    """An answer to the question with a token."""

    token: Token


class AnswerView(ResultModel):
    """A stored answer. `early`: it is kept for the first wait of its name."""

    task_id: str
    wait: str
    state: str = Field(description="State of the task.")
    early: bool
    by: str


@operation("GET", "/questions", roles=[Role.VIEWER])
async def list_questions(call: Call, given: ListQuestions) -> QuestionPage:
    """List the open questions.

    Those of the task that has waited longest come first. A page has all questions of its tasks.
    """
    gateway, namespace = call.producer.gateway, call.producer.namespace
    if given.token is not None:
        place = await find_token(gateway, namespace, given.token)
        if place is None:
            return QuestionPage(items=[], next=None, read=0, of=0)
        partition, holder = place
        waits = await read_live_waits(gateway, partition, holder.task_id)
        held = [wait for wait in waits.open if wait.token == given.token]
        items = await question_views(call, partition, holder.task_id, Waits(held, {}))
        return QuestionPage(items=items, next=None, read=1, of=1)
    partitions = await known_partitions(call, given.queue)
    try:
        page = await page_waiting(
            gateway, partitions, limit=given.limit, after=given.cursor or "", tenant=namespace.tenant
        )
    except ValueError as error:
        raise Problem(422, "invalid-input", str(error)) from None
    items = [
        view for found in page.tasks for view in await question_views(call, found.partition, found.task_id, found.waits)
    ]
    return QuestionPage(items=items, next=page.following or None, read=page.read, of=page.of)


@operation("GET", "/questions/{task_id}", roles=[Role.VIEWER])
async def task_questions(call: Call, given: TaskOfQuestions) -> TaskQuestions:
    """Return the open questions of a task.

    Also the answers that came before their questions.
    """
    handle = await call.find(given.task_id, given.queue)
    waits = await read_live_waits(call.producer.gateway, handle.partition, given.task_id)
    early = [
        EarlyAnswerView(name=name, by=one.by, at=one.at, value=one.value, problem=one.problem)
        for name, one in sorted(waits.early.items())
    ]
    return TaskQuestions(items=await question_views(call, handle.partition, given.task_id, waits), early=early)


@operation("POST", "/questions/{task_id}/answer", roles=[Role.APPROVER], changes=True)
async def answer_question(call: Call, given: AnswerQuestion) -> AnswerView:
    """Answer a question of a task.

    The task reads the answer and continues. An answer by the name of a wait that was not opened yet is kept for the
    first wait of that name. A second answer is refused, and the problem says who gave the first.
    """
    handle = await call.find(given.task_id, given.queue)
    return await store_answer(call, handle.partition, given.task_id, given.wait, given, user=call.user.name)


@operation("POST", "/answers", roles=[Role.APPROVER], changes=True)
async def answer_by_token(call: Call, given: AnswerToken) -> AnswerView:
    """Answer the question with a token.

    The token is the one of `ctx.wait_for(..., token="order:17")`, so the caller needs no task id.
    """
    gateway, namespace = call.producer.gateway, call.producer.namespace
    place = await find_token(gateway, namespace, given.token)
    options = _options(call, given, call.user.name, call.user.name)

    async def send() -> AnswerReceipt:
        return await answer_token(gateway, namespace, given.token, given.value, **options)

    if place is None:
        return _stored(await _sent(call, None, "", given.token, send), call.user.name)
    partition, holder = place
    return _stored(await _sent(call, partition, holder.task_id, holder.wait, send), call.user.name)


async def store_answer(
    call: Call, partition: Partition, task_id: str, wait: str, given: GivenValue, *, user: str, by: str = ""
) -> AnswerView:
    """Store an answer to a wait of a task.

    Args:
        user: Name of the user who answers, or who has let another person answer.
        by: Name of that person, unless the answer is signed with the key of the user. Default: the user.

    Raises:
        Problem: The answer does not fit, or the wait takes none; the problem says who has answered it.
    """

    options = _options(call, given, user, by or user)

    async def send() -> AnswerReceipt:
        return await answer_wait(call.producer.gateway, partition, task_id, wait, given.value, **options)

    return _stored(await _sent(call, partition, task_id, wait, send), options["by"])


def _options(call: Call, given: GivenValue, user: str, by: str) -> dict[str, Any]:
    key = call.approver_keys.get(user)
    return {
        "by": by if key is None else key.name,
        "approver": key,
        "answer_id": given.answer_id,
        "shows": given.shows,
        "question": given.question,
        "limit": call.producer.payload_limit,
    }


def _stored(receipt: AnswerReceipt, by: str) -> AnswerView:
    return AnswerView(task_id=receipt.task_id, wait=receipt.wait, state=str(receipt.state), early=receipt.early, by=by)


async def _sent(
    call: Call, partition: Partition | None, task_id: str, wait: str, send: Callable[[], Awaitable[AnswerReceipt]]
) -> AnswerReceipt:
    try:
        return await send()
    except InvalidAnswer as error:
        fields = [problem_field(text) for text in error.problems]
        raise Problem(422, "invalid-answer", str(error), fields=fields) from None
    except ApproverNeeded as error:
        raise Problem(403, "approver-needed", f"{error}; {_KEYS}") from None
    except (AnswerRefused, TaskEnded) as error:
        if partition is not None and (answered := await answered_problem(call, partition, task_id, wait)) is not None:
            raise answered from error
        raise
    except PerdureError:
        raise
    except ValueError as error:
        raise Problem(422, "invalid-input", str(error)) from None


_KEYS: Final = (
    "here, start the server with --approver-keys FILE and add the user's key: perdure keys generate --approver USER"
)


async def answered_problem(call: Call, partition: Partition, task_id: str, wait: str) -> Problem | None:
    """Return the problem that a question has an answer already, which names the sender; None if none is known."""
    try:
        answer = await find_answer(call.producer.gateway, partition, task_id, wait)
    except DecryptionError:
        return None
    if answer is None:
        return None
    who = repr(answer.by) if answer.by else "a program without a name"
    return Problem(
        409,
        "already-answered",
        f"{who} has answered wait {wait!r} of task {task_id} at {iso_time(answer.at)}: this answer was not stored",
    )


_ANSWER: Final = "answer"


def problem_field(text: str) -> ProblemError:
    """Return a problem of an answer with the path of its value, such as `value.note`."""
    where, colon, message = text.partition(": ")
    if not colon or not (where == _ANSWER or where.startswith(f"{_ANSWER}.")):
        return ProblemError(where="value", message=text)
    return ProblemError(where=f"value{where.removeprefix(_ANSWER)}", message=message)


async def question_views(call: Call, partition: Partition, task_id: str, waits: Waits) -> list[QuestionView]:
    """Return open waits of a task as results."""
    gateway = call.producer.gateway
    if not waits.open:
        return []
    (record,) = await read_tasks(gateway, partition, [task_id])
    task = None if record is None else record.task
    views: list[QuestionView] = []
    for wait in waits.open:
        by = None
        if wait.answered:
            answer = await find_answer(gateway, partition, task_id, wait.id)
            by = None if answer is None else answer.by
        views.append(_view(partition, task_id, task, wait, by))
    return views


def _view(partition: Partition, task_id: str, task: str | None, wait: OpenWait, by: str | None) -> QuestionView:
    return QuestionView(
        task_id=task_id,
        queue=partition.queue,
        task=task,
        wait=wait.id,
        name=wait.name,
        who=wait.who,
        why=wait.why,
        opened=wait.opened,
        until=wait.until,
        json_schema=wait.schema,
        shown=wait.shown,
        shows=wait.shows,
        token=wait.token,
        approvers=None if wait.approvers is None else [*wait.approvers],
        answered=wait.answered,
        answered_by=by,
        question=wait.digest,
        problem=wait.problem,
    )
