"""An agent as callers enqueue it: by a goal, whose task id is derived from the goal so that it runs once."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any, Generic, TypeVar

import orjson
from pydantic import ValidationError

from ..queues.envelope import EnvelopeTemplate, check_size
from ..queues.handle import TaskHandle
from ..queues.keys import with_tenant
from ..queues.transport.threadsafe_calls import blocking
from .agents.agent import Agent, S
from .agents.state_type import StateType
from .arguments import Arguments
from .durable.child_tasks import Ids, enqueue_once, enqueuing_run
from .durable.sync.session import call_in_loop, in_handler_thread
from .errors import InvalidArguments, first_problem
from .middleware import EnqueueCall
from .task import Task, TaskCall, chosen_tenant, hooked_message

T = TypeVar("T")


def goal_id(agent: str, key: str | None, arguments: Mapping[str, Any]) -> str:
    """Return the task id of a goal, derived from `key` if given, else from `arguments`, which hold no secrets."""
    identity: list[Any] = [agent, "goal", dict(arguments)] if key is None else [agent, "key", key]
    data = orjson.dumps(identity, option=orjson.OPT_SORT_KEYS)
    return f"goal-{hashlib.sha256(data).hexdigest()[:40]}"


class AgentTask(Generic[S]):
    """A registered agent: its class `kind`, the type of its state, and the `task` that workers run.

    tenant: whose goals and sessions its calls make; None for that of the task that makes them, or of the app.
    """

    def __init__(
        self, kind: type[Agent[S]], state_type: StateType[S], task: Task[..., Any], tenant: str | None = None
    ) -> None:
        self.kind = kind
        self.task = task
        self.state_type = state_type
        self.tenant = tenant

    def options(self, *, tenant: str | None) -> AgentTask[S]:
        """Return the agent with options for its calls: `await Bot.options(tenant="acme").enqueue("goal")`.

        The same goal of two tenants is two tasks. Raises `InvalidArguments`.

        Args:
            tenant: tenant that the goal, or the session of `app.session(...)`, belongs to.
        """
        known = None if tenant is None else self.task.as_call().with_tenant(tenant).tenant
        return AgentTask(self.kind, self.state_type, self.task, known)

    @property
    def own_tenant(self) -> str | None:
        """The tenant of a call. See `TaskCall.own_tenant`."""
        return chosen_tenant(self.task, self.tenant)

    @property
    def name(self) -> str:
        return self.task.name

    @property
    def queue(self) -> str:
        return self.task.queue

    @property
    def arguments(self) -> Arguments:
        """The goal and the inputs, as they are enqueued."""
        return self.task.arguments

    def as_call(self) -> TaskCall[..., Any]:
        """Return the agent's task with the options of its calls, for `ctx.spawn`."""
        call = self.task.as_call()
        return call if self.tenant is None else call.with_tenant(self.tenant)

    async def enqueue(
        self, /, goal: str, *, key: str | None = None, fresh: bool = False, **inputs: Any
    ) -> TaskHandle[Any]:
        """Enqueue a goal. Once this returns, it is never lost.

        The same goal is enqueued once: if its task exists, in whatever state, the handle of that task is returned and
        nothing is run.

        Args:
            key: identifies the goal; by default the goal and the inputs do.
            fresh: restart a goal whose task has ended, and drop the steps and state of the earlier run.
            inputs: fields of the state.

        Raises:
            InvalidArguments: the goal or an input is not valid; nothing was sent.
            StillRunning: `fresh` was asked for and the task has not ended.
            PayloadTooLarge: the goal and the inputs that are stored in the state are over its limit, or with the
                ephemeral ones over that of large arguments.
            QueueFull: as many tasks wait as the agent's `max_depth` allows.
            Unavailable: Redis did not answer.
        """
        task = self.task
        arguments, secrets = task.arguments.encode_call((goal,), inputs)
        try:
            self.state_type.kind(**task.arguments.decode(arguments))
        except ValidationError as error:
            raise InvalidArguments(task.name, first_problem(error)) from None
        producer = task.app.producer
        if len(arguments) > producer.payload_limit:
            stored = orjson.dumps(self._stored(arguments))
            check_size("the goal and the inputs, which the state has,", len(stored), producer.payload_limit)
        task_id, tenant = self._id(arguments, key), self.own_tenant
        if (chain := task.app.enqueue_chain) is None:
            message = task.as_call().limited(task.template.message(arguments, secrets, task_id=task_id, tenant=tenant))
        else:
            call = EnqueueCall(task.name, {"goal": goal, **inputs}, task.queue, {"task_id": task_id}, {})
            message = await hooked_message(
                chain,
                call,
                lambda: task.as_call().limited(
                    EnvelopeTemplate(task.name, call.headers, app=task.app.name, lane=task.lane).message(
                        arguments, secrets, task_id=task_id, tenant=tenant
                    )
                ),
            )

        async def enqueue(ids: Ids | None, *, planned: bool) -> list[TaskHandle[Any]]:
            if fresh:
                return [await producer.enqueue_fresh(message, queue=task.queue, decode=task.decode)]
            # The id stands for the goal: a key may stand for several texts, and some inputs are not part of a goal.
            limit = task.limit_on(task.queue)
            same: Callable[..., bool] = lambda *_: True  # noqa: E731
            return [await producer.send_one(message, queue=task.queue, decode=task.decode, same=same, limit=limit)]

        if (run := enqueuing_run()) is None:
            [handle] = await enqueue(None, planned=False)
        else:
            open_handle = partial(producer.handle_at, decode=task.decode)
            [handle] = await enqueue_once(run, task.name, message.id.encode, enqueue, open_handle, own_ids=True)
        return handle

    def _run(self, call: Callable[[AgentTask[S]], Coroutine[Any, Any, T]], instead: str) -> T:
        if in_handler_thread():
            return call_in_loop(partial(call, self))
        return self.task.app.sync().call(lambda _: call(self), f"await {self.name}.{instead}")

    enqueue_sync = blocking(enqueue, _run)

    def task_id(self, goal: str, *, key: str | None = None, **inputs: Any) -> str:
        """Return the task id of a goal, enqueued or not, from the arguments of `enqueue`. Raises `InvalidArguments`."""
        arguments, _ = self.task.arguments.encode_call((goal,), inputs)
        return self._id(arguments, key)

    def _id(self, arguments: bytes, key: str | None) -> str:
        if key == "":
            raise InvalidArguments(self.task.name, "key must not be empty; omit it to derive the id from the goal")
        return with_tenant(self.own_tenant, goal_id(self.task.name, key, self._stored(arguments)))

    def _stored(self, arguments: bytes) -> dict[str, Any]:
        """Return the arguments that the state of the agent stores."""
        decoded: dict[str, Any] = orjson.loads(arguments)
        return {name: value for name, value in decoded.items() if name not in self.state_type.ephemeral}

    def __repr__(self) -> str:
        return f"AgentTask({self.name!r}, queue={self.queue!r})"
