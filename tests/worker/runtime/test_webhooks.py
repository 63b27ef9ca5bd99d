"""Webhooks: signed events, retries of transient errors, and tasks that do not depend on the delivery."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import orjson
import pytest
from perdure import Agent, AgentState, App, Budget, Context, PlanStep, Retry, Settings, TaskFailed
from perdure.queues.envelope import Envelope
from perdure.queues.errors import ConfigurationError
from perdure.queues.transport.backoff import Backoff
from perdure.worker.durable import spending
from perdure.worker.durable.run import Run
from perdure.worker.durable.waiting import WaitBoard
from perdure.worker.log import logger
from perdure.worker.runtime.outcome import Park
from perdure.worker.runtime.settler import Settler
from perdure.worker.runtime.webhook_posting import WebhookEvent, WebhookLimits, WebhookQueue, WebhookTarget, sign
from perdure.worker.settings import load_settings

from tests.support.servers.webhook_server import Listener, listening
from tests.support.workers import BOUND, bounded, history, recorded_steps, running_worker, steal, wait_until, work_off

SECRET = "a webhook's secret"

QUICK = WebhookLimits(backoff=Backoff(first=0.01))
ONCE = WebhookLimits(tries=1)


@pytest.fixture
def listener() -> Iterator[Listener]:
    with listening() as found:
        yield found


async def post(target: WebhookTarget, event: WebhookEvent, limits: WebhookLimits = QUICK) -> str | None:
    """Post one event through a queue. Return None, or why it was not accepted."""
    results: list[str | None] = []
    done = anyio.Event()

    async def on_posted(failure: str | None) -> None:
        results.append(failure)
        done.set()

    async with posting(target, limits) as queue:
        queue.give(replace(event, on_posted=on_posted))
        await bounded(done.wait())
    [result] = results
    return result


@asynccontextmanager
async def posting(target: WebhookTarget, limits: WebhookLimits = QUICK) -> AsyncIterator[WebhookQueue]:
    """Run a queue during the block, then stop it."""
    queue = WebhookQueue(target, limits)
    async with anyio.create_task_group() as group:
        group.start_soon(queue.run)
        await anyio.lowlevel.checkpoint()
        yield queue
        group.cancel_scope.cancel()


async def test_an_event_is_json_and_signed_with_its_time_and_delivery(listener: Listener) -> None:
    where = WebhookTarget(listener.url, SECRET.encode())
    assert await post(where, WebhookEvent({"event": "buried", "id": "x"})) is None
    headers, about = await listener.heard()
    assert about == {"event": "buried", "id": "x"}
    assert headers["Perdure-Event"] == "buried"
    at, _, digest = headers["Perdure-Signature"].removeprefix("t=").partition(",v1=")
    delivery = headers["Perdure-Delivery"]
    signed = f"{at}.{delivery}.".encode() + orjson.dumps(about)
    assert digest == hmac.new(SECRET.encode(), signed, hashlib.sha256).hexdigest()
    assert sign(b"other", delivery, orjson.dumps(about), int(at)) != headers["Perdure-Signature"]
    assert sign(SECRET.encode(), "other", orjson.dumps(about), int(at)) != headers["Perdure-Signature"]


async def test_a_transient_error_is_retried_with_the_same_delivery_id(listener: Listener) -> None:
    listener.answers = [503, 429]
    assert await post(WebhookTarget(listener.url), WebhookEvent({"event": "buried"})) is None
    deliveries = {(await listener.heard())[0]["Perdure-Delivery"] for _ in range(3)}
    assert len(deliveries) == 1


@pytest.mark.parametrize(("answer", "tries"), [(404, 1), (302, 1), (500, 5)])
async def test_a_rejected_event_is_dropped_with_the_reason(listener: Listener, answer: int, tries: int) -> None:
    listener.answers = [answer] * 9
    failed = await post(WebhookTarget(listener.url), WebhookEvent({"event": "buried"}))
    assert failed == f"the server replied {answer}"
    assert listener.taken.qsize() == tries


async def test_a_refused_connection_is_reported_without_the_url(captured: Callable[[], str]) -> None:
    target = WebhookTarget("http://127.0.0.1:9/secret-path")
    failed = await post(target, WebhookEvent({"event": "buried"}))
    assert failed is not None
    assert "ConnectionRefusedError" in failed
    assert "to http://127.0.0.1:9: " in captured()
    assert "secret-path" not in captured()
    assert "secret-path" not in repr(target)


@pytest.mark.parametrize(
    "url", ["http://h/hunter2 x", "http://user:hunter2@127.0.0.1:9/x", "http://h:hunter2/", "http://h/\u00e9hunter2"]
)
async def test_a_url_that_cannot_be_posted_to_is_not_shown(url: str, captured: Callable[[], str]) -> None:
    failed = await post(WebhookTarget(url), WebhookEvent({"event": "buried"}), QUICK)
    assert failed
    assert "hunter2" not in failed + captured()
    assert "could not post webhook event" in captured()


@pytest.fixture
def captured() -> Iterator[Callable[[], str]]:
    lines: list[str] = []
    number = logger.add(lambda line: lines.append(str(line)))
    yield lambda: "".join(lines)
    logger.remove(number)


Reply = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def replying(reply: Reply) -> AsyncIterator[str]:
    """Run a TCP server that reads the request and then replies in its own way; yield its URL."""

    ended: list[asyncio.Task[None]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        [length] = [line.partition(b":")[2] for line in head.splitlines() if line.startswith(b"Content-Length:")]
        reader.feed_data(head + await reader.readexactly(int(length)))
        with suppress(ConnectionError):
            await reply(reader, writer)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ended.append(asyncio.create_task(serve(reader, writer)))

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/hook"
        await bounded(asyncio.gather(*ended))


async def drip(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send an endless interim reply, a byte at a time, each sooner than any timeout of a single read."""
    writer.write(b"HTTP/1.1 103 Early Hints\r\nX: ")
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.005)


