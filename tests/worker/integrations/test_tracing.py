"""Traces with OpenTelemetry: spans of enqueueing, runs and steps, their links, and no failure that reaches a task."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.metadata import distribution
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, StatusCode, TraceFlags, use_span
from perdure import (
    Agent,
    AgentState,
    App,
    Context,
    PlanStep,
    Retry,
    Settings,
    Snooze,
    TaskFailed,
    current_step,
)
from perdure.otel import Tracing
from perdure.worker.integrations.otel import guard
from pydantic import SecretStr

from tests.support.paths import ROOT
from tests.support.workers import bounded, redis_command, running_worker, steal, wait_until, work_off

PACKAGES = ("queues", "deadletter", "worker")
ONCE = Retry(max_attempts=1)
TWICE = Retry(max_attempts=2, base=0.0)


class Spans(SpanProcessor):
    """Spans of a program, by name, in the order in which they ended; all that were started must end."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(self)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.open: set[str] = set()

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        self.open.add(f"{span.name} {span.context.span_id:x}")

    def on_end(self, span: ReadableSpan) -> None:
        assert span.context is not None
        self.open.discard(f"{span.name} {span.context.span_id:x}")

    @property
    def names(self) -> list[str]:
        return [span.name for span in self.exporter.get_finished_spans()]

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        [found] = self.named(name)
        return found


@pytest.fixture
def spans() -> Iterator[Spans]:
    found = Spans()
    yield found
    assert found.open == set()
    found.provider.shutdown()


def id_of(span: ReadableSpan) -> tuple[int, int]:
    assert span.context is not None
    return span.context.trace_id, span.context.span_id


def parent_of(span: ReadableSpan) -> tuple[int, int] | None:
    return None if span.parent is None else (span.parent.trace_id, span.parent.span_id)


def links_of(span: ReadableSpan) -> dict[Any, tuple[int, int]]:
    return {
        (link.attributes or {})["perdure.link"]: (link.context.trace_id, link.context.span_id) for link in span.links
    }


