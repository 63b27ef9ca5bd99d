"""`perdure queue pause` and `resume`: what they store, show and wake; and what is wrong, in one sentence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from perdure import App, Context, State
from perdure.queues.delivery.paused_tasks import await_resume
from perdure.queues.delivery.settlement import Counters
from perdure.queues.pauses import load_pauses
from pydantic import SecretStr

from tests.support.command_line import Answer, call
from tests.support.consumers import read_one, worker
from tests.support.workers import partition_of, redis_command, work_off

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("environment"), pytest.mark.app("shop")]


async def tool(*args: str) -> Answer:
    return await asyncio.to_thread(call, *args)


@pytest.fixture
async def shop(app: App) -> AsyncIterator[App]:
    """An app whose workers have published its tasks."""

    @app.task
    async def report(ctx: Context, tenant: str, token: SecretStr | None = None) -> str:
        return tenant

    await work_off(app)
    yield app
    await redis_command(app, "DEL", app.producer.namespace.pauses)
    await redis_command(app, "DEL", partition_of(app).paused)


async def park(app: App, number: int) -> str:
    """Park the next task as its worker does."""
    handle = await app.producer.enqueue("report", {"tenant": "acme"}, queue="shop")
    gateway = app.producer.gateway
    await await_resume(gateway, await read_one(await worker(gateway, partition_of(app))), handle.id, number, Counters())
    return handle.id


async def test_a_queue_is_paused_listed_and_resumed(shop: App) -> None:
    paused = (await tool("queue", "pause", "shop", "--by", "ann", "--why", "a move", "--json")).json
    assert (paused["queue"], paused["by"], paused["why"]) == ("shop", "ann", "a move")
    assert paused["resume"] == "perdure queue resume shop"
    again = await tool("queue", "pause", "shop", "--by", "bob")
    assert again.code == 0
    assert "it was paused already by ann" in again.err
    [row] = (await tool("queue", "list", "--json")).json
    assert (row["pause"]["by"], row["pause"]["why"]) == ("ann", "a move")
    shown = await tool("queue", "list")
    assert "state" in shown.out
    assert "(a move): queue 'shop'; to end that: perdure queue resume shop" in shown.err
    assert "queue 'shop'; to end that" in (await tool("worker", "list")).err
    handle = await shop.producer.enqueue("report", {"tenant": "acme"}, queue="shop")
    why = await tool("task", "why", handle.id)
    assert "it is queued, and queue 'shop' is paused by ann" in why.out
    assert "perdure queue resume shop" in why.out
    assert (await tool("queue", "resume", "shop", "--json")).json["woken"] == 0
    assert (await load_pauses(shop.producer.gateway, shop.producer.namespace)).rules == []
    assert "state" not in (await tool("queue", "list")).out.split("\n")[0]
    await work_off(shop)
    assert await handle.result(30) == "acme"


async def test_a_resumption_queues_what_its_pause_held(shop: App) -> None:
    await tool("queue", "pause", "shop", "--task", "report", "--where", "tenant=acme", "--why", "database")
    await tool("queue", "pause", "--task", "report")
    [first, second] = (await load_pauses(shop.producer.gateway, shop.producer.namespace)).rules
    mine, others = await park(shop, first.number), await park(shop, second.number)
    shown = (await tool("queue", "list")).err
    assert "tasks 'report' of queue 'shop' with tenant=acme, of which 1 are parked" in shown
    found = (await tool("task", "why", mine, "--json")).json
    assert (found["cause"], found["why"], found["state"]) == ("paused", "database", "scheduled")
    assert "it is parked: tasks 'report' of queue 'shop' with tenant=acme are paused by" in found["sentence"]
    assert found["remedy"] == "end the pause: perdure queue resume shop --task report --where tenant=acme"
    resumed = await tool("queue", "resume", "shop", "--task", "report", "--where", "tenant=acme")
    assert "1 task is queued again" in resumed.err
    assert "still paused: tasks 'report'; to end that: perdure queue resume --task report" in resumed.err
    ended = (await tool("task", "why", mine)).out
    assert "it was parked by a pause that has ended; it is queued again within a minute" in ended
    assert "paused" in (await tool("task", "show", others)).out
    assert (await tool("queue", "resume", "--task", "report", "--json")).json["woken"] == 1
    await work_off(shop)
    for task_id in (mine, others):
        handle = await shop.producer.find(task_id)
        assert handle is not None
        assert await handle.status() is State.SUCCEEDED


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        (["pause"], 2, "name a QUEUE, or tasks with --task NAME or --where NAME=VALUE"),
        (["resume"], 2, "name a QUEUE, or tasks with --task NAME or --where NAME=VALUE"),
        (["pause", "no queue"], 2, "queue must be 1 to 64 letters"),
        (["pause", "--where", "tenant"], 2, "must be NAME=VALUE, such as tenant=acme"),
        (["pause", *(f"--where=a{number}=1" for number in range(11))], 2, "at most 10 conditions"),
        (["pause", "--task", "report", "--where", "token=x"], 2, "argument 'token' of task 'report' is secret"),
        (["pause", "--where", "token.x=x"], 2, "argument 'token.x' of task 'report' is secret"),
        (["resume", "shop"], 1, "there is no pause of queue 'shop' in namespace"),
    ],
)
async def test_what_is_wrong_is_one_sentence_and_pauses_nothing(
    shop: App, args: list[str], code: int, text: str
) -> None:
    answer = await tool("queue", *args)
    assert (answer.code, text in " ".join(answer.err.split())) == (code, True), answer.err
    assert "Traceback" not in answer.err
    assert (await load_pauses(shop.producer.gateway, shop.producer.namespace)).revision == 0


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["shopp"], "there is no queue 'shopp' yet"),
        (["shopp"], "did you mean 'shop'?"),
        (["--task", "reprt"], "no worker has published a task 'reprt'; did you mean 'report'?"),
        (["--task", "report", "--where", "tenat=a"], "task 'report' has no argument 'tenat'; did you mean 'tenant'?"),
        (["--where", "tenat=a"], "no published task has an argument 'tenat'; did you mean 'tenant'?"),
    ],
)
async def test_an_unknown_name_is_noted_as_a_pause_may_come_first(shop: App, args: list[str], text: str) -> None:
    answer = await tool("queue", "pause", *args)
    assert (answer.code, text in answer.err) == (0, True), answer.err
    assert len((await load_pauses(shop.producer.gateway, shop.producer.namespace)).rules) == 1


async def test_what_another_program_wrote_among_the_pauses_is_named(shop: App) -> None:
    await redis_command(shop, "HSET", shop.producer.namespace.pauses, "junk", "x")
    answer = await tool("queue", "list")
    assert "a pause is ignored: {" in answer.err
    assert "field junk: could not read the pause: it has no number" in answer.err


async def test_metrics_show_pauses(shop: App) -> None:
    await tool("queue", "pause", "shop")
    await park(shop, 7)
    shown = (await tool("queue", "metrics")).out
    place = f'{{namespace="{shop.producer.namespace.name}",queue="shop"}}'
    assert f"perdure_queue_paused{place} 1.0" in shown
    assert f"perdure_queue_held{place} 1.0" in shown
