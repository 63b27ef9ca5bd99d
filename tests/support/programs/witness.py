"""Worker process whose handlers write down, outside of Redis, each value that they see.

Each value of an honest run is the text `PLACE of SUBJECT` (`truth`): the place names the argument, step, answer or
message, and the subject is the id of the task, or of the session. So a value that another task, another place or a
writer without the key has provided is known by its text.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import anyio
import orjson
from perdure import Agent, AgentState, App, Context, Every, PlanStep, Retry, Settings, Worker, current_step
from perdure.worker.agent_task import AgentTask
from perdure.worker.runtime.shared_settings import WorkerTimings
from pydantic import Field

__all__ = ["LARGE", "QUEUE", "SCHEDULE", "STORE", "TURN", "Note", "Program", "make_program", "truth"]

QUEUE: Final = "sealed"
STORE: Final = ("notes", "fuzz")
SCHEDULE: Final = "beat"
LARGE: Final = 400
"""Repetitions of a text that is stored in chunks."""

TURN: Final = "turn-"
"""Start of the id of the task of a turn."""

Note = Callable[[str, str, Any], None]
"""Write down what a task has seen: its id, the place, the value."""

_PATIENT: Final = Retry(max_attempts=3, max_crashes=1000, base=0.0)
_ONCE: Final = Retry(max_attempts=1, max_crashes=1000)


def truth(subject: str, place: str) -> str:
    """Return the value that an honest run has at a place."""
    return f"{place} of {subject}"


class Program(NamedTuple):
    """An app, and its agent that sessions talk to."""

    app: App
    talker: AgentTask[Any]


class Talk(AgentState):
    """State of a conversation. heard: goals of its turns."""

    heard: list[str] = Field(default_factory=list)


def make_program(settings: Settings, note: Note, mended: Callable[[], bool]) -> Program:
    """Return the program. mended: whether the task `fails` succeeds."""
    app = App(QUEUE, settings=settings)
    narrow = app.limit("narrow", running=1)

    def see(ctx: Context, place: str, value: Any) -> None:
        note(ctx.task_id, place, value)

    async def known(ctx: Context, place: str) -> None:
        """Record a step with the truth of the place, and see what is recorded."""
        see(ctx, place, await ctx.step(place, truth, ctx.task_id, place))

    async def save(task_id: str) -> str:
        """Save the progress of a step, and see that of an earlier try."""
        step = current_step()
        if step.saved is not None:
            note(task_id, "saved", step.saved)
        await step.save(truth(task_id, "saved"))
        return truth(task_id, "saves")

    @app.task(retry=_PATIENT)
    async def steps(ctx: Context, text: str, large: str = "") -> str:
        see(ctx, "text", text)
        if large:
            see(ctx, "large", large)
        await known(ctx, "first")
        for number in range(3):
            await ctx.emit(truth(ctx.task_id, f"item {number}"))
        await ctx.emit(truth(ctx.task_id, "keyed"), to="keyed", key="k")
        see(ctx, "go1", await ctx.wait_for("go1", str, who="ada", shows=truth(ctx.task_id, "shown")))
        see(ctx, "vary 1", await ctx.step("vary", truth, ctx.task_id, "vary 1"))
        await ctx.values.set("level", truth(ctx.task_id, "level 1"))
        see(ctx, "saves", await ctx.step("saves", save, ctx.task_id))
        see(ctx, "big", await ctx.step("big", lambda: truth(ctx.task_id, "big") * LARGE))
        await ctx.progress(1, 2, truth(ctx.task_id, "note"))
        see(ctx, "go2", await ctx.wait_for("go2", str))
        await known(ctx, "last")
        for message in await ctx.inbox(limit=1):
            see(ctx, "message", message.content)
        see(ctx, "level 1", await ctx.values.get("level"))
        see(ctx, "go3", await ctx.wait_for("go3", str))
        await known(ctx, "end")
        return truth(ctx.task_id, "result") * (LARGE if large else 1)

    @app.task(retry=_PATIENT)
    async def child(ctx: Context, parent: str, number: int) -> str:
        see(ctx, "child", [parent, number])
        see(ctx, "child step", await ctx.step("work", truth, parent, f"work {number}"))
        see(ctx, "child go", await ctx.wait_for("go", str, token=f"child:{parent}:{number}"))
        return truth(parent, f"child {number}")

    @app.task(retry=_PATIENT)
    async def parent(ctx: Context, text: str) -> str:
        see(ctx, "text", text)
        found = await ctx.gather(child, [(ctx.task_id, number) for number in range(3)], limit=2)
        for number, value in enumerate(found):
            see(ctx, f"child {number}", value)
        see(ctx, "go3", await ctx.wait_for("go3", str))
        return truth(ctx.task_id, "result")

    @app.task(retry=_ONCE)
    async def fails(ctx: Context, text: str) -> str:
        see(ctx, "text", text)
        await known(ctx, "first")
        if not mended():
            raise ValueError(truth(ctx.task_id, "error"))
        await known(ctx, "last")
        return truth(ctx.task_id, "result")

    @app.task(retry=_PATIENT)
    async def brief(ctx: Context, text: str) -> str:
        see(ctx, "text", text)
        await known(ctx, "first")
        return truth(ctx.task_id, "result")

    @app.task(retry=_PATIENT, limits=[narrow])
    async def limited(ctx: Context, text: str) -> str:
        see(ctx, "text", text)
        await known(ctx, "first")
        return truth(ctx.task_id, "result")

    @app.task(retry=_PATIENT)
    async def stores(ctx: Context, text: str) -> str:
        see(ctx, "text", text)
        store, me = ctx.store(*STORE), ctx.task_id
        await store.put(me, truth(me, "stored"))
        await store.put(f"{me}/large", truth(me, "stored large") * LARGE)
        for _ in range(2):
            see(ctx, "stored", await store.get(me))
            see(ctx, "stored large", await store.get(f"{me}/large"))
            see(ctx, "go2", await ctx.wait_for("go2", str))
        return truth(me, "result")

    @app.task(retry=_PATIENT)
    async def relay(ctx: Context, text: str, source: str = "") -> str:
        see(ctx, "relay", [text, source])
        if source:
            await ctx.step("first", truth, source, "relayed")
            return truth(source, "result")
        see(ctx, "go2", await ctx.wait_for("go2", str))
        return await ctx.continue_as(relay, arguments={"text": truth(ctx.task_id, "handed"), "source": ctx.task_id})

    @app.task(retry=_PATIENT)
    async def beats(ctx: Context, text: str) -> str:
        see(ctx, "beat", text)
        return truth(SCHEDULE, "result")

    app.schedule(SCHEDULE, beats, Every(1), args={"text": truth(SCHEDULE, "beat")})
    app.schedule("untouched", beats, Every(86_400), args={"text": truth(SCHEDULE, "beat")})

    class Thinker(Agent[AgentState]):
        """Decides, remembers and waits in each of three steps."""

        snapshot_every = 5

        async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
            return [PlanStep(key=f"step{number}", title=truth(ctx.task_id, f"title {number}")) for number in (1, 2, 3)]

        async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> str:
            self.look(ctx, state)
            see(ctx, "title", [step.key, step.title])
            number = step.key[-1]
            await ctx.decide(truth(ctx.task_id, f"decision {number}"))
            await ctx.discover(truth(ctx.task_id, f"fact {number}"))
            await ctx.add_message("user", truth(ctx.task_id, f"said {number}"))
            see(ctx, f"step {number}", await ctx.step("look", truth, ctx.task_id, f"step {number}"))
            see(ctx, f"go{number}", await ctx.wait_for(f"go{number}", str))
            state.context[step.key] = truth(ctx.task_id, f"context {number}")
            return truth(ctx.task_id, f"done {number}")

        async def finish(self, ctx: Context, state: AgentState) -> str:
            self.look(ctx, state)
            return truth(ctx.task_id, "result")

        def look(self, ctx: Context, state: AgentState) -> None:
            see(ctx, "goal", state.goal)
            see(ctx, "role", "" if ctx.identity is None else ctx.identity.identity.role)
            see(
                ctx,
                "state",
                {
                    "decisions": [one.choice for one in state.decisions],
                    "facts": [one.fact for one in state.discoveries],
                    "messages": [[one.role, one.content] for one in state.messages],
                    "plan": [one.title for one in state.plan],
                    "results": state.results,
                    "context": state.context,
                },
            )

    class Talker(Agent[Talk]):
        """Answers one message of a session in each turn."""

        async def plan(self, ctx: Context, state: Talk) -> list[PlanStep]:
            return [PlanStep(key="say", title="say")]

        async def act(self, ctx: Context, state: Talk, step: PlanStep) -> str:
            see(ctx, "turn", {"goal": state.goal, "heard": state.heard, "decisions": len(state.decisions)})
            state.heard = [*state.heard, state.goal]
            await ctx.decide(state.goal)
            return ""

        async def finish(self, ctx: Context, state: Talk) -> str:
            see(ctx, "turn end", {"goal": state.goal, "heard": state.heard, "decisions": len(state.decisions)})
            return f"answer to {state.goal}"

    app.agent(Thinker)
    return Program(app, app.agent(Talker))


async def main() -> None:
    """Run a worker until SIGTERM."""
    journal = os.environ["JOURNAL"]
    file = os.open(journal, os.O_APPEND | os.O_WRONLY)

    def note(task_id: str, place: str, value: Any) -> None:
        os.write(file, orjson.dumps([os.getpid(), task_id, place, value], default=str) + b"\n")

    Worker.timings = WorkerTimings(sweep_interval=0.3, clean_interval=0.3, clean_lock=0.1)
    program = make_program(Settings(), note, lambda: Path(f"{journal}-mended").exists())
    async with Worker(program.app, concurrency=int(sys.argv[1])) as worker:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.stop)
        sys.stdout.write(f"{worker.id}\n")
        sys.stdout.flush()
        await worker.run()


if __name__ == "__main__":
    anyio.run(main)
