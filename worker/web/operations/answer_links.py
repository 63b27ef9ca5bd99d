"""Answer links: signed links by which a person without an account answers one question, once.

An approver makes a link for a person and sends it. The link is signed with the secret of the service and names the
question by its digest, so it fits no other question, and no later one. It opens a page with the question and a form. A
GET never answers, since mail scanners follow links. The sender of the answer is the person whom the link names, with
the user who made the link, who could name anyone. If the service holds a key of that user, the answer is signed with
it, and has the name of the user.

The signed part is no input of a path, since audit lines have those: who reads the log must not be able to answer.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Final, NamedTuple, Self

from itsdangerous import BadSignature, URLSafeSerializer
from pydantic import Field

from ....queues.inspection.views import find_task
from ....queues.keys import Partition
from ....queues.waits import Waits, answer_digest, read_live_waits
from ....queues.wording import iso_time
from ...log import logger
from ..operation import Call, Inputs, QueueText, ResultModel, TaskIdText, operation
from ..problems import Problem
from ..users import Role
from .questions import (
    AnswerView,
    GivenValue,
    QuestionView,
    WaitText,
    answered_problem,
    question_views,
    store_answer,
)

_DAY: Final = 86_400
_MAX_LENGTH: Final = 4096
"""Most characters of a link's signed part."""

_MARK: Final = "q"
"""First letter of the signed part, which may start with a dot: proxies refuse a path such as `/answer/.abc`."""

Person = Annotated[
    str,
    Field(
        min_length=1,
        max_length=100,
        pattern=r"^[^\x00-\x1f\x7f]+$",
        description="Name of the person who gets the link, the sender of the answer.",
    ),
]
LinkText = Annotated[str, Field(min_length=1, max_length=_MAX_LENGTH, description="Signed part of the link.")]


class MakeAnswerLink(Inputs):
    """A link by which a person answers a question."""

    task_id: TaskIdText
    queue: QueueText | None = Field(None, description="Queue of the task, if several queues have one of this id.")
    wait: WaitText
    person: Person
    seconds: int = Field(3 * _DAY, ge=60, le=90 * _DAY, description="Seconds for which the link can be used.")


class AnswerLinkView(ResultModel):
    """A link that was made. Who has it can answer the question, so send it to the person only."""

    url: str
    link: str = Field(description="Signed part of the link.")
    person: str
    expires_at: int = Field(description="Milliseconds of Redis' clock since the epoch.")
    wait: str
    task_id: str


class OneLink(Inputs):
    """An answer link."""

    link: LinkText


class LinkedQuestion(ResultModel):
    """The question that a link answers."""

    question: QuestionView
    person: str
    made_by: str = Field(description="User who made the link.")
    expires_at: int = Field(description="Milliseconds of Redis' clock since the epoch.")


class AnswerByLink(Inputs):
    """An answer by a link."""

    link: LinkText
    value: Any = Field(description="The answer; it must fit the schema of the question.")


class _Signed(NamedTuple):
    """Content of a link. expires_at: milliseconds of Redis' clock. made_by: user who made it."""

    queue: str
    task_id: str
    wait: str
    question: str
    person: str
    made_by: str
    expires_at: int
    nonce: str

    @property
    def sender(self) -> str:
        """Sender of the answer."""
        return f"{self.person}, by a link of {self.made_by}"

    @classmethod
    def read(cls, call: Call, link: str) -> Self:
        """Return the content of a link. Raises `Problem` if it was not signed with the secret of the service."""
        try:
            fields = _serializer(call).loads(link.removeprefix(_MARK))
            queue, task_id, wait, question, person, made_by, expires_at, nonce = fields
        except (BadSignature, ValueError, TypeError):
            raise Problem(
                404, "link-not-valid", "the link is not valid: it was changed or cut off; ask for another one"
            ) from None
        return cls(queue, task_id, wait, question, person, made_by, int(expires_at), nonce)


def _serializer(call: Call) -> URLSafeSerializer:
    if not call.secret:
        raise Problem(
            503,
            "no-secret",
            "answer links need a secret: start the server with --secret-file FILE, or give router(..., secret=...)",
            source="server",
        )
    return URLSafeSerializer(call.secret, salt=f"perdure.answer-link.{call.producer.namespace.name}")


