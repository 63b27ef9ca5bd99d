"""Builder of the context for the next call of a model in a running task: repairs, compacts, assembles."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar, overload

import orjson

from ....deadletter import Retry
from ....queues import Duration
from ...durable import CURRENT_RUN, Context, Run
from ...durable.steps.codec import is_async
from ...errors import StepOutsideTask
from ...journal import AgentState
from .compaction import Summarizer, apply_recorded_summary, compact
from .conversation import repair
from .layers import Layers, assemble
from .prompt import Budgets, Prompt
from .tokens import TokenCounter, default_counter

__all__ = ["ContextBuilder", "Recall", "SearchesMemory"]

R = TypeVar("R")


class SearchesMemory(Protocol):
    """Protocol of memory stores such as `HybridStore`. Results are texts or have a `text`, the best first."""

    async def search(self, query: str, *, limit: int) -> Sequence[Any]: ...


Recall = Callable[[str, int], Awaitable[Sequence[Any]]]
"""A function in place of a store: returns at most so many memories for a goal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextBuilder:
    """Configuration of an agent's context; see docs/how-to/context.md.

    Attributes:
        window: tokens that the model accepts.
        identity: the start of every prompt.
        rules: follow the identity, the same in every prompt.
        memory: a store or function that is searched for the goal; True for the task's own, `ctx.memory`.
        memories: most memories in a prompt.
        last: most messages of the conversation; None for all that fit.
        counter: token counter, see `default_counter`.
        summarizer: summarizes all but the last `keep` messages when the context takes `compact_at` of the window.
        retry: how often and how far apart the summarizer is called, see `compact`.
        on_failure: what to do if it returns no usable summary, see `compact`.
    """

    window: int
    identity: str = ""
    rules: Sequence[str] = ()
    memory: SearchesMemory | Recall | bool = False
    memories: int = 10
    budgets: Budgets = field(default_factory=Budgets)
    counter: TokenCounter = field(default_factory=default_counter)
    last: int | None = None
    summarizer: Summarizer | None = None
    compact_at: float = 0.8
    keep: int = 20
    retry: Retry = field(default_factory=Retry)
    on_failure: Literal["error", "digest"] = "error"

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"window must be 1 token or more, got {self.window}")
        if not 0 < self.compact_at <= 1:
            raise ValueError(f"compact_at must be more than 0 and at most 1, got {self.compact_at}")
        if self.keep < 1:
            raise ValueError(f"keep must be 1 message or more, got {self.keep}")

    @overload
    async def ask(
        self,
        ctx: Context,
        state: AgentState,
        model: Callable[[Prompt], Awaitable[R]],
        *,
        name: str = "model",
        inbox: Iterable[object] = (),
        in_flight: Iterable[str] = (),
        timeout: Duration | None = None,
        retry: Retry | None = None,
    ) -> R: ...
    @overload
    async def ask(
        self,
        ctx: Context,
        state: AgentState,
        model: Callable[[Prompt], R],
        *,
        name: str = "model",
        inbox: Iterable[object] = (),
        in_flight: Iterable[str] = (),
        timeout: Duration | None = None,
        retry: Retry | None = None,
    ) -> R: ...
    async def ask(
        self,
        ctx: Context,
        state: AgentState,
        model: Callable[[Prompt], Any],
        *,
        name: str = "model",
        inbox: Iterable[object] = (),
        in_flight: Iterable[str] = (),
        timeout: Duration | None = None,
        retry: Retry | None = None,
    ) -> Any:
        """Call a model with the context, as a step. A recorded answer is returned without building a context.

        For the other arguments and errors see `build` and `Context.step`.
        """
        await apply_recorded_summary(_run_of(ctx), state, self.keep)

        @functools.wraps(model)
        async def called() -> Any:
            prompt = await self.build(ctx, state, inbox=inbox, in_flight=in_flight)
            if is_async(model):
                return await model(prompt)
            answer = await _run_of(ctx).threads.run(model, (prompt,), {})
            return await answer if isinstance(answer, Awaitable) else answer

        return await ctx.options(timeout=timeout, retry=retry).step(name, called)

    async def build(
        self,
        ctx: Context,
        state: AgentState,
        *,
        inbox: Iterable[object] = (),
        in_flight: Iterable[str] = (),
        resumption: str | None = None,
    ) -> Prompt:
        """Return the context for a call of a model that is made now; `ask` also handles recorded answers.

        Tool calls without a result get an "interrupted" result, in the state and in the log. Run the tools that can
        still answer first.

        Args:
            inbox: messages that arrived in the meantime.
            in_flight: work that continues elsewhere, such as child tasks.
            resumption: text in place of `ctx.resumption`.

        Raises `ContextTooLarge`, `CompactionFailed`, `StepOutsideTask`, `LeaseLost`.
        """
        run = _run_of(ctx)
        await repair(run, state)
        layers = Layers(
            state=state,
            identity=self.identity,
            rules=self.rules,
            memories=await self._search_memory(ctx, state.goal),
            resumption=self._resumption(ctx) if resumption is None else resumption,
            in_flight=tuple(in_flight),
            inbox=[_inbox_text(one) for one in inbox],
        )
        prompt = self._assemble(layers)
        if self.summarizer is None or prompt.wanted < self.compact_at * self.window:
            return prompt
        compacted = await compact(
            run,
            state,
            self.summarizer,
            keep=self.keep,
            budget=int(self.window * self.budgets.summary),
            counter=self.counter,
            retry=self.retry,
            on_failure=self.on_failure,
        )
        return self._assemble(layers) if compacted else prompt

    def _assemble(self, layers: Layers) -> Prompt:
        return assemble(layers, self.window, budgets=self.budgets, counter=self.counter, last=self.last)

    def _resumption(self, ctx: Context) -> str:
        found = ctx.resumption
        return "" if found is None else found.text(int(self.window * self.budgets.task), count=self.counter.count)

    async def _search_memory(self, ctx: Context, goal: str) -> list[str]:
        memory: SearchesMemory | Recall | bool = ctx.memory if self.memory is True else self.memory
        if isinstance(memory, bool) or not goal:
            return []
        found = await (memory(goal, self.memories) if callable(memory) else memory.search(goal, limit=self.memories))
        return [_text_of(one) for one in found]


def _run_of(ctx: Context) -> Run:
    run = CURRENT_RUN.get()
    if run is None or run.closed or run.id != ctx.task_id:
        raise StepOutsideTask(
            "a context can be built only in the handler that received this ctx, while it runs: repairs and compactions "
            "are recorded by its run"
        )
    return run


def _text_of(found: Any) -> str:
    """Return the text of a memory: a string, an object with `text`, or a search result with `memory`."""
    if isinstance(found, str):
        return found
    return str(getattr(found, "memory", found).text)


def _inbox_text(message: object) -> str:
    """Return an inbox message as text, with its sender."""
    content = getattr(message, "content", message)
    text = content if isinstance(content, str) else orjson.dumps(content, default=str).decode()
    sender = getattr(message, "sender", "")
    return f"[message from {sender}]\n{text}" if sender else f"[message]\n{text}"