async def flood(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"HTTP/1.1 103 Early Hints\r\n" + b"X: y\r\n" * 1000)
        await writer.drain()


async def babble(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"y" * 65_536)
        await writer.drain()


async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


@pytest.mark.parametrize(
    ("reply", "failure"),
    [
        (drip, "no reply within 0.2 s"),
        (flood, "ConnectionError: the reply is not HTTP/1.1"),
        (babble, "ConnectionError: the reply has a line of more than 8192 bytes"),
        (hang_up, "ConnectionError: the server closed the connection without a reply"),
    ],
)
async def test_a_reply_without_a_status_ends_at_a_limit(reply: Reply, failure: str) -> None:
    timeout = 0.2 if reply is drip else BOUND
    async with replying(reply) as url:
        assert await post(WebhookTarget(url, timeout=timeout), WebhookEvent({"event": "x"}), ONCE) == failure


async def test_events_on_which_the_receiver_hangs_delay_no_other() -> None:
    hung, let_go, heard = asyncio.Event(), asyncio.Event(), asyncio.Queue[int]()

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = int(orjson.loads((await reader.read(65_536)).partition(b"\r\n\r\n")[2])["number"])
        if number < QUICK.parallel - 1:
            hanging.add(number)
            if len(hanging) == QUICK.parallel - 1:
                hung.set()
            await let_go.wait()
        writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
        heard.put_nowait(number)

    hanging: set[int] = set()
    async with replying(reply) as url, posting(WebhookTarget(url, timeout=BOUND)) as queue:
        for number in range(QUICK.parallel - 1):
            queue.give(WebhookEvent({"event": "buried", "number": number}))
        await bounded(hung.wait())
        for number in range(50, 60):
            queue.give(WebhookEvent({"event": "buried", "number": number}))
        assert [await bounded(heard.get()) for _ in range(10)] == [*range(50, 60)]
        let_go.set()


async def test_an_event_that_waits_for_its_next_try_delays_no_other(listener: Listener) -> None:
    """The first events are refused, and wait for an hour."""
    limits = WebhookLimits(backoff=Backoff(first=3600.0, longest=3600.0), grace=0.0)
    listener.answers = [503] * 20
    async with posting(WebhookTarget(listener.url), limits) as queue:
        for number in range(25):
            queue.give(WebhookEvent({"event": "buried", "number": number}))
        assert {(await listener.heard())[1]["number"] for _ in range(25)} == {*range(25)}


async def test_a_full_queue_drops_the_oldest_events_and_counts_them(
    listener: Listener, captured: Callable[[], str]
) -> None:
    queue = WebhookQueue(WebhookTarget(listener.url), WebhookLimits(queued=3))
    for number in range(19):
        queue.give(WebhookEvent({"event": "buried", "number": number}))
    assert re.findall(r"the oldest are dropped, (\d+) so far", captured()) == ["1", "10"]
    async with anyio.create_task_group() as group:
        group.start_soon(queue.run)
        assert {(await listener.heard())[1]["number"] for _ in range(3)} == {16, 17, 18}
        group.cancel_scope.cancel()
    assert listener.taken.empty()  # what is being posted is posted once, even if the process stops
    assert "16 webhook events were dropped because too many waited" in captured()


