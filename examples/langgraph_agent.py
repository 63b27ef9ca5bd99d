"""A graph of LangGraph as a durable task: two searches beside each other, a draft, an editor's decision, publication.

    pip install "perdure[embedded,langgraph]"
    perdure worker run examples/langgraph_agent.py:app &
    perdure enqueue newsletter --queue newsletters --args '{"input": {"topic": "tides"}}' --id issue-1
    perdure task waiting                                            # shows the draft, and the name of the wait
    perdure task answer issue-1 WAIT '"publish"' --by ada
    perdure task result issue-1

A script stands for the model, so the program needs no network: replace `write`. If the worker dies, the next one
continues at the superstep, and no search or publication that is recorded is repeated.
"""

from __future__ import annotations

import operator
import os
from pathlib import Path
from typing import Annotated, Any, TypedDict

from langgraph.config import get_stream_writer
from langgraph.graph import END, START, StateGraph
from langgraph.types import interrupt
from perdure import App, current_context, current_step
from perdure.integrations.langgraph import graph_task

OUTBOX = Path(os.environ.get("OUTBOX", "newsletters.txt"))
"""What is published: one line for each issue."""

app = App("newsletters")


class Issue(TypedDict):
    topic: str
    facts: Annotated[list[str], operator.add]
    draft: str
    decision: str


async def search(place: str, topic: str) -> str:
    return f"{topic} in {place}"


async def write(facts: list[str]) -> str:
    """Write a draft, in place of a model."""
    return f"All about {' and '.join(sorted(facts))}."


def publish(draft: str) -> str:
    with OUTBOX.open("a") as outbox:
        outbox.write(f"{current_step().idempotency_key} {draft}\n")  # a mail service knows a repeated call by its key
    return draft


async def read_books(issue: Issue) -> dict[str, Any]:
    return {"facts": [await current_context().step("search", search, "books", issue["topic"])]}


async def read_papers(issue: Issue) -> dict[str, Any]:
    return {"facts": [await current_context().step("search", search, "papers", issue["topic"])]}


async def write_draft(issue: Issue) -> dict[str, Any]:
    draft = await current_context().step("write", write, issue["facts"])
    get_stream_writer()({"draft": draft})
    return {"draft": draft}


async def ask_editor(issue: Issue) -> dict[str, Any]:
    return {"decision": interrupt({"draft": issue["draft"]})}  # parked, without a slot, until a person answers


async def send(issue: Issue) -> dict[str, Any]:
    if issue["decision"] == "publish":
        await current_context().step("publish", publish, issue["draft"])
    return {}


graph = StateGraph(Issue)
for node in (read_books, read_papers, write_draft, ask_editor, send):
    graph.add_node(node.__name__, node)
graph.add_edge(START, "read_books")
graph.add_edge(START, "read_papers")
graph.add_edge(["read_books", "read_papers"], "write_draft")
graph.add_edge("write_draft", "ask_editor")
graph.add_edge("ask_editor", "send")
graph.add_edge("send", END)

newsletter = graph_task(app, graph, name="newsletter")
