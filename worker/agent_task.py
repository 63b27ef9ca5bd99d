"""An agent as it is enqueued: by its goal, which is worked for once.

The id of an agent's task: the same for the same goal, so that a goal is worked for once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Generic

import orjson
from pydantic import ValidationError

from ..queues import EnvelopeTemplate, TaskHandle
from .agent import Agent, S, StateType, problem_of
from .durable import EnqueueCall
from .errors import InvalidArguments
from .registry import Arguments, Task, hooked_message

__all__ = ["AgentTask", "goal_id"]


def goal_id(agent: str, key: str | None, arguments: Mapping[str, Any]) -> str:
    """The task id of a goal. key: the caller's name for it; else it is known by its arguments, which are JSON data
    without secrets.
    """
    known: list[Any] = [agent, "goal", dict(arguments)] if key is None else [agent, "key", key]
    data = orjson.dumps(known, option=orjson.OPT_SORT_KEYS)
    return f"goal-{hashlib.sha256(data).hexdigest()[:40]}"


class AgentTask(Generic[S]):
    """A registered agent. kind: its class. task: what the worker runs."""

    def __init__(self, kind: type[Agent[S]], form: StateType[S], task: Task[..., Any]) -> None:
        self.kind = kind
        self.task = task
        self._form = form

    @property
    def name(self) -> str:
        return self.task.name

    @property
    def queue(self) -> str:
        return self.task.queue

    @property
    def arguments(self) -> Arguments:
        """Its goal and its inputs, as they travel."""
        return self.task.arguments

    async def enqueue(
        self, goal: str, *, key: str | None = None, fresh: bool = False, **inputs: Any
    ) -> TaskHandle[Any]:
        """Have a goal worked for; once this returns, it is never lost.

        A goal is worked for once. It is known by `key`, or else by what is given here; where it is known already, this
        is the handle of its task, whatever that has come to: one that is finished has its result, and nothing is run.
        anew: where it has ended, however it did, it is begun afresh, and what is kept of the former run goes. inputs:
        fields of the state.

        Raises `InvalidArguments` before anything is sent, `StillRunning` for `anew` where it has not ended,
        `PayloadTooLarge`, `Unavailable`.
        """
        task, form = self.task, self._form
        arguments, secrets = task.arguments.encode_call((goal,), inputs)
        try:
            form.kind(**task.arguments.decode(arguments))
        except ValidationError as error:
            raise InvalidArguments(task.name, problem_of(error)) from None
        task_id = self._id(arguments, key)
        if (chain := task.app.enqueue_chain) is None:
            message = task.template.message(arguments, secrets, task_id=task_id)
        else:
            call = EnqueueCall(task.name, {"goal": goal, **inputs}, task.queue, {"task_id": task_id}, {})
            message = await hooked_message(
                chain,
                call,
                lambda: EnvelopeTemplate(task.name, call.headers).message(arguments, secrets, task_id=task_id),
            )
        producer = task.app.producer
        if fresh:
            return await producer.enqueue_fresh(message, queue=task.queue, decode=task.decode)
        return await producer.send_one(message, queue=task.queue, decode=task.decode)

    def task_id(self, goal: str, *, key: str | None = None, **inputs: Any) -> str:
        """The id of the task that works for a goal, enqueued or not: where messages to it are sent.

        Of what is given here it needs what was given to `enqueue`. Raises `InvalidArguments`.
        """
        arguments, _ = self.task.arguments.encode_call((goal,), inputs)
        return self._id(arguments, key)

    def _id(self, arguments: bytes, key: str | None) -> str:
        if key == "":
            raise InvalidArguments(self.task.name, "key: it is empty, and all goals would be one; leave it out")
        shown = {name: one for name, one in orjson.loads(arguments).items() if name not in self._form.ephemeral}
        return goal_id(self.task.name, key, shown)

    def __repr__(self) -> str:
        return f"AgentTask({self.name!r}, queue={self.queue!r})"