async def test_a_stopping_worker_posts_waiting_events(listener: Listener) -> None:
    async with posting(WebhookTarget(listener.url)) as queue:
        queue.give(WebhookEvent({"event": "buried"}))
    assert (await listener.heard())[1] == {"event": "buried"}


async def test_a_stopping_worker_reports_the_events_that_it_could_not_post(captured: Callable[[], str]) -> None:
    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await stopped.wait()

    stopped = asyncio.Event()
    async with replying(hang) as url:
        async with posting(WebhookTarget(url, timeout=BOUND), WebhookLimits(grace=0.01)) as queue:
            for number in range(12):
                queue.give(WebhookEvent({"event": "buried", "id": f"task-{number}"}))
        stopped.set()
    assert "12 webhook events were not posted before the process stopped: buried task-" in captured()
    assert "and 2 more" in captured()


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "hook",
        "ftp://x/y",
        "http://user:word@host/hook",
        "https://host/services/SECRET TOKEN",
        "https://host/\nHost: other",
        "https://host:70000/",
        "https://host:port/",
        "https:///hook",
        "https://hôst/",
    ],
)
def test_an_invalid_url_is_refused_and_not_shown(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERDURE_WEBHOOK_URL", url)
    with pytest.raises(ConfigurationError, match=r"PERDURE_WEBHOOK_URL: .*must be an http or https URL") as refused:
        load_settings()
    assert url not in str(refused.value)


@pytest.mark.parametrize("url", ["https://host", "HTTP://127.0.0.1:8080/a?b=c#d", "http://[::1]:80/x"])
def test_a_valid_url_is_shown_without_its_path(url: str) -> None:
    target = WebhookTarget.of(load_settings(webhook_url=url))
    assert target is not None
    assert target.url == url
    assert target.shown in ("https://host", "http://127.0.0.1:8080", "http://[::1]:80")


# events of tasks


@asynccontextmanager
async def telling(settings: Settings, listener: Listener, **changes: Any) -> AsyncIterator[App]:
    given = {**settings.model_dump(), "webhook_url": listener.url, "webhook_secret": SECRET, **changes}
    async with App("notices", settings=Settings(**given)) as app:
        yield app


@pytest.mark.integration
@pytest.mark.parametrize("sealed", [False, True])
async def test_a_resumed_run_reports_what_was_restored(settings: Settings, listener: Listener, sealed: bool) -> None:
    started, reported = asyncio.Event(), asyncio.Event()
    changes = {"encryption_keys": "c2VhbGluZy1rZXktb2YtMzItYnl0ZXMtZm9yLXRlc3Q="} if sealed else {}
    async with telling(settings, listener, **changes) as app:

        async def search(person: str) -> None:
            if started.is_set():
                return
            started.set()
            await asyncio.sleep(60)

        @app.task
        async def job(ctx: Context) -> None:
            await ctx.plan(["one", PlanStep(key="search", title="Find the file of Ben")])
            await ctx.step("one", len, "x")
            await ctx.tool("search", search, "Ben")
            await reported.wait()

        async with running_worker(app):
            handle = await job.enqueue()
            await bounded(started.wait())
            await steal(app, handle, expired=True)
            _, about = await listener.heard()
            while "notified" not in [event.type for event in await history(handle)]:  # noqa: ASYNC110 - see working.py
                await asyncio.sleep(0.005)
            reported.set()
            await bounded(handle.result())
        assert (about["event"], about["task"], about["id"], about["queue"]) == ("resumed", "job", handle.id, "notices")
        assert (about["after"], about["restored"]) == ("crash", {"steps": 1, "events": 1})
        assert "restored: 1 step, 1 event; last step: one" in about["summary"]
        assert ("Ben" in about["summary"]) is not sealed
        next_step = "step 2 of 2" if sealed else "Find the file of Ben (step 2 of 2)"
        assert f"Restored: 1 of 2 steps. Next: {next_step}, which was cut off." in about["text"]
        assert [event.data["text"] for event in await history(handle) if event.type == "resumed"] == [
            about["text"].replace(next_step, "Find the file of Ben (step 2 of 2)")
        ]
        notified = [event.data for event in await history(handle) if event.type == "notified"]
        assert notified == [{"what": "resumed", "how": "webhook"}]


@pytest.mark.integration
@pytest.mark.parametrize("sealed", [False, True])
async def test_a_burial_is_reported_without_text_of_encrypted_tasks(
    settings: Settings, listener: Listener, sealed: bool
) -> None:
    changes = {"encryption_keys": "c2VhbGluZy1rZXktb2YtMzItYnl0ZXMtZm9yLXRlc3Q="} if sealed else {}
    async with telling(settings, listener, **changes) as app:

        @app.task(retry=Retry(max_attempts=1))
        async def job(ctx: Context) -> None:
            raise ValueError("what the patient said")

        handle = await job.enqueue()
        await work_off(app)
        with pytest.raises(TaskFailed):
            await handle.result()
        _, about = await listener.heard()
    assert (about["event"], about["id"], about["reason"]) == ("buried", handle.id, "attempts_exhausted")
    assert about["remedy"] == f"perdure dlq show {handle.id}"
    assert ("what the patient said" in str(about)) is not sealed


@pytest.mark.integration
async def test_an_unreadable_message_is_reported(settings: Settings, listener: Listener) -> None:
    async with telling(settings, listener) as app:

        @app.task
        async def job(ctx: Context) -> None: ...

        ready = app.producer.namespace.partition("notices").ready
        await app.producer.gateway.command("XADD", ready, "*", "env", Envelope(id="x", task="t", v=99).encode())
        await work_off(app)
        _, about = await listener.heard()
    assert (about["event"], about["reason"], about["task"]) == ("buried", "unreadable", None)


@pytest.mark.integration
async def test_waiting_for_a_person_is_reported_with_the_reply_command(settings: Settings, listener: Listener) -> None:
    async with telling(settings, listener) as app:

        @app.task
        async def job(ctx: Context) -> Any:
            return await ctx.ask("ada", "may it go out?")

        async with running_worker(app):
            handle = await job.enqueue()
            _, about = await listener.heard()
            await handle.answer("question", "yes", by="ada")
            assert await bounded(handle.result()) == "yes"
    assert (about["event"], about["on"], about["what"], about["why"]) == (
        "waiting",
        "ada",
        "answer",
        "may it go out?",
    )
    assert about["remedy"] == f"perdure task answer {handle.id} question JSON"


@pytest.mark.integration
async def test_a_budget_is_reported_at_80_percent_and_when_it_is_used_up_once(
    settings: Settings, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that has asked is parked again after each look, and is posted once."""
    monkeypatch.setattr(WaitBoard, "park_after", 0.01)
    monkeypatch.setattr(spending, "_LOOK", 0.05)
    parked = 0
    park = Settler.settle

    async def count(self: Settler, run: Run, outcome: Any, on_wait: Any) -> Any:
        nonlocal parked
        parked += isinstance(outcome, Park)
        return await park(self, run, outcome, on_wait)

    monkeypatch.setattr(Settler, "settle", count)

    async with telling(settings, listener) as app:

        @app.task(budget=Budget(tokens=100))
        async def job(ctx: Context) -> int | None:
            await ctx.spend(tokens=90)
            return (await ctx.spend(tokens=10)).tokens

        async with running_worker(app):
            handle = await job.enqueue()
            _, low = await listener.heard()
            _, asking = await listener.heard()

            async def again() -> bool:
                return parked > 2

            await wait_until(again, "it has looked again")
            await handle.answer("budget", {"tokens": 1000})
            assert await bounded(handle.result()) == 1000
    assert (low["event"], low["ledger"], low["used"]) == ("budget", handle.id, "90 of 100 tokens")
    assert low["remedy"] == f"perdure budget show {handle.id}"
    assert (asking["event"], asking["on"]) == ("waiting", "operator")
    assert asking["remedy"].startswith(f"perdure task answer {handle.id} ")
    assert listener.taken.empty()


@pytest.mark.integration
async def test_a_failed_webhook_does_not_change_the_task(settings: Settings, listener: Listener) -> None:
    listener.answers = [404]
    started = asyncio.Event()
    async with telling(settings, listener) as app:

        @app.task
        async def job(ctx: Context) -> str:
            if ctx.resumption is None:
                started.set()
                await asyncio.sleep(60)
            while "notified" not in [event.type for event in await history(handle)]:  # noqa: ASYNC110 - see working.py
                await asyncio.sleep(0.005)
            return "done"

        async with running_worker(app):
            handle = await job.enqueue()
            await bounded(started.wait())
            await steal(app, handle, expired=True)
            assert await bounded(handle.result()) == "done"
        notified = [event.data for event in await history(handle) if event.type == "notified"]
    assert notified == [{"what": "resumed", "how": "webhook", "failed": "the server replied 404"}]


class Notes(AgentState):
    notes: str = ""


class Wordy(Agent[Notes]):
    """Notes more than its state may have."""

    async def plan(self, ctx: Context, state: Notes) -> list[PlanStep]:
        return [PlanStep(key="say", title="say")]

    async def act(self, ctx: Context, state: Notes, step: PlanStep) -> None:
        state.notes = "".join(chr(33 + number * number % 89) for number in range(25_000))

    async def finish(self, ctx: Context, state: Notes) -> str:
        return "said"


@pytest.mark.integration
@pytest.mark.parametrize("sealed", [False, True])
async def test_a_turn_that_is_parked_for_an_operator_is_reported_with_its_session(
    settings: Settings, listener: Listener, sealed: bool
) -> None:
    changes: dict[str, Any] = {"payload_limit": 20_000, "check_state": True, "lease": 30.0}
    if sealed:
        changes["encryption_keys"] = "c2VhbGluZy1rZXktb2YtMzItYnl0ZXMtZm9yLXRlc3Q="
    async with telling(settings, listener, **changes) as app:
        session = app.session(app.agent(Wordy, name="wordy"), "user-42")
        turn = await session.send("note it")
        await work_off(app)
        _, about = await listener.heard()
    assert (about["event"], about["id"], about["session"]) == ("waiting", turn.task_id, "user-42")
    assert (about["what"], about["summary"]) == (
        "compaction",
        "waits for compaction: an operator has to make its state smaller",
    )
    assert about["remedy"] == f"perdure task why {turn.task_id}"
    assert "on" not in about
    assert ("why" in about) is not sealed


@pytest.mark.integration
async def test_an_agent_that_waits_for_a_confirmation_is_reported(settings: Settings, listener: Listener) -> None:
    started = asyncio.Event()

    class Careful(Wordy):
        async def act(self, ctx: Context, state: Notes, step: PlanStep) -> None:
            if ctx.resumption is None:
                started.set()
                await asyncio.sleep(60)

    async with telling(settings, listener) as app:
        careful = app.agent(Careful, name="careful", on_resume="ask")
        async with running_worker(app):
            handle = await careful.enqueue("work")
            await bounded(started.wait())
            await steal(app, handle, expired=True)
            heard = [(await listener.heard())[1] for _ in range(2)]
            await handle.correct({}, confirm=True)
            assert await bounded(handle.result()) == "said"
    assert {about["event"] for about in heard} == {"resumed", "waiting"}
    [about] = [about for about in heard if about["event"] == "waiting"]
    assert (about["what"], about["why"]) == ("confirmation", "it resumes after a crash")
    assert "session" not in about


@pytest.mark.integration
async def test_a_task_that_is_parked_again_for_one_reason_is_reported_once(
    settings: Settings, listener: Listener, tmp_path: Path
) -> None:
    places = {"artifacts": str(tmp_path / "store"), "workspaces": str(tmp_path / "running"), "workspace_limit": 1}
    async with telling(settings, listener, **places) as app:

        @app.task
        async def heavy(ctx: Context) -> None:
            await ctx.step("write", (ctx.workspace.path / "a.txt").write_text, "too large")

        @app.task(retry=Retry(max_attempts=1))
        async def fails(ctx: Context) -> None:
            raise ValueError

        async with running_worker(app):
            handle = await heavy.enqueue()
            _, about = await listener.heard()
            for number in (2, 3):
                await handle.send("look again")

                async def is_parked_again(number: int = number) -> bool:
                    waits = (await handle.record()).waits == "workspace"
                    return waits and orjson.loads((await recorded_steps(app, handle))["s:#unsaved"])["tries"] >= number

                await wait_until(is_parked_again, "it has looked, and waits again")
            await fails.enqueue()
            _, after = await listener.heard()
    assert (about["event"], about["what"]) == ("waiting", "workspace")
    assert "PERDURE_WORKSPACE_LIMIT" in about["why"]
    assert after["event"] == "buried"
