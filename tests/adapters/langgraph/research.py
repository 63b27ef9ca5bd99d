"""A graph as a task, for processes: two searches beside each other, a person's approval, then a report.

Calls are appended to the journal file RESEARCH_JOURNAL. RESEARCH_HOLD is a file; while it exists, the call of its text
blocks the process.
"""

from __future__ import annotations

import operator
import os
import time
from pathlib import Path
from typing import Annotated, Any, TypedDict

from langgraph.config import get_stream_writer
from langgraph.graph import END, START, StateGraph
from langgraph.types import interrupt
from perdure import App
from perdure.integrations.langgraph import graph_task
from perdure.worker.context import current_context

app = App("research")


class State(TypedDict, total=False):
    topic: str
    notes: Annotated[list[str], operator.add]
    approved: Any
    report: str


def note_call(call: str) -> None:
    """Note a call in the journal, then block where the test asks for it."""
    journal, hold = Path(os.environ["RESEARCH_JOURNAL"]), Path(os.environ["RESEARCH_HOLD"])
    with journal.open("a") as file:
        file.write(f"{os.getpid()} {call}\n")
    while hold.exists() and hold.read_text() == call:
        time.sleep(0.01)


async def search(where: str) -> str:
    note_call(f"search {where}")
    return f"found in {where}"


async def look_up(state: State) -> State:
    ctx = current_context()
    note_call("look_up")
    notes = [await ctx.step("search", search, "books"), await ctx.step("search", search, "papers")]
    note_call("look_up ends")
    return {"notes": notes}


async def ask_model(state: State) -> State:
    ctx = current_context()
    get_stream_writer()({"at": "model"})
    note_call("ask_model")
    return {"notes": [await ctx.step("search", search, "model")]}


async def approve(state: State) -> State:
    note_call("approve")
    return {"approved": interrupt({"notes": len(state["notes"])})}


async def write_report(state: State) -> State:
    ctx = current_context()
    note_call("write_report")
    return {"report": await ctx.step("search", search, "report")}


builder = StateGraph(State)
builder.add_node("look_up", look_up)
builder.add_node("ask_model", ask_model)
builder.add_node("approve", approve)
builder.add_node("write_report", write_report)
builder.add_edge(START, "look_up")
builder.add_edge(START, "ask_model")
builder.add_edge(["look_up", "ask_model"], "approve")
builder.add_edge("approve", "write_report")
builder.add_edge("write_report", END)

research = graph_task(app, builder, name="research")
