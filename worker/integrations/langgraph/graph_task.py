"""A graph of LangGraph as a task: `research = graph_task(app, graph, name="research")`.

LangGraph keeps the state of the graph in its checkpoints, and Perdure runs it: a run that is resumed after a crash, an
answer or a deployment continues at the superstep that was cut off. Interrupts of nodes are waits of the task, which is
parked until they have answers. What the graph streams is emitted into streams of the task.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeAlias

import jsonschema_rs
from langchain_core.messages import BaseMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.pregel import Pregel
from langgraph.store.base import BaseStore
from langgraph.types import Command, Interrupt, StateSnapshot
from pydantic import AfterValidator, WithJsonSchema
from pydantic_core import from_json

from ....queues.errors import PayloadTooLarge
from ....queues.json_form import as_json
from ...app import App
from ...context import Context
from ...durable.emitting import begin_unit, emit_item
from ...errors import StateError, StepDefinitionError, TaskDefinitionError
from ...log import logger
from ...task import Task
from .node_scopes import NODES, NodeKeys, plain_name
from .saver import PerdureSaver

StreamName: TypeAlias = Literal["messages", "custom", "updates", "values", "tasks", "debug"]

_MODES: Final = ("messages", "custom", "updates", "values", "tasks", "debug")
_OWNER: Final = "perdure_task"
"""Key of the metadata of a checkpoint whose value is the id of the task that has written it."""


class ThreadMoved(StateError):
    """Another task has continued the thread of a graph since this one began, so it cannot be resumed."""

    def __init__(self, thread: str, owner: str) -> None:
        super().__init__(thread, owner)
        self.thread = thread
        self.owner = owner

    def __str__(self) -> str:
        return (
            f"thread {self.thread!r} was continued by {self.owner or 'a program outside a task'} since this task "
            "began: let the tasks of a thread run one at a time, with a limit by thread_id"
        )


def graph_task(
    app: App,
    graph: Any,
    *,
    name: str | None = None,
    stream: Sequence[StreamName] = ("messages", "custom"),
    saver: BaseCheckpointSaver[Any] | None = None,
    store: BaseStore | None = None,
    recursion_limit: int | None = None,
    write: Literal["sync", "async"] = "sync",
    **options: Any,
) -> Task[..., Any]:
    """Register a graph as a task of an app: `await research.enqueue({"topic": "tides"}, thread_id="user-42")`.

    The arguments of the task are `input`, which is what the graph gets, `thread_id`, by default the id of the task, and
    `context`, LangGraph's context of the run. The result is what the graph returns, as JSON data.

    Args:
        graph: a compiled graph, or a builder of one.
        name: of the task, by default that of the graph.
        stream: what is streamed, each mode of LangGraph into the stream of its name.
        saver: by default that of the graph, else `PerdureSaver(app)`.
        store: by default that of the graph.
        recursion_limit: supersteps of one run, by default LangGraph's.
        write: `sync` stores a checkpoint before the next superstep begins, `async` while it runs.
        options: those of `app.task`, such as `retry`, `limits` and `budget`.

    Raises:
        TaskDefinitionError: an argument is not valid, or the graph has breakpoints after nodes.
    """
    unknown = [mode for mode in stream if mode not in _MODES]
    if isinstance(stream, str) or unknown:
        raise TaskDefinitionError(f"stream must be a list of {', '.join(_MODES)}, got {stream!r}")
    if write not in ("sync", "async"):
        raise TaskDefinitionError(f"write must be 'sync' or 'async', got {write!r}")
    if not isinstance(graph, Pregel):
        if not callable(getattr(graph, "compile", None)):
            raise TaskDefinitionError(f"graph must be a compiled graph of LangGraph or its builder, got {graph!r}")
        graph = graph.compile()
    if graph.interrupt_after_nodes:
        raise TaskDefinitionError("a graph that is a task must have no interrupt_after: call interrupt() in a node")
    if not (name or graph.name):
        raise TaskDefinitionError("a graph without a name needs one as a task: pass name=...")
    if saver is None:
        saver = graph.checkpointer if isinstance(graph.checkpointer, BaseCheckpointSaver) else PerdureSaver(app)
    compiled = graph.copy({"checkpointer": saver, "store": store or graph.store})

    async def run_graph(ctx: Context, input: Any, thread_id: str | None = None, context: Any = None) -> Any:
        thread = ctx.task_id if thread_id is None else thread_id
        config: RunnableConfig = {
            "configurable": {"thread_id": thread},
            "metadata": {_OWNER: ctx.task_id},
        }
        if recursion_limit is not None:
            config["recursion_limit"] = recursion_limit
        given = {"context": context, "durability": write}
        return await _GraphRun(ctx, compiled, saver, config, tuple(stream), given).run(input)

    run_graph.__doc__ = f"Run the graph {graph.name!r}."
    return app.task(name=name or graph.name, **options)(run_graph)


@dataclass(slots=True)
class _Superstep:
    """A superstep that emits, as a unit: what it has emitted is void if it runs again."""

    key: str
    attempt: int = 1


class _GraphRun:
    """One run of the task of a graph."""

    def __init__(
        self,
        ctx: Context,
        graph: Any,
        saver: BaseCheckpointSaver[Any],
        config: RunnableConfig,
        stream: tuple[str, ...],
        given: Mapping[str, Any],
    ) -> None:
        self._ctx = ctx
        self._run = ctx._run
        self._graph = graph
        self._saver = saver
        self._config = config
        self._stream = stream
        self._given = given
        self._thread: str = config["configurable"]["thread_id"]
        self._unit = _Superstep("")
        self._omitted: set[str] = set()

    async def run(self, given: Any) -> Any:
        """Run the graph until it ends, and return what it returns."""
        self._run.keys = NodeKeys(self._run)
        source: Any = given
        latest, owner = await self._latest()

        async def latest_checkpoint() -> str | None:
            return latest

        if latest != await self._ctx.step("begin", latest_checkpoint):  # an earlier run has begun
            if owner != self._ctx.task_id:
                raise ThreadMoved(self._thread, owner)
            source = await self._answered(await self._graph.aget_state(self._config))
        while True:
            output = await self._stream_graph(source)
            snapshot = await self._graph.aget_state(self._config)
            if not snapshot.next:
                return from_json(as_json(output))
            source = await self._answered(snapshot)
            if source is None and not self._breaks(snapshot):
                raise StateError(
                    f"the graph stopped before {snapshot.next[0]!r}, at a breakpoint of a graph in it: call "
                    "interrupt() in a node"
                )

    async def _latest(self) -> tuple[str | None, str]:
        """Return the latest checkpoint of the thread, and the task that has written it."""
        found = await self._saver.aget_tuple(self._config)
        if found is None:
            return None, ""
        metadata: Mapping[str, Any] = found.metadata
        return found.checkpoint["id"], str(metadata.get(_OWNER, ""))

    # interrupts

    async def _answered(self, snapshot: StateSnapshot) -> Command[Any] | None:
        """Return what resumes the graph: the answers to its interrupts, or None if it has none."""
        self._run.branched = False  # no node runs, so the run need not wait for one before it parks
        waits = {}
        for task in snapshot.tasks:
            for interrupt in task.interrupts:
                with self._ctx.scope(interrupt.id):
                    waits[interrupt.id] = await self._ctx.open_wait(
                        plain_name(task.name), _answer_type(interrupt), shows=interrupt.value
                    )
        if waits:
            return Command(resume={key: await wait for key, wait in waits.items()})
        if self._breaks(snapshot):
            with self._ctx.scope(snapshot.config["configurable"]["checkpoint_id"]):
                await self._ctx.wait_for(plain_name(snapshot.next[0]), why=f"breakpoint before {snapshot.next[0]}")
        return None

    def _breaks(self, snapshot: StateSnapshot) -> bool:
        """Return whether the graph stops before its next nodes."""
        breaks = self._graph.interrupt_before_nodes
        return bool(snapshot.next) and (breaks == "*" or any(node in breaks for node in snapshot.next))

    # streaming

    async def _stream_graph(self, source: Any) -> Any:
        """Run the graph until it ends or is interrupted; emit what it streams, and return its last values."""
        modes = list(dict.fromkeys((*self._stream, "values", "checkpoints" if self._stream else "values")))
        output: Any = None
        if self._stream:
            await self._begin_superstep((await self._latest())[0])
        chunks: AsyncIterator[Any] = self._graph.astream(
            source, self._config, stream_mode=modes, subgraphs=True, **self._given
        )
        async with aclosing(chunks):  # type: ignore[type-var]  # it is a generator
            async for ns, mode, data in chunks:
                if mode == "values" and not ns:
                    output = data
                if mode == "checkpoints":
                    if not ns:
                        await self._begin_superstep(data["config"]["configurable"]["checkpoint_id"])
                elif mode in self._stream:
                    await self._emit(mode, ns, data)
        return output

    async def _begin_superstep(self, checkpoint: str | None) -> None:
        """Let what is emitted from now on belong to the superstep after a checkpoint."""
        key = f"{NODES}{checkpoint or 'begin'}"
        if key != self._unit.key:
            self._unit = _Superstep(key)
            if self._run.emits:
                await begin_unit(self._run, key)

    async def _emit(self, mode: str, ns: tuple[str, ...], data: Any) -> None:
        item = _message_item(*data) if mode == "messages" else data
        try:
            await emit_item(self._run, item, mode, None, self._unit)
        except (PayloadTooLarge, StepDefinitionError) as error:
            if mode not in self._omitted:
                self._omitted.add(mode)
                logger.warning("task {} does not emit an item that its graph streams: {}", self._ctx.task_id, error)


def _message_item(message: BaseMessage, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message, or a part of one, as it is emitted."""
    found = {"node": metadata.get("langgraph_node"), "type": message.type, "id": message.id, "content": message.content}
    if calls := getattr(message, "tool_call_chunks", None) or getattr(message, "tool_calls", None):
        found["tool_calls"] = calls
    return found


def _answer_type(interrupt: Interrupt[Any]) -> Any:
    """Return the type of the answers to an interrupt: of its JSON schema, else any."""
    schema = interrupt.response_schema
    if not isinstance(schema, dict):
        return Any
    validator = jsonschema_rs.validator_for(schema)

    def check(value: Any) -> Any:
        for error in validator.iter_errors(value):
            raise ValueError(error.message)
        return value

    return Annotated[Any, AfterValidator(check), WithJsonSchema(schema)]
