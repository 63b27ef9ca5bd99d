"""Texts of resumed functions and agents: each prompt, handoff document and notice for the user as a whole.

The texts come from real runs whose workers are killed or stopped, and each was read as a whole. `resumed_texts/NAME.md`
has the prompt of the resumed run, the handoff document of the previous one, and the notice.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from perdure import App, Settings, TaskHandle
from perdure.deadletter.letters import find_letter
from perdure.deadletter.replay import Replay, replay
from perdure.queues.records import State

from tests.support.paths import PROGRAMS
from tests.support.processes import worker_processes
from tests.support.programs.resuming import Answers
from tests.support.workers import bounded, history, recorded_steps, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.processes]

EXPECTED = Path(__file__).parent / "resumed_texts"
CITY = {"city": "Oslo"}
GOAL = {"goal": "find the cheapest offer"}

KILLED: dict[str, tuple[str, dict[str, Any]]] = {
    "killed": ("killed", CITY),
    "tool-killed": ("tool_killed", CITY),
    "risky-killed": ("risky_killed", {"order": "A 17"}),
    "many": ("many", {"pages": 130}),
    "written-to": ("written_to", CITY),
    "decided": ("decided", {"topic": "turnover"}),
    "planned": ("planned", CITY),
    "replanned": ("replanned", CITY),
    "prompting": ("prompting", CITY),
    "hostile": ("hostile", CITY),
    "agent-killed": ("works", GOAL),
    "agent-in-tool": ("intool", GOAL),
    "agent-in-risky": ("inrisky", GOAL),
    "agent-replanned": ("replans", GOAL),
    "agent-long": ("long", GOAL),
    "agent-talked": ("talks", GOAL),
    "agent-asks": ("asks", GOAL),
}
"""Tasks that stand when their worker is killed."""

LONG_STEPS = {"killed": "offer", "planned": "compute", "agent-talked": "write/stand"}
"""Plain steps in which tasks stand: one that has run for a second is noted."""

OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "failed": ("failed", CITY),
    "waited": ("waited", CITY),
    "snoozed": ("snoozed", CITY),
    "replayed": ("replayed", CITY),
    "given": ("giver", {"topic": "leases"}),
    "agent-failed": ("fails", GOAL),
    "agent-given": ("gives", GOAL),
    "agent-replayed": ("buried", GOAL),
}
STOPPED: dict[str, tuple[str, dict[str, Any]]] = {"stopped": ("stopped", CITY), "agent-stopped": ("stops", GOAL)}


def normalized(text: str) -> str:
    """Return a text without what differs from run to run: times, and how long it took."""
    text = re.sub(r"turn-[0-9a-f]{32}-\d+\.1", "TURN", text)
    text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", "TIME", text)
    return re.sub(r"(less than 1 s|\d+ s) later", "SOME TIME later", text)


async def notice_of(handle: TaskHandle[Any]) -> str:
    """Return the text for the user in the latest event `resumed`."""
    texts: list[str] = [event.data.get("text", "") for event in await history(handle) if event.type == "resumed"]
    return texts[-1] if texts else "(none)"


async def has_intent(app: App, handle: TaskHandle[Any], step: str) -> bool:
    return f"i:{step}" in await recorded_steps(app, handle)


async def is_waiting(handle: TaskHandle[Any]) -> bool:
    record = await handle.record()
    return record.state is State.WAITING


async def replay_when_dead(app: App, handle: TaskHandle[Any]) -> None:
    async def letter() -> Any:
        return await find_letter(app.producer.gateway, [handle.partition], handle.id)

    await wait_until(letter, f"{handle.id} is a dead letter")
    await replay(app.producer.gateway, await letter(), Replay())


async def test_the_texts_of_resumed_runs(settings: Settings, tmp_path: Path) -> None:
    settings = settings.model_copy(update={"lease": 1.0, "grace": 2.0})
    app = App("resuming", settings=settings)
    answers = app.agent(Answers, name="answers")
    handles: dict[str, TaskHandle[Any]] = {}

    async def enqueue(cases: dict[str, tuple[str, dict[str, Any]]]) -> None:
        for name, (task, arguments) in cases.items():
            handles[name] = await app.producer.enqueue(task, arguments, task_id=name, queue="resuming")

    async with app:
        with worker_processes(settings, tmp_path, PROGRAMS / "resuming.py") as workers:
            workers.environment = {"TEXTS": str(tmp_path)}
            await enqueue(KILLED | OTHERS)
            turn = await app.session(answers, "ada").send("find the cheapest offer")
            first = await workers.start(concurrency=64).ready()
            for name in ("replayed", "agent-replayed"):
                await replay_when_dead(app, handles[name])
            for name in OTHERS.keys() - {"waited"}:
                await bounded(handles[name].result())
            for name in (*KILLED, "waited", turn.task_id):
                await workers.line("stands", name)
            for name, step in LONG_STEPS.items():
                await wait_until(partial(has_intent, app, handles[name], step), f"{name} notes its long step")
            await wait_until(partial(is_waiting, handles["waited"]), "the function waits")
            first.kill()
            await handles["written-to"].send("use euros", sender="ben")
            await handles["written-to"].send({"rooms": 3}, sender="ada")
            await handles["waited"].send("approved", sender="ada")
            await handles["agent-talked"].send("is it ready?", sender="ben")
            second = await workers.start(concurrency=64).ready()
            await wait_until(partial(is_waiting, handles["agent-asks"]), "the agent asks")
            await handles["agent-asks"].send("continue", sender="ada")
            for name in ("waited", *KILLED):
                await bounded(handles[name].result())
            answer = await bounded(turn.result())
            await enqueue(STOPPED)
            for name in STOPPED:
                await workers.line("stands", name)
            second.stop()
            await second.ended()
            await workers.start(concurrency=64).ready()
            for name in STOPPED:
                await bounded(handles[name].result())
        found: dict[str, str] = {}
        for name, handle in handles.items():
            successor = await handle.successor() or handle
            texts = (tmp_path / f"{successor.id}.md").read_text()
            found[name] = normalized(f"{texts}\n# Notice\n\n{await notice_of(successor)}\n")
        texts = (tmp_path / f"{turn.task_id}.md").read_text()
        found["turn"] = normalized(f"{texts}\n# Notice\n\n{await turn.notice()}\n\n# Answer\n\n{answer}\n")
    different = [name for name, text in found.items() if text != expected(name)]
    assert {name: found[name] for name in different} == {name: expected(name) for name in different}
    assert {path.stem for path in EXPECTED.glob("*.md")} == found.keys()


def expected(name: str) -> str:
    path = EXPECTED / f"{name}.md"
    return path.read_text() if path.exists() else ""
