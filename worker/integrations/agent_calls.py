"""Parts of the adapters of agent frameworks: where an agent runs, and people's decisions on its tool calls.

This module imports no framework.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pydantic import BaseModel
from pydantic_core import to_json

from ...queues.stream_items import ITEM_BYTES
from ..context import Context, current_context
from ..durable.steps.current import CURRENT_RUN, step_here
from ..errors import StepOutsideTask

_MAX_WAIT_NAME: Final = 64
_MAX_STEP_ID: Final = 200
_SHOWN: Final = 80
"""Characters of the latest text of a conversation that the step of a model request shows."""


class ToolApproval(BaseModel):
    """A person's answer to a tool call that needs an approval.

    Attributes:
        approved: whether the tool is called.
        message: what the model reads if it is not.
    """

    approved: bool
    message: str = ""


class ToolDecision(ToolApproval):
    """A person's answer to a tool call, which may change it.

    Attributes:
        arguments: in place of those that the model gave.
    """

    arguments: dict[str, Any] | None = None


def durable_context() -> Context | None:
    """Return the context of the task whose handler runs here, if the calls of an agent can be steps of it.

    None outside a task, and in a step, which is recorded as a whole; but not in one with `nested="record"`.
    """
    step = step_here()
    if step is not None and not step.records_nested:
        return None
    return _context_here()


def _context_here() -> Context | None:
    try:
        ctx = current_context()
        loop = asyncio.get_running_loop()
    except (StepOutsideTask, RuntimeError):
        return None
    run = CURRENT_RUN.get()
    task = None if run is None else run.task
    return ctx if task is not None and task.get_loop() is loop else None


_warned: set[str] = set()


def check_inside(what: str, *, require: bool) -> None:
    """Check that a task runs here. Without one, warn once per process.

    what: name of the agent, for the message.

    Raises `StepOutsideTask` if `require` is set.
    """
    if _context_here() is not None:
        return
    here = CURRENT_RUN.get()
    where = "outside a task" if here is None else "in a plain function or a thread of a task"
    remedy = "run it in an async function with @app.task" if here is None else "run it in the task's async function"
    if require:
        raise StepOutsideTask(f"{what} was run {where}, where nothing is recorded: {remedy}")
    if what not in _warned:
        _warned.add(what)
        logging.getLogger("perdure").warning("%s runs %s: it is not durable; %s", what, where, remedy)


def wait_name(text: str) -> str:
    """Return the name of a wait that is made of the name of a tool."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", text)[:_MAX_WAIT_NAME]
    return name if name[:1].isalnum() else f"tool{name}"[:_MAX_WAIT_NAME]


def call_number(ctx: Context, name: str) -> int:
    """Return the number of a call among those of this name in this run of the task, or try of the step, from 1."""
    step = step_here()
    return ctx._run.keys.count(name if step is None else f"{name}:{step.key}:{step.attempt}")[1]


def run_id(ctx: Context, name: str) -> str:
    """Return the id of a run of an agent, the same in each run of the task. name: of the count of these runs."""
    step = step_here()
    place = ctx.task_id if step is None else f"{ctx.task_id}:{step.key}"
    return f"{place}:{call_number(ctx, name)}"


def call_step_id(ctx: Context, tool: str, call_id: str | None) -> str | None:
    """Return the id of the step of a tool call: that of the call, with a number if it is made again.

    A call is made again after its approval.
    """
    if not call_id:
        return None
    number = call_number(ctx, f"#call:{tool}:{call_id}")
    step_id = (call_id if number == 1 else f"{call_id}.{number}").replace("#", "-")
    return step_id[-_MAX_STEP_ID:]


def shortened_item(item: Mapping[str, Any], kept: Sequence[str]) -> Mapping[str, Any]:
    """Return an item for a stream; of one that is too large, these members and its size."""
    size = len(to_json(item))
    if size <= ITEM_BYTES:
        return item
    return {name: item[name] for name in kept if name in item} | {"clipped": size}


def shortened_text(content: Any) -> str:
    """Return the beginning of a text or of data, for people."""
    text = content if isinstance(content, str) else to_json(content, fallback=str).decode()
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
