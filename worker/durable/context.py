"""What a handler is given: its task, and `step`."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar, overload

from ...deadletter import Retry
from ...queues import InboxMessage, Sent, TaskHandle
from ..journal import Event, Message, Resumption, Role, ToolCall
from ..journal.agent_events import Decided, Discovered, MessageAdded
from ..log import logger
from .continuation import Receiver, continue_as
from .log_calls import call_tool, log_once
from .messaging import ask, receive, send
from .resume_info import ResumeInfo
from .run import Run
from .step import Durability, StepOptions, run_step
from .task_artifacts import Artifacts
from .task_memory import TaskMemory

if TYPE_CHECKING:
    from loguru import Logger  # exists in its type stubs only

__all__ = ["Context"]

R = TypeVar("R")


def _no_resources() -> None:
    return None


class Context:
    """The running task, as its handler sees it."""

    def __init__(
        self, run: Run, *, durability: Durability = "sync", resources: Callable[[], Any] = _no_resources
    ) -> None:
        self._run = run
        self._resources = resources
        self._durability: Durability = durability

    @property
    def task_id(self) -> str:
        return self._run.id

    @property
    def task(self) -> str:
        """The task's name."""
        return self._run.envelope.task

    @property
    def queue(self) -> str:
        return self._run.delivery.partition.queue

    @property
    def headers(self) -> Mapping[str, str]:
        """What the producer sent along."""
        return self._run.envelope.headers

    @property
    def attempt(self) -> int:
        """The number of this attempt, from 1. A run that goes on after a crash is the same attempt."""
        return self._run.history.counters.attempts + 1

    @property
    def crashes(self) -> int:
        """How many deliveries of this task ended without any outcome."""
        return self._run.history.counters.crashes

    @property
    def resumed(self) -> bool:
        """Whether earlier runs left recorded steps."""
        return bool(self._run.history.done)

    @property
    def resumption(self) -> Resumption | None:
        """What a former run left, why it stopped and how long ago; None where this is the first run."""
        return self._run.resumption

    def resume_info(self) -> ResumeInfo:
        """What to know before going on, in its order: what was left undone, messages, state; history where wanted."""
        return ResumeInfo(self._run)

    @property
    def log(self) -> Logger:
        """A logger with the task's name and id bound."""
        return logger.bind(task=self.task, id=self.task_id)

    @property
    def resources(self) -> Any:
        """What the app's lifespan yielded in this process; None without a lifespan."""
        return self._resources()

    @property
    def memory(self) -> TaskMemory:
        """What is known beyond this task: long-term memories, see docs/memory.md."""
        return TaskMemory(self._run, self._durability)

    @property
    def artifacts(self) -> Artifacts:
        """Files and other bytes that the task produces; they are kept outside Redis."""
        return Artifacts(self._run, self._durability)

    @overload
    async def step(
        self,
        name: str,
        fn: Callable[..., Awaitable[R]],
        /,
        *args: Any,
        timeout: float | None = None,
        retry: Retry | None = None,
        durability: Durability | None = None,
        risky: bool = False,
        verify: Callable[..., Any] | None = None,
        in_doubt: Literal["retry", "fail"] = "retry",
        on_mismatch: Literal["error", "rerun"] = "error",
        **kwargs: Any,
    ) -> R: ...
    @overload
    async def step(
        self,
        name: str,
        fn: Callable[..., R],
        /,
        *args: Any,
        timeout: float | None = None,
        retry: Retry | None = None,
        durability: Durability | None = None,
        risky: bool = False,
        verify: Callable[..., Any] | None = None,
        in_doubt: Literal["retry", "fail"] = "retry",
        on_mismatch: Literal["error", "rerun"] = "error",
        **kwargs: Any,
    ) -> R: ...
    async def step(
        self,
        name: str,
        fn: Callable[..., Any],
        /,
        *args: Any,
        timeout: float | None = None,
        retry: Retry | None = None,
        durability: Durability | None = None,
        risky: bool = False,
        verify: Callable[..., Any] | None = None,
        in_doubt: Literal["retry", "fail"] = "retry",
        on_mismatch: Literal["error", "rerun"] = "error",
        **kwargs: Any,
    ) -> Any:
        """Run `fn(*args, **kwargs)` once and record its result; on a resumed run, return the record.

        name: names the step within the task; used again, the second is `name#2`. fn: async, or sync (it is run in a
        thread, which cannot be stopped from outside). Its result must be JSON data, or of the type it declares.
        timeout, retry, durability, risky, verify, in_doubt, on_mismatch: see `StepOptions`; a function with parameters
        of these names is passed as a lambda.

        Raises what `fn` raises; `StepMismatch`, `StepTimeout`, `StepInDoubt`, `StepOutsideTask`,
        `UnserialisableResult`, `PayloadTooLarge`, `LeaseLost`.
        """
        options = _PLAIN_STEP
        if (
            timeout is not None
            or retry is not None
            or durability is not None
            or risky
            or verify is not None
            or in_doubt != "retry"
            or on_mismatch != "error"
        ):
            options = StepOptions(timeout, retry, durability, risky, verify, in_doubt, on_mismatch)
        return await run_step(self._run, name, fn, args, kwargs, options, self._durability)

    async def checkpoint(self) -> None:
        """Save now what the step of an agent's plan has in its `progress`; it is saved once in a while anyway.

        Outside such a step there is nothing to save. Raises `PayloadTooLarge`, `LeaseLost`.
        """
        await self._run.save()

    # what it tells of its work

    async def decide(self, choice: str, *, reasoning: str = "", alternatives: Sequence[str] = ()) -> None:
        """Record a choice, why it was made, and what was left open. Recorded once, as steps are."""
        await log_once(self._run, Decided(choice=choice, reasoning=reasoning, alternatives=tuple(alternatives)))

    async def discover(self, fact: str, *, source: str = "") -> None:
        """Record a fact that was found, and where. Recorded once."""
        await log_once(self._run, Discovered(fact=fact, source=source))

    async def add_message(
        self,
        role: Role,
        content: str = "",
        *,
        tool_calls: Sequence[ToolCall] = (),
        tool_call_id: str | None = None,
        name: str | None = None,
    ) -> Message:
        """Record a turn of the conversation, and return it with its number. Recorded once.

        An agent's state has it from then on; a function keeps its own.
        """
        message = Message(
            role=role, content=content, tool_calls=tuple(tool_calls), tool_call_id=tool_call_id, name=name
        )
        number = await log_once(self._run, MessageAdded(message=message))
        return message.model_copy(update={"n": number})

    async def record_event(self, event: Event) -> None:
        """Record an event of a type of one's own, see `register_event`. Recorded once."""
        await log_once(self._run, event)

    # another task, see docs/handoff.md

    async def continue_as(
        self,
        to: Receiver | str | None = None,
        *,
        why: str = "",
        queue: str | None = None,
        message: str = "",
        arguments: Mapping[str, Any] | None = None,
    ) -> NoReturn:
        """Have another task go on with the work, and end this one; its result is the other's. Does not return.

        to: the task or agent, or its name; else this one, on another queue. why: is told in the handoff. queue: else
        that of `to`; where `to` is a name, this one's. message: what whoever goes on is to know. arguments: by name,
        else this task's own. The other finds the handoff in `ctx.resumption`. Raises `InvalidArguments`,
        `HandOffRefused` where it was handed on too often, `PayloadTooLarge`, `LeaseLost`.
        """
        await continue_as(self._run, to, why=why, queue=queue, message=message, arguments=arguments)

    # messages, see docs/inbox.md

    async def inbox(
        self, wait: float | None = None, *, limit: int | None = None, sender: str | None = None, why: str = ""
    ) -> list[InboxMessage]:
        """The messages that were sent to this task and not read yet, in order. Recorded once, as steps are.

        wait: seconds to wait where there is none, `math.inf` for any time: the task is parked meanwhile, without a
        worker or a lease, and a message wakes it; `[]` when the time has passed. limit: no more than so many. sender:
        only theirs; the others stay. why: what is said of the wait. Raises `UnreadableMessage`.
        """
        return await receive(self._run, wait=wait, limit=limit, sender=sender, why=why, durability=self._durability)

    async def send(self, to: str | TaskHandle[Any], content: Any, *, sender: str | None = None) -> Sent:
        """Send a message to another task: once, however often this one is run again.

        to: the task, by its id or handle. content: JSON data. sender: who it is from, else this task's id, to which an
        answer can be sent. Raises `TaskNotFound`, `TaskEnded`, `InboxFull`, `PayloadTooLarge`, `StepMismatch`.
        """
        return await send(self._run, to, content, sender=sender, durability=self._durability)

    async def ask(self, who: str, question: str, *, wait: float = math.inf) -> InboxMessage | None:
        """Ask somebody, and wait for the next message that is from them; None when `wait` seconds have passed.

        who: what they call themselves as a sender (`perdure task send ID yes --from NAME`). The task is parked
        meanwhile.
        """
        return await ask(self._run, who, question, wait=wait, durability=self._durability)

    async def tool(
        self,
        name: str,
        fn: Callable[..., Any],
        /,
        *args: Any,
        reasoning: str = "",
        call: str | None = None,
        timeout: float | None = None,
        retry: Retry | None = None,
        risky: bool = False,
        verify: Callable[..., Any] | None = None,
        in_doubt: Literal["retry", "fail"] = "retry",
        **kwargs: Any,
    ) -> Any:
        """Call a tool: a step that the log tells of with arguments, result and reasoning.

        call: the id by which a model asked for it. For everything else see `step`.
        """
        options = StepOptions(timeout, retry, None, risky, verify, in_doubt)
        return await call_tool(
            self._run, name, fn, args, kwargs, options, self._durability, reasoning=reasoning, call=call
        )


_PLAIN_STEP = StepOptions()