def attributes_of(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def make_app(settings: Settings, spans: Spans, name: str = "shop") -> App:
    return App(name, settings=settings, middleware=[Tracing(spans.provider)])


# the spans of one task


async def test_a_run_is_a_trace_of_its_own_that_links_to_the_span_of_the_enqueueing(
    settings: Settings, spans: Spans
) -> None:
    app = make_app(settings, spans)

    @app.task
    async def charge(ctx: Context, order: int) -> int:
        await ctx.step("look up", lambda: order)
        return await ctx.options(call="call-7").tool("pay", lambda: 2 * order)

    async with app:
        with spans.provider.get_tracer("test").start_as_current_span("request"):
            handle = await charge.enqueue(21)
        await work_off(app)
        assert await bounded(handle.result()) == 42
    request, sent, ran = (spans.one(name) for name in ("request", "enqueue charge", "run charge"))
    assert (parent_of(sent), sent.kind) == (id_of(request), SpanKind.PRODUCER)
    assert (parent_of(ran), ran.kind, ran.status.status_code) == (None, SpanKind.CONSUMER, StatusCode.UNSET)
    assert id_of(ran)[0] != id_of(sent)[0]
    assert links_of(ran) == {"enqueue": id_of(sent)}
    assert attributes_of(sent) == {
        "messaging.system": "perdure",
        "messaging.operation.name": "enqueue",
        "messaging.operation.type": "create",
        "messaging.destination.name": "shop",
        "messaging.message.id": handle.id,
        "perdure.task.name": "charge",
    }
    found = attributes_of(ran)
    assert found.pop("messaging.client.id")
    assert found == {
        "messaging.system": "perdure",
        "messaging.operation.name": "run",
        "messaging.operation.type": "process",
        "messaging.destination.name": "shop",
        "messaging.destination.partition.id": "0",
        "messaging.message.id": handle.id,
        "perdure.task.name": "charge",
        "perdure.task.attempt": 1,
        "perdure.task.crashes": 0,
        "perdure.task.resumed": False,
        "perdure.task.state": "succeeded",
        "perdure.run.stop": "completed",
    }
    step, tool = spans.one("step look up"), spans.one("execute_tool pay")
    assert parent_of(step) == parent_of(tool) == id_of(ran)
    assert attributes_of(step) == {"perdure.step.key": "look up"}
    assert attributes_of(tool) == {
        "perdure.step.key": "pay",
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "pay",
        "gen_ai.tool.type": "function",
        "gen_ai.tool.call.id": "call-7",
    }
    assert ran.instrumentation_scope is not None
    assert ran.instrumentation_scope.schema_url == "https://opentelemetry.io/schemas/1.41.0"


async def test_a_run_that_fails_has_the_error_without_secrets_and_the_next_run_links_to_it(
    settings: Settings, spans: Spans
) -> None:
    app = make_app(settings, spans)

    @app.task(retry=TWICE)
    async def charge(ctx: Context, token: SecretStr) -> None:
        raise ValueError(f"{ctx.attempt}: refused {token.get_secret_value()}")

    async with app:
        handle = await charge.enqueue(SecretStr("sk-4711"))
        await work_off(app)
        with pytest.raises(TaskFailed):
            await bounded(handle.result())
    first, second = spans.named("run charge")
    assert links_of(first) == {"enqueue": id_of(spans.one("enqueue charge"))}
    assert links_of(second) == {"enqueue": id_of(spans.one("enqueue charge")), "previous_run": id_of(first)}
    assert first.status.status_code is second.status.status_code is StatusCode.ERROR
    assert attributes_of(first)["perdure.task.state"] == "scheduled"
    assert attributes_of(second)["perdure.task.state"] == "dead"
    assert attributes_of(second)["perdure.dead_letter.reason"] == "attempts_exhausted"
    [event] = first.events
    assert event.name == "exception"
    found = dict(event.attributes or {})
    assert found["exception.type"] == attributes_of(first)["error.type"] == "ValueError"
    assert str(found["exception.message"]).startswith("1: refused ")
    assert "Traceback" in str(found["exception.stacktrace"])
    assert "sk-4711" not in f"{found} {first.status.description}"


async def test_a_task_that_sleeps_has_no_open_span_and_its_recorded_steps_have_none_again(
    settings: Settings, spans: Spans
) -> None:
    app = make_app(settings, spans)
    open_now: list[set[str]] = []

    @app.task
    async def report(ctx: Context) -> None:
        await ctx.step("collect", lambda: 1)
        await ctx.wait_for("approval", str)
        await ctx.step("send", lambda: 2)

    async with app:
        handle = await report.enqueue()
        await work_off(app)
        open_now.append(set(spans.open))
        first = spans.one("run report")
        await handle.answer("approval", "yes")
        await work_off(app)
        await bounded(handle.result())
    assert open_now == [set()]
    assert attributes_of(first)["perdure.task.state"] == "waiting"
    assert first.status.status_code is StatusCode.UNSET
    second = spans.named("run report")[1]
    assert links_of(second)["previous_run"] == id_of(first)
    assert attributes_of(second)["perdure.task.resumed"]
    assert spans.names == ["enqueue report", "step collect", "run report", "step send", "run report"]


async def test_a_run_links_to_the_last_run_and_not_to_the_first(settings: Settings, spans: Spans) -> None:
    app = make_app(settings, spans)

    @app.task(retry=Retry(max_attempts=3, base=0.0))
    async def charge(ctx: Context) -> None:
        await ctx.step(f"try {ctx.attempt}", lambda: 1)
        if ctx.attempt < 3:
            raise ValueError("again")

    async with app:
        handle = await charge.enqueue()
        await work_off(app)
        await bounded(handle.result())
    first, second, third = spans.named("run charge")
    assert links_of(second)["previous_run"] == id_of(first)
    assert links_of(third)["previous_run"] == id_of(second)


async def test_each_try_of_a_step_that_fails_is_an_event_of_its_span(settings: Settings, spans: Spans) -> None:
    app = make_app(settings, spans)

    @app.task(retry=ONCE)
    async def charge(ctx: Context) -> None:
        def pay() -> None:
            if current_step().attempt < 3:
                raise ConnectionError(f"try {current_step().attempt}")

        await ctx.options(retry=Retry(max_attempts=3, base=0.0)).step("pay", pay)

    async with app:
        handle = await charge.enqueue()
        await work_off(app)
        await bounded(handle.result())
    step = spans.one("step pay")
    tries = [dict(event.attributes or {}) for event in step.events]
    assert [(found["perdure.step.attempt"], found["exception.message"]) for found in tries] == [
        (1, "try 1"),
        (2, "try 2"),
    ]
    assert step.status.status_code is StatusCode.UNSET


async def test_a_failed_step_that_the_next_attempt_calls_again_has_a_span_again(
    settings: Settings, spans: Spans
) -> None:
    app = make_app(settings, spans)
    calls = iter([ConnectionError("no answer"), None])

    @app.task(retry=TWICE)
    async def charge(ctx: Context) -> None:
        def pay() -> None:
            if (error := next(calls)) is not None:
                raise error

        await ctx.step("pay", pay)

    async with app:
        handle = await charge.enqueue()
        await work_off(app)
        await bounded(handle.result())
    failed, succeeded = spans.named("step pay")
    assert failed.status.status_code is StatusCode.ERROR
    assert attributes_of(failed)["error.type"] == "ConnectionError"
    assert succeeded.status.status_code is StatusCode.UNSET


async def test_a_step_that_is_tried_again_by_another_run_has_a_span_again(settings: Settings, spans: Spans) -> None:
    app = make_app(settings, spans)
    calls: list[int] = []

    @app.task
    async def charge(ctx: Context) -> None:
        def pay() -> None:
            calls.append(1)
            if len(calls) == 1:
                raise ConnectionError("no answer")

        await ctx.options(retry=Retry(max_attempts=3, base=3600.0)).step("pay", pay)

    async def called() -> bool:
        return bool(calls)

    async with app:
        handle = await charge.enqueue()
        async with running_worker(app):
            await wait_until(called, "the first try")
        await work_off(app)
        await bounded(handle.result())
    assert len(calls) == len(spans.named("step pay")) == 2


async def test_a_failure_that_the_handler_has_caught_is_not_traced_again(settings: Settings, spans: Spans) -> None:
    app = make_app(settings, spans)

    @app.task(retry=TWICE)
    async def charge(ctx: Context) -> None:
        def pay() -> None:
            raise ConnectionError("no answer")

        try:
            await ctx.step("pay", pay)
        except ConnectionError:
            await ctx.step("note", lambda: 1)
        if ctx.attempt == 1:
            raise ValueError("again")

    async with app:
        handle = await charge.enqueue()
        await work_off(app)
        await bounded(handle.result())
    assert len(spans.named("run charge")) == 2
    assert len(spans.named("step pay")) == len(spans.named("step note")) == 1


async def test_a_run_that_lost_its_lease_ends_its_span(settings: Settings, spans: Spans) -> None:
    app = make_app(settings, spans)

    @app.task
    async def charge(ctx: Context) -> None:
        await steal(app, handle)
        await ctx.step("pay", lambda: 1)

    async with app:
        handle = await charge.enqueue()
        async with running_worker(app):

            async def ended() -> bool:
                return bool(spans.named("run charge"))

            await wait_until(ended, "the span of the run")
    ran = spans.named("run charge")[0]
    assert attributes_of(ran)["perdure.run.stop"] == "lost"
    assert ran.status.status_code is StatusCode.ERROR


# the context


async def test_steps_and_handlers_in_threads_run_within_their_spans(settings: Settings, spans: Spans) -> None:
    app = make_app(settings, spans)
    seen: dict[str, tuple[int, int]] = {}

    def note(name: str) -> None:
        context = trace.get_current_span().get_span_context()
        seen[name] = (context.trace_id, context.span_id)

    @app.task
    async def charge(ctx: Context) -> None:
        note("handler")
        await ctx.step("pay", note, "step")
        note("after")

    @app.task
    def report(ctx: Any) -> None:
        note("sync handler")
        ctx.step("collect", note, "sync step")

    async with app:
        handles = [await charge.enqueue(), await report.enqueue()]
        await work_off(app)
        for handle in handles:
            await bounded(handle.result())
    assert seen == {
        "handler": id_of(spans.one("run charge")),
        "step": id_of(spans.one("step pay")),
        "after": id_of(spans.one("run charge")),
        "sync handler": id_of(spans.one("run report")),
        "sync step": id_of(spans.one("step collect")),
    }


async def test_children_and_tasks_that_a_handler_enqueues_are_enqueued_within_its_run_and_once(
    settings: Settings, spans: Spans
) -> None:
    app = make_app(settings, spans)

    @app.task
    async def child(ctx: Context, number: int) -> int:
        return number

    @app.task
    async def other(ctx: Context) -> None:
        pass

    @app.task(retry=TWICE)
    async def parent(ctx: Context) -> int:
        await other.enqueue()
        found = await ctx.join(await ctx.spawn(child, 1))
        found += sum(await ctx.gather(child, [2]))
        if ctx.attempt == 1:
            raise ValueError("again")
        return found

    async with app:
        handle = await parent.enqueue()
        await work_off(app)
        assert await bounded(handle.result()) == 3
    runs = {id_of(span) for span in spans.named("run parent")}
    sent = spans.named("enqueue child")
    assert len(sent) == 2
    assert {parent_of(span) for span in sent} <= runs
    assert {links_of(span)["enqueue"] for span in spans.named("run child")} == {id_of(span) for span in sent}
    others = spans.named("enqueue other")  # one for each attempt, which has several runs
    assert [attributes_of(span)["perdure.task.attempt"] for span in spans.named("run parent")] == [1, 1, 1, 2]
    assert len(others) == 2
    assert {parent_of(span) for span in others} <= runs
    assert {links_of(span)["enqueue"] for span in spans.named("run other")} == {id_of(span) for span in others}


async def test_a_context_that_the_caller_sets_is_kept(settings: Settings, spans: Spans) -> None:
    app = make_app(settings, spans)

    @app.task
    async def charge(ctx: Context) -> str:
        return ctx.headers["traceparent"]

    given = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with app:
        handle = await charge.options(headers={"traceparent": given}).enqueue()
        await work_off(app)
        assert await bounded(handle.result()) == given
    assert spans.names == ["run charge"]
    expected = (0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331)
    assert links_of(spans.one("run charge")) == {"enqueue": expected}


@pytest.mark.parametrize("given", ["", "nonsense", "00-0-0-00", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
async def test_a_context_that_cannot_be_read_is_replaced(settings: Settings, spans: Spans, given: str) -> None:
    app = make_app(settings, spans)

    @app.task
    async def charge(ctx: Context) -> list[str]:
        return sorted(ctx.headers)

    async with app:
        handle = await charge.options(headers={"traceparent": given, "tracestate": "a=1"}).enqueue()
        await work_off(app)
        assert await bounded(handle.result()) == ["traceparent"]
    assert links_of(spans.one("run charge")) == {"enqueue": id_of(spans.one("enqueue charge"))}


async def test_a_context_of_another_producer_that_cannot_be_read_is_no_link(settings: Settings, spans: Spans) -> None:
    app = make_app(settings, spans)

    @app.task
    async def charge(ctx: Context) -> None:
        pass

    async with app:
        handle = await app.producer.enqueue("charge", {}, queue="shop", headers={"traceparent": "00-zz-1-01"})
        await work_off(app)
        await bounded(handle.result())
    assert links_of(spans.one("run charge")) == {}


async def test_without_a_provider_the_context_of_the_caller_is_handed_on(settings: Settings) -> None:
    app = App("shop", settings=settings, middleware=[Tracing()])

    @app.task
    async def charge(ctx: Context) -> str:
        return await ctx.step("pay", lambda: ctx.headers.get("traceparent", ""))

    caller = SpanContext(0xABC, 0xDEF, is_remote=True, trace_flags=TraceFlags(1))
    async with app:
        plain = await charge.enqueue()
        with use_span(NonRecordingSpan(caller)):
            called = await charge.enqueue()
        await work_off(app)
        assert await bounded(plain.result()) == ""
        assert await bounded(called.result()) == f"00-{0xABC:032x}-{0xDEF:016x}-01"


def test_a_synchronous_producer_enqueues_within_the_span_of_its_caller(settings: Settings, spans: Spans) -> None:
    app = make_app(settings, spans)

    @app.task
    async def charge(ctx: Context) -> None:
        pass

    with app.sync(), spans.provider.get_tracer("test").start_as_current_span("request"):
        charge.enqueue_sync()
    assert parent_of(spans.one("enqueue charge")) == id_of(spans.one("request"))


async def test_a_task_that_is_not_sampled_has_no_headers_and_leaves_nothing(settings: Settings) -> None:
    provider = TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False)
    app = App("shop", settings=settings, middleware=[Tracing(provider)])

    @app.task(retry=TWICE)
    async def charge(ctx: Context) -> dict[str, str]:
        await ctx.step("pay", lambda: 1)
        if ctx.attempt == 1:
            raise ValueError("again")
        return dict(ctx.headers)

    async with app:
        handle = await charge.enqueue()
        await work_off(app)
        assert await bounded(handle.result()) == {}
        assert b"s:#trace" not in await redis_command(app, "HKEYS", handle.partition.steps(handle.id))


# agents


class Assistant(Agent[AgentState]):
    """Asks a model in its only step."""

    async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
        return [PlanStep(key="answer", title="Answer")]

    async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> None:
        async def ask() -> str:
            await current_step().spend(input_tokens=100, output_tokens=20, usd=0.5, model="large")
            await current_step().spend(input_tokens=1, output_tokens=2, usd=0.25, model="large")
            return "yes"

        await ctx.step("ask", ask)

    async def finish(self, ctx: Context, state: AgentState) -> str:
        return "done"


async def test_a_turn_of_an_agent_has_its_session_and_the_tokens_of_its_models(
    settings: Settings, spans: Spans
) -> None:
    app = make_app(settings, spans)
    app.agent(Assistant)
    async with app:
        turn = await app.session(Assistant, "ada").send("hello")
        await work_off(app)
        assert await bounded(turn.result()) == "done"
    ran, agent, asked = (spans.one(name) for name in ("run assistant", "invoke_agent assistant", "step ask"))
    assert links_of(ran) == {"enqueue": id_of(spans.one("enqueue assistant"))}
    assert (parent_of(agent), agent.kind) == (id_of(ran), SpanKind.INTERNAL)
    spent = {
        "gen_ai.request.model": "large",
        "gen_ai.usage.input_tokens": 101,
        "gen_ai.usage.output_tokens": 22,
        "perdure.spent.tokens": 123,
        "perdure.spent.usd": 0.75,
    }
    assert attributes_of(agent) == spent | {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.agent.name": "assistant",
        "gen_ai.conversation.id": "ada",
    }
    assert attributes_of(asked) == spent | {"perdure.step.key": "answer/ask"}
    assert parent_of(asked) == id_of(spans.one("step answer"))
    assert parent_of(spans.one("step answer")) == id_of(agent)


# failures of tracing


class Refusing(SpanProcessor):
    """Fails when a span starts, or when it ends."""

    def __init__(self, at: str) -> None:
        self._at = at

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        if self._at == "start":
            raise RuntimeError("the processor is broken")

    def on_end(self, span: ReadableSpan) -> None:
        if self._at == "end":
            raise RuntimeError("the processor is broken")


@pytest.mark.parametrize("at", ["start", "end"])
async def test_a_tracer_that_fails_fails_no_task_and_is_logged_once_a_minute(
    settings: Settings, log: list[str], at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(Refusing(at))
    app = App("shop", settings=settings, middleware=[Tracing(provider)])

    @app.task
    async def charge(ctx: Context) -> int:
        return await ctx.step("pay", lambda: 42)

    async with app:
        handle = await charge.enqueue()
        await work_off(app)
        assert await bounded(handle.result()) == 42
        lines = [line for line in log if "the processor is broken" in line]
        assert len(lines) == 1
        monkeypatch.setattr(guard, "INTERVAL", 0.0)
        tracing = app.middleware[0]
        assert isinstance(tracing, Tracing)
        tracing._guard._due = 0.0
        await charge.enqueue()
    lines = [line for line in log if "the processor is broken" in line]
    assert len(lines) == 2
    assert "failures since the last line were not logged" in lines[1]


class Unreachable(SpanExporter):
    """Fails to export."""

    def export(self, spans: Any) -> SpanExportResult:
        raise ConnectionError("no collector")


async def test_an_exporter_that_fails_fails_no_task(settings: Settings) -> None:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(Unreachable()))
    app = App("shop", settings=settings, middleware=[Tracing(provider)])

    @app.task
    async def charge(ctx: Context) -> int:
        return await ctx.step("pay", lambda: 42)

    async with app:
        handle = await charge.enqueue()
        await work_off(app)
        assert await bounded(handle.result()) == 42


async def test_a_task_that_asks_to_run_later_has_not_failed(settings: Settings, spans: Spans) -> None:
    app = make_app(settings, spans)

    @app.task
    async def charge(ctx: Context) -> None:
        if ctx.crashes == 0 and not spans.named("run charge"):
            raise Snooze(after=0.0)

    async with app:
        handle = await charge.enqueue()
        await work_off(app)
        await bounded(handle.result())
    first, second = spans.named("run charge")
    assert (first.status.status_code, first.events) == (StatusCode.UNSET, ())
    assert attributes_of(first)["perdure.run.stop"] == "snoozed"
    assert links_of(second)["previous_run"] == id_of(first)


# imports


def test_only_the_api_of_opentelemetry_is_imported_and_only_for_traces() -> None:
    """The client of Redis imports more of OpenTelemetry by itself, so the sources are read."""
    found: dict[str, set[str]] = {}
    for path in [*ROOT.glob("*.py"), *(path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))]:
        if "opentelemetry" not in (source := path.read_text()):
            continue
        for node in ast.walk(ast.parse(source)):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            names += [name.name for name in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                if name.split(".")[0] == "opentelemetry":
                    found.setdefault(name, set()).add(path.relative_to(ROOT).parent.as_posix())
    assert {folder for folders in found.values() for folder in folders} == {"worker/integrations/otel"}
    in_api = {str(file) for file in distribution("opentelemetry-api").files or ()}
    for name in found:
        module = name.replace(".", "/")
        assert {f"{module}.py", f"{module}/__init__.py"} & in_api, name
