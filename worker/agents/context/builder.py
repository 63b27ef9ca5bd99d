"""Builder of the context for the next call of a model in a running task: repairs, compacts, assembles."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar, overload, runtime_checkable

from ....deadletter.policy import Retry
from ....queues.durations import Duration
from ....queues.errors import QueueError
from ...context import Context
from ...durable.journal.quoting import quoted_block, quoted_line, quoted_name
from ...durable.journal.resumption import Resumption
from ...durable.run import Run
from ...durable.steps.calls import call_in_step
from ...durable.steps.codec import is_async
from ...durable.steps.current import CURRENT_RUN
from ...durable.task_capacity import ContextUse
from ...errors import StepOutsideTask
from ..coherence.monitor import CoherenceMonitor
from ..journal.state import AgentState
from .background import (
    Background,
    Recall,
    SearchesMemory,
    has_memory,
    read_background,
    search,
    session_profile,
    store_background,
)
from .compaction import Summarizer, apply_recorded_summary, compact
from .conversation import repair
from .layers import Layers, assemble
from .prompt import Budgets, Prompt, TokenCounter, default_counter
from .recorded import record_prompt

R = TypeVar("R")


@runtime_checkable
class _LiveState(Protocol):
    """Live state of an agent."""

    @property
    def steps_done(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextBuilder:
    """Configuration of an agent's context.

    Attributes:
        window: tokens that the model accepts.
        identity: the start of every prompt, after the stored identity of the agent if it has one.
        rules: follow the identity, the same in every prompt.
        profile: lines about the user, or a function that returns them, which is called once per task; by default, in a
            turn of a session, what the memory knows about its id as a subject. None for no profile.
        memory: a store or function that is searched for the goal and for each step; True for the task's own store, if
            there is one; False for none.
        memories: most memories for the goal; half as many for a step.
        last: most messages of the conversation.
        tools: names of the ready-made tools that the model has (`AgentTools.names`): a prompt names no other.
        counter: token counter, see `default_counter`.
        summarizer: summarizes all but the last `keep` messages when the context takes `compact_at` of the window.
        retry: how often and how far apart the summarizer is called, see `compact`.
        keep_prompts: how many prompts of a task are recorded for people, about: the latest, with secrets masked, for as
            long as the record of the task is kept. 0 for none.
        on_failure: what to do if it returns no usable summary and the prompt does not fit the window without one, see
            `compact`. A digest is used as soon as there is no summary.
    """

    window: int
    identity: str = ""
    rules: Sequence[str] = ()
    profile: Sequence[str] | Callable[[Context], Awaitable[Sequence[Any]]] | Literal["session"] | None = "session"
    memory: SearchesMemory | Recall | bool = True
    memories: int = 10
    budgets: Budgets = field(default_factory=Budgets)
    counter: TokenCounter = field(default_factory=default_counter)
    last: int | None = None
    tools: Collection[str] = ()
    summarizer: Summarizer | None = None
    compact_at: float = 0.8
    keep: int = 20
    retry: Retry = field(default_factory=Retry)
    on_failure: Literal["error", "digest"] = "error"
    keep_prompts: int = 50

    def __post_init__(self) -> None:
        counts: tuple[tuple[str, str, object], ...] = (
            ("window", "1 token", self.window),
            ("keep", "1 message", self.keep),
        )
        for name, least, number in counts:
            if not isinstance(number, int) or number < 1:
                raise ValueError(f"{name} must be a whole number, {least} or more, got {number!r}")
        profile = None if self.profile == "session" else self.profile
        for name, texts in (("rules", self.rules), ("profile", profile), ("tools", self.tools)):
            if isinstance(texts, str):
                raise ValueError(f"{name} must be a list of texts, got {texts!r}")
        if type(self.keep_prompts) is not int or self.keep_prompts < 0:
            raise ValueError(f"keep_prompts must be a number of prompts, 0 or more, got {self.keep_prompts!r}")
        if not 0 < self.compact_at <= 1:
            raise ValueError(f"compact_at must be more than 0 and at most 1, got {self.compact_at}")
        if self.last is not None and self.last < 1:
            raise ValueError(f"last must be 1 message or more, got {self.last}")

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

        The answer is of the type that the model function declares. Without one it is JSON data, whose objects also have
        their keys as attributes: `answer.content`.

        For the other arguments and errors see `build` and `Context.step`.
        """
        await apply_recorded_summary(_run_of(ctx), state, self.keep)

        @functools.wraps(model)
        async def called() -> Any:
            prompt = await self.build(ctx, state, inbox=inbox, in_flight=in_flight)
            if is_async(model):
                return await model(prompt)
            return await call_in_step(_run_of(ctx), model, prompt)

        if inspect.signature(model).return_annotation is inspect.Signature.empty:
            del called.__wrapped__
            called.__annotations__ = {"return": Any}
        return _readable(await ctx.options(timeout=timeout, retry=retry).step(name, called))

    async def build(
        self,
        ctx: Context,
        state: AgentState,
        *,
        inbox: Iterable[object] = (),
        in_flight: Iterable[str] = (),
    ) -> Prompt:
        """Return the context for a call of a model that is made now; `ask` also handles recorded answers.

        Tool calls without a result get an "interrupted" result, in the state and in the log. Run the tools that can
        still answer first.

        Args:
            inbox: messages that arrived in the meantime and are not in `state.messages`.
            in_flight: work that continues elsewhere, such as child tasks.

        Raises `ContextError`, `StepOutsideTask`, `LeaseLost`.
        """
        run = _run_of(ctx)
        await repair(run, state)
        background, problem = await self._background(ctx, run, state)
        found, step_problem = await self._step_memories(run, state, background)
        if problem := problem or step_problem:
            found = [f"- not available, the search failed: {quoted_line(problem)}"]
        layers = Layers(
            state=state,
            identity=_identity(ctx, self.identity),
            rules=self.rules,
            background=background,
            received=_received(run),
            previous=_previous_run(run),
            step_memories=found,
            in_flight=tuple(in_flight),
            inbox=[_inbox_text(one) for one in inbox],
            tools=self.tools,
            capacity=await _capacity(ctx),
        )
        prompt = self._assemble(run, layers)
        if self.summarizer is not None and prompt.wanted >= self.compact_at * self.window:
            prompt = await self._compacted(run, state, self.summarizer, layers, prompt)
        if self.keep_prompts:
            current = state.current or ""
            await record_prompt(run, prompt, window=self.window, plan_step=current, keep=self.keep_prompts)
        return prompt

    async def _compacted(
        self, run: Run, state: AgentState, summarizer: Summarizer, layers: Layers, prompt: Prompt
    ) -> Prompt:
        """Return the prompt after a compaction of the conversation; the given one if there was nothing to compact."""
        compacted = await compact(
            run,
            state,
            summarizer,
            keep=self.keep,
            budget=int(self.window * self.budgets.summary),
            pinned=int(self.window * self.budgets.pinned),
            counter=self.counter,
            retry=self.retry,
            on_failure=self.on_failure,
            tools=self.tools,
            fits=prompt.wanted <= self.window,
        )
        return self._assemble(run, layers) if compacted else prompt

    def _assemble(self, run: Run, layers: Layers) -> Prompt:
        prompt = assemble(layers, self.window, budgets=self.budgets, counter=self.counter, last=self.last)
        run.extras.put(ContextUse(max(0, int(self.window * (1 - self.budgets.reserve)) - prompt.wanted), self.window))
        if (monitor := run.observer(CoherenceMonitor)) is not None:
            monitor.prompt = prompt
        return prompt

    async def _background(self, ctx: Context, run: Run, state: AgentState) -> tuple[Background, str]:
        """Return the background of the task, chosen once; and the error of a search that is tried again."""
        if (chosen := read_background(run, state.goal)) is not None:
            return chosen, ""
        profile_of = session_profile(run, state) if self.profile == "session" else self.profile
        if callable(profile_of):
            profile, problem = await search(run, lambda _query, _limit: profile_of(ctx), "profile", 1)
        else:
            profile, problem = [f"- {quoted_line(line, 1000)}" for line in profile_of or ()], ""
        lines, search_problem = await search(run, self.memory, state.goal, self.memories)
        problem = problem or search_problem
        room = int(self.window * self.budgets.memory)
        profile, room, cut = self._fitting(profile, room)
        memories, _, left_out = self._fitting(lines, room)
        chosen = Background(profile, memories, cut + left_out)
        if not problem and (callable(profile_of) or has_memory(run, self.memory)):
            await store_background(run, state.goal, chosen)
        return chosen, problem

    def _fitting(self, lines: Sequence[str], room: int) -> tuple[list[str], int, int]:
        """Return the first lines that fit, the room that they leave, and how many do not fit."""
        kept: list[str] = []
        for line in lines:
            room -= self.counter.count(line + "\n")
            if room < 0:
                break
            kept.append(line)
        return kept, max(0, room), len(lines) - len(kept)

    async def _step_memories(self, run: Run, state: AgentState, background: Background) -> tuple[list[str], str]:
        """Return memories for the current step that the background does not have."""
        title = next((step.title for step in state.plan if step.key == state.current), "")
        return await search(run, self.memory, title, self.memories // 2, known=background.memories)


class _JsonObject(dict[str, Any]):
    """JSON object whose keys are attributes, too, unless a method of dict has that name."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(
                f"the answer of the model has no {name!r}, it has {', '.join(self) or 'no fields'}; declare the return "
                "type of the model's function to get an object of that type"
            ) from None


def _readable(value: Any) -> Any:
    """Return JSON data with its objects as `_JsonObject`; any other value unchanged."""
    if type(value) is dict:
        return _JsonObject({name: _readable(part) for name, part in value.items()})
    return [_readable(part) for part in value] if type(value) is list else value


def _run_of(ctx: Context) -> Run:
    run = CURRENT_RUN.get()
    if run is None or run.closed or run.id != ctx.task_id:
        raise StepOutsideTask(
            "a context can be built only in the handler that received this ctx, while it runs: repairs and compactions "
            "are recorded by its run"
        )
    return run


def _identity(ctx: Context, own: str) -> str:
    """Return the stored identity of the agent, and that of the builder after it."""
    stored = "" if ctx.identity is None else ctx.identity.identity.text()
    return f"{stored}\n\n{own}" if stored and own else stored or own


def _previous_run(run: Run) -> Resumption | None:
    """Return what the previous run left, until a step is recorded: for an agent, a step of its plan.

    What this run has called and has an answer to is in doubt no more.
    """
    found = run.resumption
    live = run.observer(_LiveState)  # type: ignore[type-abstract]  # a protocol is asked for
    if found is None or (run.steps_recorded if live is None else live.steps_done):
        return None
    if found.handoff is None:
        return found
    left = found.handoff.dependencies
    open_steps = [*(call.key for call in left.in_flight), *(doubt.key for doubt in left.in_doubt)]
    return found.without([key for key in open_steps if _answered(run, key)])


def _answered(run: Run, key: str) -> bool:
    """Return whether this run has called a step, and the call has ended."""
    return run.keys.is_given(key) and key not in run.steps_in_flight


async def _capacity(ctx: Context) -> Sequence[str]:
    """Return sentences about what the task has left; none while Redis is away."""
    try:
        return (await ctx.capacity()).sentences()
    except QueueError:
        return ()


def _received(run: Run) -> str:
    """Return the note of the task that this one continues, quoted."""
    received = None if run.resumption is None else run.resumption.received
    return "" if received is None or not received.message else quoted_block(received.message)


def _inbox_text(message: object) -> str:
    """Return an inbox message with its sender, quoted: it is data, not an instruction of the user."""
    sender = getattr(message, "sender", "")
    start = f"[message from {quoted_name(sender)}]" if sender else "[message]"
    return f"{start}\n{quoted_block(getattr(message, 'content', message))}"
