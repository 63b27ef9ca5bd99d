"""Event streams: frames and their ids, one reader for all clients of a task, slow clients, and clients that leave."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest
from perdure import App, Context
from perdure.web import Role, router
from perdure.worker.web import streaming
from perdure.worker.web.router import application
from perdure.worker.web.service import Service
from perdure.worker.web.users import add_token
from starlette.applications import Starlette

from tests.support.workers import bounded, redis_command, running_worker, wait_until, work_off

from .conftest import SECRET, ClientOf, user_of
from .streaming_client import frames_of, stream_client

pytestmark = pytest.mark.integration


@pytest.fixture
def service(app: App) -> Service:
    return Service(app, authenticate=user_of, secret=SECRET)


@pytest.fixture
def asgi(service: Service) -> Starlette:
    return application(service)


def hub_of(service: Service) -> streaming.EventHub:
    hub: streaming.EventHub = service.extras["event hub"]
    return hub


async def test_the_events_of_a_task_end_with_its_result(app: App, api: httpx.AsyncClient) -> None:
    @app.task
    async def work(ctx: Context) -> dict[str, int]:
        await ctx.step("one", lambda: 1)
        await ctx.step("two", lambda: 2)
        return {"sum": 3}

    handle = await work.enqueue()
    await work_off(app)
    answer = await api.get(f"/tasks/{handle.id}/events")
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-store"
    frames = frames_of(answer.text)
    assert [frame.event for frame in frames] == ["step_completed", "step_completed", "end"]
    assert frames[0].data["step"] == "one"
    assert frames[0].id == frames[0].data["id"]
    assert frames[-1].id == frames[-2].id, "it continues behind the last event"
    assert frames[-1].data["state"] == "succeeded"
    assert frames[-1].data["result"] == {"sum": 3}
    for rest in (
        await api.get(f"/tasks/{handle.id}/events", params={"after": frames[0].id}),
        await api.get(f"/tasks/{handle.id}/events", headers={"Last-Event-ID": frames[0].id}),
        await api.get(f"/tasks/{handle.id}/events", params={"after": "0-0"}, headers={"Last-Event-ID": frames[0].id}),
    ):
        assert frames_of(rest.text) == frames[1:]


async def test_a_stream_ends_when_the_token_of_its_user_is_removed(app: App, tmp_path: Path) -> None:
    @app.task
    async def work(ctx: Context) -> None:
        for number in range(6):
            await ctx.step(f"step {number}", lambda: 1)

    handle = await work.enqueue()
    await work_off(app)
    tokens = tmp_path / "tokens.toml"
    token = add_token(tokens, "ada", [Role.VIEWER])
    api = router(app, tokens=tokens)
    headers = {"authorization": f"Bearer {token}"}
    async with stream_client(api, f"/tasks/{handle.id}/events", headers=headers) as client:
        first = await client.frame()
        assert first is not None
        assert first.event == "step_completed"
        tokens.write_text("")
        rest = await client.frames()
    assert len(rest) < 6, "the frames that were on their way, and the end"
    assert (rest[-1].event, rest[-1].data["status"]) == ("error", 401)


async def test_the_items_of_a_stream_end_with_the_error_of_the_handler(app: App, api: httpx.AsyncClient) -> None:
    @app.task
    async def work(ctx: Context) -> None:
        for number in range(3):
            await ctx.emit(number, to="tokens")
        raise ValueError("no more")

    handle = await work.options(max_attempts=1).enqueue()
    await work_off(app)
    frames = frames_of((await api.get(f"/tasks/{handle.id}/streams/tokens")).text)
    assert [(frame.id, frame.event, frame.data.get("value")) for frame in frames[:3]] == [
        ("1", "item", 0),
        ("2", "item", 1),
        ("3", "item", 2),
    ]
    assert frames[-1].event == "end"
    assert (frames[-1].data["state"], frames[-1].data["error"]) == ("dead", "no more")
    rest = await api.get(f"/tasks/{handle.id}/streams/tokens", params={"last": 3}, headers={"Last-Event-ID": "2"})
    assert [frame.id for frame in frames_of(rest.text)] == ["3", "3"]
    both = frames_of((await api.get(f"/tasks/{handle.id}/events", params={"include": "emitted"})).text)
    assert [frame.data["data"]["value"] for frame in both if frame.event == "emitted"] == [0, 1, 2]
    assert both[-1].event == "end"
    assert (both[-1].data["state"], both[-1].data["error_type"]) == ("dead", "ValueError")
    place = next(frame.id for frame in both if frame.event == "emitted")
    rest = await api.get(f"/tasks/{handle.id}/events", params={"include": "emitted"}, headers={"Last-Event-ID": place})
    assert frames_of(rest.text) == both[both.index(next(frame for frame in both if frame.id == place)) + 1 :]
    assert (await api.get(f"/tasks/{handle.id}/streams")).json() == {"items": ["tokens"]}


async def test_many_clients_of_a_task_share_one_reader(app: App, service: Service, asgi: Starlette) -> None:
    go = asyncio.Event()

    @app.task
    async def work(ctx: Context) -> None:
        await ctx.step("first", lambda: 1)
        await go.wait()
        for number in range(20):
            await ctx.step(f"step-{number}", lambda: "x")

    handle = await work.enqueue()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(running_worker(app))
        clients = [
            await stack.enter_async_context(stream_client(asgi, f"/tasks/{handle.id}/events")) for _ in range(10)
        ]
        for client in clients:
            assert (await client.frame()).data["step"] == "first"  # type: ignore[union-attr]
        assert hub_of(service).readers == 1
        go.set()
        found = await asyncio.gather(*(client.frames() for client in clients))
    assert [frame.data.get("step") for frame in found[0]] == [*(f"step-{number}" for number in range(20)), None]
    assert all(frames == found[0] for frames in found)
    assert hub_of(service).readers == 0


async def test_a_client_that_leaves_ends_its_reader(app: App, service: Service, asgi: Starlette) -> None:
    @app.task
    async def work(ctx: Context) -> None: ...

    handle = await work.enqueue()
    async with stream_client(asgi, f"/tasks/{handle.id}/events"):
        await wait_until(lambda: reading(service), "the reader has begun")
    assert hub_of(service).readers == 0
    assert not [
        task for task in asyncio.all_tasks() if task.get_name().startswith("perdure events") and not task.cancelling()
    ]


async def reading(service: Service) -> bool:
    return "event hub" in service.extras and hub_of(service).readers == 1


async def test_a_slow_client_is_dropped_with_the_place_to_continue(
    app: App, service: Service, asgi: Starlette, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "MAX_FRAMES", 5)
    go, done = asyncio.Event(), asyncio.Event()

    @app.task
    async def work(ctx: Context) -> None:
        await ctx.step("first", lambda: 1)
        await go.wait()
        for number in range(50):
            await ctx.step(f"step-{number}", lambda: "x")
        done.set()

    handle = await work.enqueue()
    path = f"/tasks/{handle.id}/events"
    async with running_worker(app), stream_client(asgi, path) as slow, stream_client(asgi, path) as other:
        assert (await slow.frame()).data["step"] == "first"  # type: ignore[union-attr]
        following = asyncio.ensure_future(other.frames())
        go.set()
        await bounded(done.wait())
        await bounded(following)
        frames = await slow.frames()
    assert frames[-1].event == "slow"
    assert frames[-1].data["after"] == frames[-2].id == frames[-1].id
    assert len(frames) < 20
    async with stream_client(asgi, path, headers={"Last-Event-ID": frames[-1].id}) as again:
        rest = await again.frames()
    steps = [frame.data["step"] for frame in [*frames[:-1], *rest] if frame.event == "step_completed"]
    assert steps[-50:] == [f"step-{number}" for number in range(50)], "nothing is missing, nothing comes twice"


async def test_a_late_client_gets_the_progress_that_is_not_stored(app: App, asgi: Starlette) -> None:
    go = asyncio.Event()

    @app.task
    async def work(ctx: Context) -> None:
        await ctx.progress(1, 2, "half")
        await go.wait()

    handle = await work.enqueue()
    path = f"/tasks/{handle.id}/events"
    async with running_worker(app), stream_client(asgi, path) as first:
        assert (await first.frame()).data["data"]["note"] == "half"  # type: ignore[union-attr]
        async with stream_client(asgi, path) as second:
            assert (await second.frame()).data["data"]["note"] == "half"  # type: ignore[union-attr]
        go.set()
        assert (await first.frames())[-1].event == "end"


async def test_a_task_that_is_cancelled_while_it_is_followed_ends(app: App, asgi: Starlette) -> None:
    @app.task
    async def work(ctx: Context) -> None: ...

    handle = await work.enqueue()
    async with stream_client(asgi, f"/tasks/{handle.id}/events") as client:
        await handle.cancel()
        frames = await client.frames()
    assert (frames[-1].event, frames[-1].data["state"]) == ("end", "cancelled")


async def test_a_task_whose_record_expires_while_it_is_followed_ends(
    app: App, service: Service, asgi: Starlette, api: httpx.AsyncClient
) -> None:
    @app.task
    async def work(ctx: Context) -> None: ...

    handle = await work.options(delay=60).enqueue()
    record = handle.partition.record(handle.id)
    async with stream_client(asgi, f"/tasks/{handle.id}/events") as client:
        await wait_until(lambda: reading(service), "the reader has begun")
        await redis_command(app, "DEL", record)
        await redis_command(app, "PUBLISH", record, "gone")
        frames = await client.frames()
    assert (frames[-1].event, frames[-1].data["state"]) == ("end", "expired")
    answer = await api.get(f"/tasks/{handle.id}/events")
    assert (answer.status_code, answer.json()["type"]) == (410, "urn:perdure:problem:task-expired")
    assert (await api.get("/tasks/unknown/events")).status_code == 404


@pytest.mark.parametrize(
    ("path", "detail"),
    [
        ("events?after=x", "after: after must be the id of an event, got 'x'"),
        ("events?after=1-1@output", "after: must be the id of an event, got that of an item"),
        ("events?after=1-99999999999999999999", "after: after must be the id of an event"),
        ("streams/a%20b", "after: name of a stream must be"),
        ("streams/output?after=x", "after: after must be the cursor of an item"),
    ],
)
async def test_a_place_that_cannot_be_is_refused(app: App, api: httpx.AsyncClient, path: str, detail: str) -> None:
    @app.task
    async def work(ctx: Context) -> None: ...

    handle = await work.enqueue()
    answer = await api.get(f"/tasks/{handle.id}/{path}")
    assert answer.status_code == 422
    assert answer.json()["detail"].startswith(detail)


async def test_a_producer_follows_its_own_tasks_only(app: App, client_of: ClientOf) -> None:
    @app.task
    async def work(ctx: Context) -> None: ...

    handle = await work.enqueue()
    for path in ("events", "streams/output", "streams", "log", "why", "result", "messages"):
        assert (await client_of(Role.PRODUCER).get(f"/tasks/{handle.id}/{path}")).status_code == 404


async def test_what_another_program_wrote_into_a_log_is_one_frame(app: App, api: httpx.AsyncClient) -> None:
    @app.task
    async def work(ctx: Context) -> None: ...

    handle = await work.enqueue()
    log = handle.partition.log(handle.id)
    await redis_command(app, "XADD", log, "1-1", "type", b"x\r\ndata: {}\r\n\r\nevent: end\xff", "data", b"\xff{")
    await redis_command(app, "XADD", log, "1-2", "foreign", b"\x00")
    await handle.cancel()
    frames = frames_of((await api.get(f"/tasks/{handle.id}/events")).text)
    assert [frame.id for frame in frames[:2]] == ["1-1", "1-2"]
    assert [frame.event for frame in frames if frame.event == "end"] == ["end"]
    assert frames[-1].event == "end"
