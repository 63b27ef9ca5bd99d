"""Checks for an agent that is lost: functions of a `View`, as `Coherence(checks=...)` takes them. Copy what you need.

    perdure worker run examples/coherence_checks.py:app &
    python examples/coherence_checks.py     # an agent that alternates between two searches; prints why it was stopped

Perdure itself finds exact repetitions and missing progress. These checks guess, so each can be wrong: start with the
policy "warn", and read the findings (`perdure task events ID`) before an agent is stopped by them.
"""

import asyncio
import re
from collections import Counter
from typing import Any

from perdure import Agent, AgentState, App, Coherence, Context, PlanStep, TaskFailed
from perdure.context import Finding, View

app = App("checked")

NUMBERING = re.compile(r"^[(\[]?\d{1,4}[.):\]]\s|\b(?:step|attempt|try|round)\s?#?\d{1,4}|\s?(?:#\d{1,4}|\(\d{1,4}\))$")


def plain(value: Any) -> Any:
    """Return a value without differences of white space, case and numbering in its texts."""
    if isinstance(value, dict):
        return {key: plain(part) for key, part in sorted(value.items())}
    return NUMBERING.sub("", " ".join(value.split()).casefold()).strip() if isinstance(value, str) else value


def recent_calls(view: View) -> list[str]:
    calls = [event.model_dump() for event in view.events if event.type == "tool_called"]
    return [f"{call['tool']} {plain(call['arguments'])}" for call in calls]


def reworded(view: View) -> Finding | None:
    """A tool was called 5 times with arguments that differ in form only."""
    for call, times in Counter(recent_calls(view)).most_common(1):
        if times >= 5:
            return Finding("", f"{call} was called {times} times in other words", about=call)
    return None


def going_in_circles(view: View) -> Finding | None:
    """2 to 5 calls followed each other 3 times. `about` is the same one call later, so it is reported once."""
    calls = recent_calls(view)
    for length in range(2, 6):
        circle = calls[-length:]
        if len(set(circle)) > 1 and calls[-3 * length :] == circle * 3:
            return Finding("", f"{', '.join(circle)} followed each other 3 times", about=str(sorted(circle)))
    return None


def changed_goal(view: View) -> str | None:
    goal = view.state["goal"]
    return None if goal == view.goal else f"the goal is {goal[:80]!r}, but {view.goal[:80]!r} was enqueued"


def contradictory_plan(view: View) -> str | None:
    results, current = view.state["results"], view.state["current"]
    status = {step["key"]: step["status"] for step in view.state["plan"]}
    wrong = [f"step {key!r} is done without a result" for key in status if status[key] == "done" and key not in results]
    wrong += [f"the result {key!r} has no step in the plan" for key in results if key not in status]
    if current is not None and status.get(current) != "running":
        wrong.append(f"the current step {current!r} is {status.get(current, 'not in the plan')}")
    return "; ".join(wrong) or None


def long_conversation(view: View) -> str | None:
    tokens = sum(len(message["content"]) for message in view.state["messages"]) // 4  # a rough estimate
    return f"the messages have about {tokens:,} tokens" if tokens > 128_000 else None


def does_not_wait(view: View) -> str | None:
    """The agent waits for a message and works on: it may not have read the answer in its inbox."""
    types = [event.type for event in view.events]
    since = types[len(types) - types[::-1].index("waiting") :] if "waiting" in types else []
    steps = since.count("step_completed")
    return f"{steps} steps were done while it waits" if view.state["waiting_for"] and steps > 1 else None


CHECKS = (reworded, going_in_circles, changed_goal, contradictory_plan, long_conversation, does_not_wait)


class Searcher(Agent[AgentState]):
    """Alternates between two searches, as a model does that forgets what it has tried."""

    coherence = Coherence(checks=CHECKS, custom="bury")

    async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
        return [PlanStep(key="search", title="find the invoice"), PlanStep(key="pay", title="pay it")]

    async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> int:
        for query in ("the invoice", "the receipt") * 3 if step.key == "search" else ():
            await ctx.tool("search", len, query)
        return 0

    async def finish(self, ctx: Context, state: AgentState) -> str:
        return "paid"


searcher = app.agent(Searcher)


async def main() -> None:
    async with app:
        handle = await searcher.enqueue("pay the invoice")
        try:
            print(await handle.result(timeout=120))
        except TaskFailed as error:
            print(error.error["message"])


if __name__ == "__main__":
    asyncio.run(main())
