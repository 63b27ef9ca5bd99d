"""An agent whose model knows the prompt only finishes its plan over crashes.

tests/evaluation/test_prompts.py has more of it.
"""

from __future__ import annotations

from typing import Any

import pytest
from perdure import App, ContextBuilder, Settings
from perdure.worker.agents.context.prompt import Estimate

from tests.support.prompts.crashes import Crashes, When
from tests.support.prompts.literal import PATIENT, Literal, Notes, repeated_or_skipped
from tests.support.prompts.reading import brief_of, contradictions

pytestmark = pytest.mark.integration

SCHEDULE: dict[int, When] = dict.fromkeys((2, 4, 6, 8, 13, 16), "before")


async def test_a_literal_agent_repeats_and_skips_no_step(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    async with App("literal", settings=settings.model_copy(update={"lease": 30.0, "check_state": True})) as app:
        notes = Notes()
        builder = ContextBuilder(window=1_500, identity="You add.", counter=Estimate())
        kind: Any = type("Literal", (Literal,), {"hooks": notes, "steps": 5, "builder": builder})
        handle = await app.agent(name="literal", retry=PATIENT)(kind).enqueue("Add up")
        scene = Crashes(monkeypatch, app)
        assert await scene.play(handle, SCHEDULE) == "s5 total=15"
    assert scene.happened == len(SCHEDULE)
    assert repeated_or_skipped(notes.effects, 5) == []
    briefs = [brief_of(prompt) for prompt, _ in notes.prompts]
    assert [contradictions(brief, state) for brief, (_, state) in zip(briefs, notes.prompts, strict=True)] == [
        [] for _ in briefs
    ]
    resumed = sum(brief.resuming for brief in briefs)
    assert 1 <= resumed <= len(SCHEDULE), "a resume is mentioned until a step is recorded"
    assert len({prompt.messages[: prompt.stable] for prompt, _ in notes.prompts}) == 1