@operation("POST", "/questions/{task_id}/links", roles=[Role.APPROVER], changes=True, status=201)
async def make_answer_link(call: Call, given: MakeAnswerLink) -> AnswerLinkView:
    """Make a link by which a person answers a question.

    The person needs no account. The link can be used once, until it expires, and for the question that is open now.
    """
    serializer = _serializer(call)
    handle = await call.find(given.task_id, given.queue)
    waits = await read_live_waits(call.producer.gateway, handle.partition, given.task_id)
    wanted = given.wait.removesuffix("#1")
    found = [wait for wait in waits.open if wanted in (wait.id, wait.name)]
    if len(found) != 1:
        ids = ", ".join(wait.id for wait in waits.open[:10]) or "none"
        raise Problem(
            404, "wait-not-found", f"wait {given.wait!r} must be one open wait of task {given.task_id}; open are: {ids}"
        )
    wait = found[0]
    if wait.problem is not None:
        raise Problem(409, "unreadable-wait", f"the question cannot be read and takes no answer: {wait.problem}")
    if wait.answered:
        answered = await answered_problem(call, handle.partition, given.task_id, wait.id)
        raise answered or Problem(409, "already-answered", f"wait {wait.id!r} has an answer already")
    signed = _Signed(
        handle.partition.queue,
        given.task_id,
        wait.id,
        wait.digest,
        given.person,
        call.user.name,
        await call.now() + given.seconds * 1000,
        secrets.token_urlsafe(9),
    )
    link = f"{_MARK}{serializer.dumps(list(signed))}"
    return AnswerLinkView(
        url=f"{call.base}/answer/{link}",
        link=link,
        person=given.person,
        expires_at=signed.expires_at,
        wait=wait.id,
        task_id=given.task_id,
    )


@operation("GET", "/answer-links", roles=[])
async def show_answer_link(call: Call, given: OneLink) -> LinkedQuestion:
    """Return the question of an answer link.

    The link is the permission: no token is needed. Nothing is answered.
    """
    signed = _Signed.read(call, given.link)
    _, question = await _open_question(call, signed)
    return LinkedQuestion(question=question, person=signed.person, made_by=signed.made_by, expires_at=signed.expires_at)


@operation("POST", "/answer-links", roles=[], changes=True)
async def answer_by_link(call: Call, given: AnswerByLink) -> AnswerView:
    """Answer a question by a link.

    The link is the permission: no token is needed. The sender of the answer is the person whom the link names, with the
    user who made the link: `carol@example.com, by a link of eve`.
    """
    signed = _Signed.read(call, given.link)
    partition, question = await _open_question(call, signed)
    answer = GivenValue(
        value=given.value,
        question=question.question,
        shows=question.shows,
        answer_id=f"link-{signed.nonce}-{answer_digest(repr(given.value))}",
    )
    stored = await store_answer(
        call, partition, signed.task_id, signed.wait, answer, user=signed.made_by, by=signed.sender
    )
    logger.bind(audit="answer_by_link", user=signed.person, made_by=signed.made_by, id=signed.task_id).info(
        "{} has answered wait {!r} of task {} by a link of {}",
        signed.person,
        signed.wait,
        signed.task_id,
        signed.made_by,
    )
    return stored


async def _open_question(call: Call, signed: _Signed) -> tuple[Partition, QuestionView]:
    """Return the open question of a link, and the partition of its task.

    Raises:
        Problem: The link has expired or was used, or the question was answered, closed or changed.
    """
    if await call.now() >= signed.expires_at:
        raise Problem(
            410, "link-expired", f"the link expired at {iso_time(signed.expires_at)}: ask {signed.made_by} for another"
        )
    gateway = call.producer.gateway
    partition = await find_task(gateway, call.producer.namespace, signed.task_id, signed.queue)
    if partition is None:
        raise Problem(410, "question-closed", "the task that asked does not exist any more: nothing is to be answered")
    waits = await read_live_waits(gateway, partition, signed.task_id)
    wait = next((wait for wait in waits.open if wait.id == signed.wait), None)
    if wait is None or wait.answered:
        answered = await answered_problem(call, partition, signed.task_id, signed.wait)
        raise answered or Problem(
            410, "question-closed", "the question is not open any more: its time has passed, or the task has ended"
        )
    if wait.digest != signed.question:
        raise Problem(
            409,
            "question-changed",
            f"the question was asked again since the link was made, and may show something else: ask {signed.made_by} "
            "for another link",
        )
    [view] = await question_views(call, partition, signed.task_id, Waits([wait], {}))
    return partition, view
