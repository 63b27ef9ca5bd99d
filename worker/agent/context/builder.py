"""The context of a running task's next call of a model: repaired, compacted where it is due, and put together."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar, overload

import orjson

from ....deadletter import Retry
from ...durable import CURRENT_RUN, Context, Run
from ...durable.codec import is_async
from ...errors import StepOutsideTask
from ...journal import AgentState
from .compaction import Summarizer, compact, recall
from .conversation import repair
from .layers import Layers, assemble
from .prompt import Budgets, Prompt
from .tokens import TokenCounter, default_counter

__all__ = ["ContextBuilder", "Recall", "SearchesMemory"]

R = TypeVar("R")


class SearchesMemory(Protocol):
    """A store of what is remembered, such as `HybridStore`. What it finds is text, or has a `text`, the best first."""

    async def search(self, query: str, *, limit: int) -> Sequence[Any]: ...


Recall = Callable[[str, int], Awaitable[Sequence[Any]]]
"""A function in place of a store: what is remembered that bears on a goal, at most so many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextBuilder:
    """How an agent's context is rebuilt, for whichever run asks for it; see docs/context.md.

    window: tokens that the model takes. identity, rules: said first, at every call the same. memory: asked for what
    bears on the goal, up to `memories` of them; True for the task's own, `ctx.memory`. last: how many messages of the
    conversation at most; all that fit where it is None. counter: of tokens; see `default_counter`.

    summarizer: asked, once the context takes `compact_at` of the window, for a summary of all but the last `keep`
    messages. retry, on_failure: how often, and what follows when it gives none that can be used, see `compact`.
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
            raise ValueError(f"window is a number of tokens, 1 or more, not {self.window}")
        if not 0 < self.compact_at <= 1:
            raise ValueError(f"compact_at is a share of the window, more than 0 and at most 1, not {self.compact_at}")
        if self.keep < 1:
            raise ValueError(f"keep is a number of messages, 1 or more, not {self.keep}")

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
        timeout: float | None = None,
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
        timeout: float | None = None,
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
        timeout: float | None = None,
        retry: Retry | None = None,
    ) -> Any:
        """Call a model with the context, as a step of this name: an answer that is recorded is not asked for again,
        and no context is built for it. For everything else see `build` and `Context.step`.
        """
        recall(_run_of(ctx), state, self.keep)

        @functools.wraps(model)
        async def called() -> Any:
            prompt = await self.build(ctx, state, inbox=inbox, in_flight=in_flight)
            if is_async(model):
                return await model(prompt)
            answer = await _run_of(ctx).threads.run(model, (prompt,), {})
            return await answer if isinstance(answer, Awaitable) else answer

        return await ctx.step(name, called, timeout=timeout, retry=retry)

    async def build(
        self,
        ctx: Context,
        state: AgentState,
        *,
        inbox: Iterable[object] = (),
        in_flight: Iterable[str] = (),
        resumption: str | None = None,
    ) -> Prompt:
        """The context for a call of a model that is made now; for one that may be on record already, see `ask`.

        A call of a tool that has no result gets one that says it was interrupted, in the state and in the log: answer
        first what can be answered. inbox: messages that came meanwhile. in_flight: what was begun and goes on
        elsewhere. resumption: how it stands, in place of `ctx.resumption`.

        Raises `ContextTooLarge`, `CompactionFailed`, `StepOutsideTask`, `LeaseLost`.
        """
        run = _run_of(ctx)
        await repair(run, state)
        layers = Layers(
            state=state,
            identity=self.identity,
            rules=self.rules,
            memories=await self._remembered(ctx, state.goal),
            resumption=self._resumption(ctx) if resumption is None else resumption,
            in_flight=tuple(in_flight),
            inbox=[_arrived(one) for one in inbox],
        )
        prompt = self._assembled(layers)
        if self.summarizer is None or prompt.wanted < self.compact_at * self.window:
            return prompt
        shorter = await compact(
            run,
            state,
            self.summarizer,
            keep=self.keep,
            budget=int(self.window * self.budgets.summary),
            counter=self.counter,
            retry=self.retry,
            on_failure=self.on_failure,
        )
        return self._assembled(layers) if shorter else prompt

    def _assembled(self, layers: Layers) -> Prompt:
        return assemble(layers, self.window, budgets=self.budgets, counter=self.counter, last=self.last)

    def _resumption(self, ctx: Context) -> str:
        found = ctx.resumption
        return "" if found is None else found.text(int(self.window * self.budgets.task), count=self.counter.count)

    async def _remembered(self, ctx: Context, goal: str) -> list[str]:
        memory: SearchesMemory | Recall | bool = ctx.memory if self.memory is True else self.memory
        if isinstance(memory, bool) or not goal:
            return []
        found = await (memory(goal, self.memories) if callable(memory) else memory.search(goal, limit=self.memories))
        return [_wording(one) for one in found]


def _run_of(ctx: Context) -> Run:
    run = CURRENT_RUN.get()
    if run is None or run.closed or run.id != ctx.task_id:
        raise StepOutsideTask(
            "a context is rebuilt from the handler that was given this ctx, while it runs: what is repaired and "
            "compacted on the way is recorded"
        )
    return run


def _wording(found: Any) -> str:
    """The text of something remembered: of a string itself, of what a search found that of its memory."""
    if isinstance(found, str):
        return found
    return str(getattr(found, "memory", found).text)


def _arrived(message: object) -> str:
    """A message of an inbox, with who sent it."""
    content = getattr(message, "content", message)
    text = content if isinstance(content, str) else orjson.dumps(content, default=str).decode()
    sender = getattr(message, "sender", "")
    return f"[message from {sender}]\n{text}" if sender else f"[message]\n{text}"
