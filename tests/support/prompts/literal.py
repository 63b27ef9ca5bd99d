"""A literal agent: its model knows nothing but the prompt, and does exactly what the prompt says.

As a program it is a worker that kills its own process at the places in KILLS (JSON: `["s3:asked", ...]`), once each:
GRAVES is a folder with a file for each death. PROMPTS and EFFECTS are files to which prompts and effects are appended.
WINDOW is the window of the model in tokens, STEPS the number of steps.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any, ClassVar

import orjson
from perdure import Agent, AgentState, App, Context, ContextBuilder, PlanStep, Retry, Worker, current_step
from perdure.context import Prompt, to_openai
from perdure.worker.agents.context.prompt import Estimate
from perdure.worker.runtime.stop_signals import stop_on_signals

WORDS = "word " * 156
"""An answer of 200 tokens has these words."""

PATIENT = Retry(max_attempts=3, max_crashes=100, base=0.0)
_STEP = re.compile(r"(?:Continue with s|S)tep (\d+) of \d+: `([^`]+)`")


def literal_answer(messages: list[dict[str, Any]]) -> str:
    """Return the name of the step that the prompt asks for, and the total so far plus its number.

    The total of the last step is known from the prompt only. Fails if the prompt lacks it or contradicts itself.
    """
    texts = [one["content"] for one in messages if (one["content"] or "").startswith("# Brief")]
    assert len(texts) == 1, f"{len(texts)} briefs"
    found = _STEP.search(texts[0].partition("\n\n## ")[0])
    assert found is not None, f"no step in: {texts[0][:200]}"
    number, key = int(found[1]), found[2]
    done = re.findall(r"^- `(\w+)`[^\n]*?: (\w+) total=(\d+)", texts[0], re.MULTILINE)
    assert key not in [name for name, _, _ in done], f"{key} is to be done and was done"
    assert all(name == said for name, said, _ in done)
    total = int(done[-1][2]) if done else 0
    assert total == sum(range(number)), f"the last total is {total} before step {number}"
    return f"{key} total={total + number} {WORDS}"


class Hooks:
    """Observations of a test, and its hooks."""

    def on_prompt(self, prompt: Prompt, state: AgentState) -> None:
        """Called with each prompt, and the state that it was made from."""

    def on_effect(self, key: str, idempotency_key: str) -> None:
        """Called when the step that the model named is taken."""

    def at(self, place: str) -> None:
        """Called at each place where a process may die."""


class Notes(Hooks):
    """Hooks that keep the prompts with their states, and the effects with their idempotency keys."""

    def __init__(self) -> None:
        self.prompts: list[tuple[Prompt, AgentState]] = []
        self.effects: list[tuple[str, str]] = []

    def clear(self) -> None:
        self.prompts.clear()
        self.effects.clear()

    def on_prompt(self, prompt: Prompt, state: AgentState) -> None:
        self.prompts.append((prompt, state))

    def on_effect(self, key: str, idempotency_key: str) -> None:
        self.effects.append((key, idempotency_key))


class Literal(Agent[AgentState]):
    """Takes the steps that its model names. The hooks are for tests."""

    steps: ClassVar[int] = 30
    builder: ClassVar[ContextBuilder] = ContextBuilder(window=128_000, counter=Estimate())
    hooks: ClassVar[Hooks] = Hooks()

    async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
        return [PlanStep(key=f"s{number}", title=f"Add {number}") for number in range(1, self.steps + 1)]

    async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> str:
        def model(prompt: Prompt) -> str:
            self.hooks.on_prompt(prompt, state.model_copy(deep=True))
            self.hooks.at(f"{step.key}:model")
            return literal_answer(to_openai(prompt))

        answer: str = await self.builder.ask(ctx, state, model)
        self.hooks.at(f"{step.key}:asked")
        key = answer.partition(" ")[0]
        await ctx.step("do", self.do, key)
        self.hooks.at(f"{step.key}:did")
        await ctx.add_message("assistant", answer)
        if step.key.endswith("3"):
            await ctx.decide(f"keep {key}", reasoning="it adds up", alternatives=["start over"])
            await ctx.discover(f"{key} is small", source="the plan")
        self.hooks.at(f"{step.key}:said")
        return answer

    def do(self, key: str) -> str:
        self.hooks.on_effect(key, current_step().idempotency_key)
        return key

    async def finish(self, ctx: Context, state: AgentState) -> str:
        return str(state.results[f"s{self.steps}"]).partition(" word")[0]


def repeated_or_skipped(effects: list[tuple[str, str]], steps: int) -> list[str]:
    """Return what is wrong with the effects: pairs of the step that the model named and the idempotency key.

    An effect that was cut off before its record happens again with the same idempotency key, and counts once.
    """
    once = list(dict.fromkeys(effects))
    found = [f"{key} under {idempotency_key}" for key, idempotency_key in once if f":{key}/" not in idempotency_key]
    keys = [key for key, _ in once]
    expected = [f"s{number}" for number in range(1, steps + 1)]
    return found if keys == expected else [*found, f"done: {', '.join(keys)}"]


def append(variable: str, line: bytes) -> None:
    file = os.open(os.environ[variable], os.O_APPEND | os.O_CREAT | os.O_WRONLY, 0o600)
    os.write(file, line + b"\n")
    os.close(file)


class Deadly(Hooks):
    """Hooks of a worker process, which kill it at the places of KILLS, once each."""

    def on_prompt(self, prompt: Prompt, state: AgentState) -> None:
        messages = [one.model_dump(mode="json") for one in prompt.messages]
        line = {"messages": messages, "cacheable": prompt.cacheable, "stable": prompt.stable}
        append("PROMPTS", orjson.dumps({**line, "state": state.model_dump(mode="json")}))

    def on_effect(self, key: str, idempotency_key: str) -> None:
        append("EFFECTS", f"{key} {idempotency_key}".encode())

    def at(self, place: str) -> None:
        grave = Path(os.environ["GRAVES"], place)
        if place in orjson.loads(os.environ["KILLS"]) and not grave.exists():
            grave.touch()
            os.kill(os.getpid(), signal.SIGKILL)


async def main() -> None:
    """Run a worker with the agent of the environment."""
    kind: Any = type("Literal", (Literal,), {"hooks": Deadly(), "steps": int(os.environ["STEPS"])})
    kind.builder = ContextBuilder(window=int(os.environ["WINDOW"]), identity="You add.", counter=Estimate())
    app = App("literal")
    app.agent(name="literal", retry=PATIENT)(kind)
    worker = Worker(app, concurrency=1)
    async with stop_on_signals(worker.stop), worker:
        sys.stdout.write(f"{worker.id}\n")
        sys.stdout.flush()
        await worker.run()


if __name__ == "__main__":
    asyncio.run(main())
