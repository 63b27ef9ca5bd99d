"""Operations: what the HTTP API and the dashboard can do.

An operation is an async function with a role, a model of its inputs and a model of its result. The API binds it to a
route and describes it in its OpenAPI document; a page or a form of the dashboard calls it as it is. So inputs are
validated, roles are checked and audit lines are written in one place:

    class CancelTask(Inputs):
        task_id: TaskIdText

    @operation("POST", "/tasks/{task_id}/cancel", roles=[Role.OPERATOR], changes=True)
    async def cancel_task(call: Call, given: CancelTask) -> TaskView:
        '''Cancel a task.'''

Inputs that the path names come from the path, those of `header_input` from headers, those of `query_input` from the
query. The others come from the query of a GET or DELETE, and from the JSON body of another method.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, Final, Generic, Literal, NamedTuple, TypeVar, get_type_hints

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from ...queues.envelope import TASK_ID_PATTERN
from ...queues.errors import PerdureError
from ...queues.handle import TaskHandle
from ...queues.inspection.timeline import has_expired
from ...queues.inspection.views import find_tasks
from ...queues.keys import check_name, tenant_of, with_tenant
from ...queues.producer import Producer
from ...queues.security.approvers import ApproverKey
from ..app import App
from ..log import logger
from .problems import Problem, problem_of
from .users import Role, User

Method = Literal["GET", "POST", "PUT", "PATCH", "DELETE"]
Place = Literal["path", "query", "header", "body"]

MAX_LIMIT: Final = 1000
"""Most items of one page."""


class Inputs(BaseModel):
    """Base of the inputs of an operation."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ResultModel(BaseModel):
    """Base of the results of operations."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class NoInputs(Inputs):
    """Inputs of an operation that takes none."""


def header_input(name: str, default: Any, description: str, **limits: Any) -> Any:
    """Declare an input that comes from a header."""
    return Field(default, description=description, json_schema_extra={"x-place": "header", "x-name": name}, **limits)


def query_input(default: Any, description: str, **limits: Any) -> Any:
    """Declare an input of a POST, PUT or PATCH that comes from the query."""
    return Field(default, description=description, json_schema_extra={"x-place": "query"}, **limits)


def _checked(what: str) -> AfterValidator:
    return AfterValidator(lambda text: check_name(what, text))


TaskIdText = Annotated[str, Field(pattern=TASK_ID_PATTERN, description="Id of the task.")]
QueueText = Annotated[str, _checked("queue"), Field(description="Name of a queue.")]
TaskNameText = Annotated[str, Field(min_length=1, max_length=256, description="Name of a task in the catalog.")]


class Frame(NamedTuple):
    """Frame of an event stream.

    Attributes:
        id: Cursor that continues the stream behind this frame.
        event: Name of the kind of event.
        data: JSON text.
    """

    id: str
    event: str
    data: bytes


@dataclass(slots=True)
class EventStream:
    """Result of an operation that streams: server-sent events, until the frames end or the client goes."""

    frames: AsyncGenerator[Frame]


@dataclass(slots=True)
class Download:
    """Result of an operation that sends a file, which browsers store and do not show."""

    name: str
    chunks: AsyncGenerator[bytes]
    media_type: str = "application/octet-stream"


@dataclass(frozen=True, slots=True)
class Call:
    """A call of an operation by a user.

    Attributes:
        producer: The open producer of the deployment, within the user's tenant.
        app: The application if the service has its code.
        secret: Key of the signatures of cookies and answer links.
        base: URL of the API as the caller reaches it, without a slash at the end; empty outside of requests.
        approver_keys: Private keys that sign the answers of users, by their names.
    """

    user: User
    producer: Producer
    app: App | None = None
    secret: bytes = field(default=b"", repr=False)
    base: str = ""
    extras: dict[str, Any] = field(default_factory=dict, repr=False)
    approver_keys: Mapping[str, ApproverKey] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        """Keep the call within the user's tenant.

        Raises:
            Problem: The producer is one of another tenant.
        """
        try:
            object.__setattr__(self, "producer", self.producer.for_tenant(self.user.tenant))
        except ValueError:
            raise Problem(
                403, "other-tenant", f"user {self.user.name!r} must be of the tenant that is served here"
            ) from None

    async def now(self) -> int:
        """Return the time of the Redis server in milliseconds."""
        seconds, micros = await self.producer.gateway.command("TIME")
        return int(seconds) * 1000 + int(micros) // 1000

    async def find(self, task_id: str, queue: str | None = None) -> TaskHandle[Any]:
        """Find a task that the user may read.

        Raises:
            Problem: No queue has it (410 if its record has expired), a producer did not enqueue it, or several queues
                have one of this id: of a producer, only its own count.
        """
        producer = self.producer
        found = await find_tasks(producer.gateway, producer.namespace, task_id, queue)
        names = sorted({partition.queue for partition in found})
        if not self.user.sees_all:
            names = [name for name in names if await self._enqueued(task_id, name)]
        if len(names) > 1:
            listed = ", ".join(map(repr, names))
            raise Problem(409, "ambiguous-id", f"id {task_id!r} must name one task, but the queues {listed} have one")
        handle = await producer.find(task_id, names[0]) if names else None
        if handle is None:
            place = "any queue" if queue is None else f"queue {queue!r}"
            if self.user.sees_all and await has_expired(producer.gateway, producer.namespace, task_id, queue):
                raise Problem(
                    410,
                    "task-expired",
                    f"task {task_id!r} has no record any more: the retention of its result has passed",
                )
            raise Problem(
                404,
                "task-not-found",
                f"could not find task {task_id!r} in {place} of namespace {producer.namespace.name!r}",
            )
        return handle

    async def _enqueued(self, task_id: str, queue: str) -> bool:
        """Return whether the user has enqueued the task of an id in a queue."""
        handle = await self.producer.find(task_id, queue)
        return handle is not None and (await handle.record()).headers.get(ENQUEUED_BY) == self.user.name


_OF_TENANTS: Final = re.compile(
    r"/(?:tasks(?:/batch)?|tasks/\{.*|dead-letter-groups|dead-letter-export|dead-letters|dead-letters/\{.*"
    r"|questions(?:/\{.*)?|answers|answer-links|sessions(?:/\{.*)?|catalog|enqueue(?:/\{.*)?)"
)
"""Paths of operations and pages that know tenants. The others are about the whole deployment."""


def knows_tenants(path: str) -> bool:
    """Return whether the operations and pages of a path show and change what belongs to the tenant of a call only."""
    return _OF_TENANTS.fullmatch(path) is not None


def check_scope(call: Call, path: str, title: str) -> None:
    """Raise `Problem` if a call of a tenant is about the whole deployment. path: of the operation or page."""
    tenant = call.producer.namespace.tenant
    if tenant is not None and not knows_tenants(path):
        raise Problem(
            403,
            "whole-deployment",
            f"user {call.user.name!r} must have no tenant to {title}, since that is about all tenants, got {tenant!r}",
        )


ENQUEUED_BY: Final = "enqueued-by"
"""Header of a task that the API enqueued: name of the user."""

G = TypeVar("G", bound=Inputs)
R = TypeVar("R")

Run = Callable[[Call, G], Awaitable[R]]


@dataclass(frozen=True)
class Operation(Generic[G, R]):
    """An operation; see the module.

    Attributes:
        roles: One of them is needed; empty for an operation that is open to callers without a token.
        changes: Whether it changes something, so that it leaves an audit line.
        status: Status code of its success.
        tag: Group of the operation in the OpenAPI document.
    """

    name: str
    method: Method
    path: str
    roles: Sequence[Role]
    changes: bool
    status: int
    tag: str
    run: Run[G, R] = field(repr=False)
    inputs: type[G]
    result: Any
    description: str = field(repr=False)

    async def __call__(self, call: Call, given: G) -> R:
        """Check the role of the user, run the operation, and write the audit line.

        Raises:
            Problem: The user lacks the role, or the operation was refused or failed.
        """
        if self.roles and not call.user.may(*self.roles):
            wanted = " or ".join(self.roles)
            self._audit(call, given, "not allowed")
            raise Problem(403, "role-needed", f"user {call.user.name!r} must have the role {wanted} to {self.title}")
        try:
            check_scope(call, self.path, self.title)
            result = await self.run(call, self._with_tenant(call, given))
        except PerdureError as error:
            self._audit(call, given, "refused", str(error))
            problem = problem_of(error)
            raise problem if call.user.sees_all else problem.without_server() from error
        except Problem as problem:
            self._audit(call, given, "refused", problem.detail)
            raise
        except BaseException as error:  # it may have done a part; the text may hold data, and is left out
            self._audit(call, given, "failed", type(error).__name__)
            raise
        self._audit(call, given, "done")
        return result

    def _with_tenant(self, call: Call, given: G) -> G:
        """Return the inputs with the tenant in the id of the task that they name.

        Raises:
            Problem: The id is one of another tenant, so no task is found.
        """
        tenant, named = call.producer.namespace.tenant, getattr(given, "task_id", None)
        if tenant is None or self.places.get("task_id", ("body",))[0] != "path" or not isinstance(named, str):
            return given
        if tenant_of(named) not in (None, tenant):
            raise Problem(404, "task-not-found", f"could not find task {named!r} of tenant {tenant!r}")
        return given.model_copy(update={"task_id": with_tenant(tenant, named)})

    @property
    def title(self) -> str:
        """The operation in words, such as "cancel task"."""
        return self.name.replace("_", " ")

    @cached_property
    def places(self) -> dict[str, tuple[Place, str]]:
        """Place and outer name of each input."""
        found: dict[str, tuple[Place, str]] = {}
        for name, info in self.inputs.model_fields.items():
            extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
            if f"{{{name}}}" in self.path:
                found[name] = ("path", name)
            elif extra.get("x-place") == "header":
                found[name] = ("header", str(extra["x-name"]))
            elif extra.get("x-place") == "query" or self.method in ("GET", "DELETE"):
                found[name] = ("query", name)
            else:
                found[name] = ("body", name)
        return found

    @property
    def has_body(self) -> bool:
        """Whether it takes a JSON body."""
        return any(place == "body" for place, _ in self.places.values())

    def _audit(self, call: Call, given: G, outcome: str, why: str = "") -> None:
        if not self.changes:
            return
        inputs = {name: str(getattr(given, name)) for name, (place, _) in self.places.items() if place == "path"}
        about = " ".join(inputs.values())
        chosen = {name: getattr(given, name) for name in _AUDITED if name in given.model_fields_set - inputs.keys()}
        listed = ", ".join(f"{name}={str(value)[:_MAX_AUDITED]}" for name, value in chosen.items() if value is not None)
        text = f"{call.user.name}: {self.title} {about}".rstrip() + (f" ({listed})" if listed else "") + f": {outcome}"
        logger.bind(audit=self.name, user=call.user.name, outcome=outcome, **inputs).info(
            "{}", f"{text}: {why}" if why else text
        )


_AUDITED: Final = (
    *("queue", "state", "task", "app", "reason", "group", "since", "until", "error", "search", "key", "tag"),
    *("purge", "unstarted", "fresh", "rerun_failed", "skip_failed", "step", "run_again", "wait", "person", "seconds"),
    *("name", "rate", "agent", "session", "tenant", "limit", "settings", "schedule", "at", "before", "new_id", "why"),
)
"""Inputs that an audit line names apart from those of the path: what an act selects, and how it acts. Not the data of
tasks, such as arguments, answers, messages and conditions on arguments, which may be secret."""

_MAX_AUDITED: Final = 200
"""Characters of an input in an audit line."""


OPERATIONS: dict[str, Operation[Any, Any]] = {}
"""All operations by name."""


def operation(
    method: Method, path: str, *, roles: Sequence[Role], changes: bool = False, status: int = 200
) -> Callable[[Run[G, R]], Operation[G, R]]:
    """Make an operation of an async function `run(call, inputs)`, whose docstring describes it."""

    def make(run: Run[G, R]) -> Operation[G, R]:
        hints = get_type_hints(run)
        name = run.__name__
        inputs = next(kind for parameter, kind in hints.items() if parameter not in ("call", "return"))
        made = Operation(
            name=name,
            method=method,
            path=path,
            roles=tuple(roles),
            changes=changes,
            status=status,
            tag=run.__module__.rpartition(".")[2].replace("_", " "),
            run=run,
            inputs=inputs,
            result=hints["return"],
            description=inspect.getdoc(run) or "",
        )
        known = next((one for one in OPERATIONS.values() if (one.method, one.path) == (method, path)), None)
        if name in OPERATIONS or known is not None:
            raise ValueError(f"operation {name} must have a name and a path of its own, got {method} {path}")
        OPERATIONS[name] = made
        return made

    return make
