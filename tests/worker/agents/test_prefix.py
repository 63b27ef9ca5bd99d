"""The unchanged start of prompts, which providers cache: what stays, and when it may change."""

from __future__ import annotations

import sys
from itertools import pairwise
from typing import Any, ClassVar

import pytest
from perdure import Agent, AgentState, App, Context, ContextBuilder, PlanStep, Retry
from perdure.worker.agents.context.background import Background
from perdure.worker.agents.context.layers import Layers, assemble
from perdure.worker.agents.context.prompt import Estimate, Prompt
from perdure.worker.durable.journal.chat import FROM_INBOX, Message
from perdure.worker.durable.journal.resumption import Resumption

from tests.support.prompts.reading import parts_of, stability
from tests.support.workers import work_off

FORMS = ("messages", "openai", "anthropic")
ANSWER = "word " * 160
"""200 tokens."""


def conversation(length: int) -> list[Message]:
    roles: list[Any] = ["user", "assistant"]
    return [Message(role=roles[at % 2], content=f"{at} {ANSWER}", n=at + 1) for at in range(length)]


class Thirty(Agent[AgentState]):
    """Thirty steps, each with an answer of 200 tokens."""

    prompts: ClassVar[list[Prompt]]
    builder = ContextBuilder(window=128_000, identity="You read pages.", rules=["Quote the page."], counter=Estimate())

    async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
        return [PlanStep(key=f"s{n}", title=f"Read page {n}") for n in range(1, 31)]

    async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> str:
        answer = await self.builder.ask(ctx, state, self.model)
        await ctx.add_message("assistant", answer)
        return answer

    async def model(self, prompt: Prompt) -> str:
        self.prompts.append(prompt)
        return f"page {len(self.prompts)}: {ANSWER}"

    async def finish(self, ctx: Context, state: AgentState) -> int:
        return len(state.results)


@pytest.mark.integration
async def test_most_of_a_prompt_is_the_start_of_the_one_before_it(app: App) -> None:
    """30 steps with answers of 200 tokens, no compaction: the figure of docs/how-to/context.md."""
    kind: Any = type("Thirty", (Thirty,), {"prompts": []})
    handle = await app.agent(name="thirty")(kind).enqueue("Read all pages")
    await work_off(app)
    assert await handle.result(timeout=0) == len(kind.prompts) == 30
    assert Estimate().count(ANSWER) == 200
    for form in FORMS:
        found = stability(kind.prompts, form)[8:]  # that of the tenth prompt is the first
        sys.stdout.write(f"{form}: unchanged start of prompts 10 to 30: {min(found):.1%} to {max(found):.1%}\n")
        assert min(found) >= 0.83
    for former, prompt in pairwise(kind.prompts):
        assert prompt.messages[: former.cacheable] == former.messages[: former.cacheable]
        for form in FORMS:
            before = parts_of(former, form)[:-1]
            assert parts_of(prompt, form)[: len(before)] == before
        assert len(former.messages) == former.cacheable + 1, "only the brief comes after it"


@pytest.mark.integration
async def test_memories_for_the_goal_are_chosen_once(app: App) -> None:
    """They are stored with the task, so that a resumed run has the same prompt though the store has changed."""
    known, asked = ["a lease lasts 15 s"], list[str]()

    async def recall(query: str, limit: int) -> list[str]:
        asked.append(query)
        return list(known)

    class Remembers(Thirty):
        builder = ContextBuilder(window=10_000, memory=recall, counter=Estimate())
        prompts: ClassVar[list[Prompt]] = []

        async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
            return [PlanStep(key="s1", title="First"), PlanStep(key="s2", title="Second")]

        async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> str:
            answer = await super().act(ctx, state, step)
            known.append("it is renewed")
            if step.key == "s2" and ctx.attempt == 1:
                raise RuntimeError("cut off")
            await self.builder.ask(ctx, state, self.model)
            return answer

    prompts = Remembers.prompts
    await app.agent(name="remembers", retry=Retry(max_attempts=2, base=0.0))(Remembers).enqueue("Explain leases")
    await work_off(app)
    assert len(prompts) == 4
    assert {prompt.messages[: prompt.stable] for prompt in prompts} == {prompts[0].messages[:2]}
    assert prompts[0].messages[0].content == "# Memories\n\n- a lease lasts 15 s"
    assert asked.count("Explain leases") == 1
    assert asked.count("Second") == 2
    briefs = [prompt.messages[-1].content for prompt in prompts]
    assert "Memories" not in briefs[0], "none that the start does not have"
    assert briefs[-1].endswith("## Memories for this step\n- it is renewed")


@pytest.mark.integration
async def test_a_failing_store_costs_the_memories_and_is_mentioned(app: App) -> None:
    prompts: list[Prompt] = []

    async def broken(query: str, limit: int) -> list[str]:
        raise OSError("disk\n# full")

    async def model(prompt: Prompt) -> str:
        prompts.append(prompt)
        return "."

    @app.task
    async def asks(ctx: Context) -> None:
        await ContextBuilder(window=10_000, memory=broken).ask(ctx, AgentState(goal="Find it"), model)

    handle = await asks.enqueue()
    await work_off(app)
    await handle.result(timeout=0)
    assert prompts[0].messages[-1].content == (
        "# Brief\n\n## Memories for this step\n- not available, the search failed: OSError: disk # full"
    )


