"""Prompts of resumed agents, after crashes at any write and kills at any place, in a wide and a narrow window."""

from __future__ import annotations

import asyncio
import os
import random
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest
from perdure import AgentState, App, ContextBuilder, Settings
from perdure.worker.agents.context.prompt import Estimate, Prompt
from perdure.worker.durable.journal.chat import Message

from tests.support.processes import worker_processes
from tests.support.prompts import literal
from tests.support.prompts.crashes import Crashes, When
from tests.support.prompts.literal import PATIENT, Literal, Notes, repeated_or_skipped
from tests.support.prompts.reading import brief_of, contradictions, stability
from tests.support.workers import BOUND

pytestmark = [pytest.mark.integration, pytest.mark.evaluation, pytest.mark.app("prompts", lease=30.0, check_state=True)]

WIDE, NARROW = 128_000, 1_500
SCHEDULES = int(os.environ.get("PROMPT_SCHEDULES", "40"))
PLACES = ("model", "asked", "did", "said")


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


async def test_no_prompt_contradicts_the_state_over_random_crashes(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    crashes, prompts, resumed = 0, 0, 0
    notes = Notes()
    scene = Crashes(monkeypatch, app)
    kind: Any = type("Literal", (Literal,), {"hooks": notes})
    agent: Any = app.agent(name="literal", retry=PATIENT)(kind)
    for seed in range(SCHEDULES):
        chosen = random.Random(seed)
        notes.clear()
        kind.steps = chosen.randint(4, 12)
        window = chosen.choice((WIDE, NARROW))
        kind.builder = ContextBuilder(window=window, identity="You add.", counter=Estimate())
        writes = chosen.sample(range(1, kind.steps * 5), chosen.randint(1, 6))
        schedule: dict[int, When] = {write: chosen.choice(("before", "after")) for write in writes}
        handle = await agent.enqueue("Add up", key=str(seed))
        result = await scene.play(handle, schedule)
        assert result == f"s{kind.steps} total={sum(range(kind.steps + 1))}", f"seed {seed}"
        assert repeated_or_skipped(notes.effects, kind.steps) == [], f"seed {seed}"
        for prompt, state in notes.prompts:
            brief = brief_of(prompt)
            assert contradictions(brief, state) == [], f"seed {seed}"
            resumed += brief.resuming
        crashes += scene.happened
        prompts += len(notes.prompts)
    say(
        f"{SCHEDULES} schedules: {crashes} crashes, {prompts} prompts, {resumed} of them after a resume, "
        "0 contradictions, 0 steps repeated or skipped, every done step accounted for"
    )


@pytest.mark.processes
@pytest.mark.parametrize("window", [WIDE, NARROW], ids=["wide", "narrow"])
@pytest.mark.parametrize("kills", [0, 10])
async def test_a_literal_agent_of_thirty_steps(settings: Settings, tmp_path: Path, window: int, kills: int) -> None:
    chosen = random.Random(kills)
    places = [f"s{number}:{chosen.choice(PLACES)}" for number in sorted(chosen.sample(range(1, 31), kills))]
    (tmp_path / "graves").mkdir()
    app = App("literal", settings=settings)
    async with app:
        given = settings.model_copy(update={"lease": 0.5, "grace": 0.2})
        with worker_processes(given, tmp_path, Path(literal.__file__)) as workers:
            workers.environment = {
                "WINDOW": str(window),
                "STEPS": "30",
                "KILLS": orjson.dumps(places).decode(),
                **{name: str(tmp_path / name.lower()) for name in ("GRAVES", "PROMPTS", "EFFECTS")},
            }
            handle: Any = await app.producer.enqueue("literal", {"goal": "Add up"}, task_id="run", queue=app.name)
            result = await run_to_the_end(handle, workers)
        record = await handle.record()
    lines = [orjson.loads(line) for line in (tmp_path / "prompts").read_bytes().splitlines()]
    prompts = [
        Prompt(tuple(map(Message.model_validate, one["messages"])), one["cacheable"], one["stable"]) for one in lines
    ]
    noted = [line.partition(" ") for line in (tmp_path / "effects").read_text().splitlines()]
    effects = [(step, key) for step, _, key in noted]
    wrong = [problem for one, prompt in zip(lines, prompts, strict=True) for problem in found_in(prompt, one["state"])]
    shares = {form: stability(prompts, form)[8:] for form in ("messages", "openai", "anthropic")}
    calls = f"{len(prompts)} calls of the model, {record.crashes} crashes"
    say(f"\nwindow {window:,}, {kills} kills: result {result!r}, {calls}")
    for form, found in shares.items():
        say(f"  unchanged start from prompt 10 on, {form}: {min(found):.1%} to {max(found):.1%}")
    last = next((one for one in reversed(prompts) if brief_of(one).resuming), None)
    if last is not None:
        say("  prompt after the last resume (turns shortened):\n" + shown(last))
    assert result == "s30 total=465"
    assert repeated_or_skipped(effects, 30) == []
    assert wrong == []
    assert len({one.messages[: one.stable] for one in prompts}) == 1
    assert len(list((tmp_path / "graves").iterdir())) == kills
    if not kills and window == WIDE:
        assert min(min(found) for found in shares.values()) >= 0.82  # with decisions and discoveries in the brief


def found_in(prompt: Prompt, state: dict[str, Any]) -> list[str]:
    return contradictions(brief_of(prompt), AgentState.model_validate(state))


def shown(prompt: Prompt) -> str:
    texts = []
    for at, one in enumerate(prompt.messages):
        text = one.content if at >= prompt.cacheable or len(one.content) < 200 else f"{one.content[:60]}..."
        texts.append(f"    [{one.role}] " + text.replace("\n", "\n    "))
    return "\n".join(texts)


async def run_to_the_end(handle: Any, workers: Any) -> Any:
    """Start another worker after each that ended, until there is a result."""
    waiting = asyncio.ensure_future(handle.result(timeout=BOUND * 4))
    while not waiting.done():
        process = workers.start()
        ended = asyncio.ensure_future(process.ended())
        await asyncio.wait([waiting, ended], return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            process.stop()
        await ended
    return await waiting
