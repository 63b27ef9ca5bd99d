"""Webhooks: signed events, retries of transient errors, and tasks that do not depend on the delivery."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import orjson
import pytest
from perdure import App, Context, Retry, Settings, TaskFailed
from perdure.queues import Backoff, Envelope
from perdure.worker.errors import ConfigurationError
from perdure.worker.log import logger
from perdure.worker.runtime.webhook_posting import WebhookEvent, WebhookLimits, WebhookTarget, post, sign
from perdure.worker.runtime.webhooks import WebhookQueue
from perdure.worker.settings import load_settings

from tests.support.servers.webhook_server import Listener, listening
from tests.support.workers import bounded, history, running_worker, steal, work_off

SECRET = "a webhook's secret"

QUICK = WebhookLimits(backoff=Backoff(first=0.01))


@pytest.fixture
def listener() -> Iterator[Listener]:
    with listening() as found:
        yield found


async def test_an_event_is_json_and_signed_with_its_time(listener: Listener) -> None:
    where = WebhookTarget(listener.url, SECRET.encode())
    assert await post(where, WebhookEvent({"event": "buried", "id": "x"})) is None
    headers, about = await listener.heard()
    assert about == {"event": "buried", "id": "x"}
    assert headers["Perdure-Event"] == "buried"
    at, _, digest = headers["Perdure-Signature"].removeprefix("t=").partition(",v1=")
    expected = hmac.new(SECRET.encode(), f"{at}.".encode() + orjson.dumps(about), hashlib.sha256).hexdigest()
    assert digest == expected
    assert sign(b"other", orjson.dumps(about), int(at)) != headers["Perdure-Signature"]


async def test_a_transient_error_is_retried_with_the_same_delivery_id(listener: Listener) -> None:
    listener.answers = [503, 429]
    assert await post(WebhookTarget(listener.url), WebhookEvent({"event": "buried"}), QUICK) is None
    deliveries = {(await listener.heard())[0]["Perdure-Delivery"] for _ in range(3)}
    assert len(deliveries) == 1


@pytest.mark.parametrize(("answer", "tries"), [(404, 1), (302, 1), (500, 5)])
async def test_a_rejected_event_is_dropped_with_the_reason(listener: Listener, answer: int, tries: int) -> None:
    listener.answers = [answer] * 9
    failed = await post(WebhookTarget(listener.url), WebhookEvent({"event": "buried"}), QUICK)
    assert failed == f"the server replied {answer}"
    assert listener.taken.qsize() == tries


async def test_a_refused_connection_is_reported_without_the_url(captured: Callable[[], str]) -> None:
    failed = await post(WebhookTarget("http://127.0.0.1:9/secret-path"), WebhookEvent({"event": "buried"}), QUICK)
    assert failed is not None
    assert "ConnectionRefusedError" in failed
    assert "secret-path" not in captured()
    assert "secret-path" not in repr(WebhookTarget("http://127.0.0.1:9/secret-path"))


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


async def test_the_queue_of_events_is_bounded_and_never_blocks(listener: Listener, captured: Callable[[], str]) -> None:
    queue = WebhookQueue(WebhookTarget(listener.url), WebhookLimits(queued=3))
    for number in range(9):
        queue.give(WebhookEvent({"event": "buried", "number": number}))
    assert "are dropped" in captured()
    async with anyio.create_task_group() as group:
        group.start_soon(queue.run)
        assert [(await listener.heard())[1]["number"] for _ in range(3)] == [0, 1, 2]
        group.cancel_scope.cancel()
    left = [orjson.loads(body)["number"] for _, body in listener.taken.queue]
    assert set(left) <= {2}  # posted again if its reply was not read


async def test_a_stopping_worker_posts_waiting_events(listener: Listener) -> None:
    queue = WebhookQueue(WebhookTarget(listener.url))
    async with anyio.create_task_group() as group:
        group.start_soon(queue.run)
        await anyio.lowlevel.checkpoint()
        queue.give(WebhookEvent({"event": "buried"}))
        group.cancel_scope.cancel()
    assert (await listener.heard())[1] == {"event": "buried"}


@pytest.mark.parametrize("url", ["file:///etc/passwd", "hook", "ftp://x/y"])
def test_an_invalid_url_is_refused_and_not_shown(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERDURE_WEBHOOK_URL", url)
    with pytest.raises(ConfigurationError, match=r"PERDURE_WEBHOOK_URL: .*must be an http or https URL") as refused:
        load_settings()
    assert url not in str(refused.value)


# events of tasks


@asynccontextmanager
async def telling(settings: Settings, listener: Listener, **changes: Any) -> AsyncIterator[App]:
    given = {**settings.model_dump(), "webhook_url": listener.url, "webhook_secret": SECRET, **changes}
    async with App("notices", settings=Settings(**given)) as app:
        yield app


@pytest.mark.integration
async def test_a_resumed_run_reports_what_was_restored(settings: Settings, listener: Listener) -> None:
    started, reported = asyncio.Event(), asyncio.Event()
    async with telling(settings, listener) as app:

        @app.task
        async def job(ctx: Context) -> None:
            await ctx.step("one", len, "x")
            if ctx.resumption is None:
                started.set()
                await asyncio.sleep(60)
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
        assert (about["after"], about["restored"]) == ("crash", {"steps": 1})
        assert "restored: 1 step; last step: one" in about["summary"]
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
            found = await ctx.ask("ada", "may it go out?")
            return None if found is None else found.content

        async with running_worker(app):
            handle = await job.enqueue()
            _, about = await listener.heard()
            await handle.send("yes", sender="ada")
            assert await bounded(handle.result()) == "yes"
    assert (about["event"], about["on"], about["what"], about["why"]) == (
        "waiting",
        "ada",
        "approval",
        "may it go out?",
    )
    assert about["remedy"] == f"perdure task send {handle.id} TEXT --from ada"


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