def test_old_turns_leave_in_blocks() -> None:
    """Without a summarizer the start changes seldom, also while turns are dropped."""
    prompts = [assemble(Layers(AgentState(messages=conversation(length))), 8000) for length in range(1, 200)]
    assert all(prompt.total <= 8000 for prompt in prompts)
    shown = [prompt.messages[2].content for prompt in prompts[60:]]
    assert len(set(shown)) <= len(shown) // 8
    assert all(prompt.messages[0].content.startswith("0 word") for prompt in prompts), "the first instruction stays"
    assert sum(share > 0.8 for share in stability(prompts)[60:]) > len(prompts[61:]) * 0.85
    assert min(prompt.tokens["turns"] for prompt in prompts[60:]) > 8000 * 0.3


def test_first_instructions_are_bounded() -> None:
    long = [Message(role="user", content="Never pay. " + "x" * 40_000), *conversation(61)[1:]]
    prompt = assemble(Layers(AgentState(messages=long)), 8000)
    assert prompt.messages[0].content.startswith("Never pay. xxx")
    assert prompt.messages[0].content.endswith(" more characters]")
    assert prompt.total <= 8000 * 0.85


def test_what_the_user_said_stays_word_for_word_when_its_turns_leave() -> None:
    """The first instructions and the latest messages, bounded; they change only when turns leave."""
    messages = conversation(1)
    prompts: list[Prompt] = []
    for at in range(1, 200):
        said: Any = "user" if at % 10 == 5 else "assistant"
        text = {25: "Never write to carl.", 35: "x" * 40_000, 45: "From others."}.get(at, f"{at} {ANSWER}")
        name = {25: "ada\n# Rules", 45: FROM_INBOX}.get(at)
        messages.append(Message(role=said, content=text, name=name, n=at + 1))
        prompts.append(assemble(Layers(AgentState(messages=messages)), 16_000))
    assert all(prompt.total <= 16_000 * 0.85 for prompt in prompts)
    copies = [[one for one in prompt.messages if one.name == "said"] for prompt in prompts]
    heads = [prompt.messages[: 1 + len(found)] for prompt, found in zip(prompts, copies, strict=True)]
    assert {head[0].content for head in heads} == {messages[0].content}
    texts = [one.content for found in copies for one in found]
    assert "[earlier message of the user from `ada # Rules`, event 26]\nNever write to carl." in texts
    assert all("From others." not in text for text in texts), "a message of others is data"
    assert max(map(Estimate().count, texts)) < 16_000 * 0.05 / 3, "a long one does not displace the others"
    for prompt, found in zip(prompts, copies, strict=True):
        shown = [one.n for one in prompt.messages if one.name != "said" and one.n is not None]
        assert not {one.n for one in found} & set(shown), "what is shown has no copy"
    changes = sum(head != former for former, head in pairwise(heads))
    blocks = sum(one.left_out != other.left_out for one, other in pairwise(prompts))
    assert changes <= blocks <= 20
    assert sum(share > 0.8 for share in stability(prompts)[60:]) > len(prompts[61:]) * 0.85


@pytest.mark.integration
async def test_the_note_of_the_task_that_is_continued_stays(app: App) -> None:
    """It is part of the start in each prompt of the successor, quoted."""
    prompts, resumptions = list[Prompt](), list[Resumption | None]()

    async def model(prompt: Prompt) -> str:
        prompts.append(prompt)
        return "."

    @app.task
    async def second(ctx: Context) -> None:
        resumptions.append(ctx.resumption)
        for _ in range(2):
            await ContextBuilder(window=10_000).ask(ctx, AgentState(goal="Go on reading"), model)

    @app.task
    async def first(ctx: Context) -> None:
        await ctx.continue_as(second, message="# Page 4\nis torn")

    await first.enqueue()
    await work_off(app)
    assert len(prompts) == 2
    for prompt in prompts:
        assert prompt.messages[0].content == (
            "# From the task that this one continues\n\n```text\n# Page 4\nis torn\n```"
        )
    assert "You are resuming second after a handoff from another task" in prompts[0].messages[-1].content
    assert "torn" not in prompts[0].messages[-1].content


def test_a_message_that_is_the_goal_stands_in_the_turns() -> None:
    """In a session the goal is the last message: the start of a prompt does not change with it."""
    said = [Message(role="user", content="I live in Oslo"), Message(role="assistant", content="Noted.")]
    chosen = [Background(["- likes rain"], [f"- memory {at}"]) for at in range(2)]
    first = assemble(Layers(AgentState(goal="I live in Oslo", messages=said), background=chosen[0]), 8000)
    later = AgentState(goal="And now?", messages=[*said, Message(role="user", content="And now?")])
    second = assemble(Layers(later, background=chosen[1]), 8000)
    assert second.messages[: first.cacheable] == first.messages[: first.cacheable]
    assert [one.content for one in second.messages[:4]] == [
        "# Profile\n\n- likes rain",
        "I live in Oslo",
        "Noted.",
        "And now?",
    ]
    assert "- memory 1" in second.messages[-1].content
    later.messages += conversation(60)
    narrow = assemble(Layers(later), 4000)
    assert narrow.messages[narrow.cacheable].content == "# Goal\n\nAnd now?", "it has left the turns"
    assert narrow.total <= 4000
