"""Tenants: the same ids, keys, sessions and memories of two customers stay apart."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from perdure import (
    Agent,
    AgentState,
    App,
    Context,
    Every,
    InvalidArguments,
    PlanStep,
    Retry,
    Settings,
    TaskHandle,
    TaskNotFound,
)
from perdure.queues import generate_key
from perdure.queues.envelope import Envelope
from perdure.queues.errors import ConfigurationError, TamperedData
from perdure.queues.inspection.timeline import page_tasks
from perdure.queues.records import read_record
from perdure.queues.security.encryption import Encryptor, arguments_field
from perdure.queues.sessions.record import list_sessions
from perdure.queues.task_filter import TaskFilter
from perdure.queues.unique import Unique
from perdure.queues.waits import list_waiting
from perdure.worker.agents.journal.forks import fork
from perdure.worker.artifacts.store import artifact_store
from perdure.worker.errors import SpawnRefused, TransferError
from perdure.worker.transfer.export import export_task
from perdure.worker.transfer.import_ import import_task
from pydantic import Field, SecretStr

from tests.support.workers import letter, redis_command, running_worker, wait_until, work_off

pytestmark = [pytest.mark.integration, pytest.mark.app("tenants", lease=30.0)]

BOUND = 60


class Notes(AgentState):
    """What was said."""

    said: list[str] = Field(default_factory=list)


class Bot(Agent[Notes]):
    """Remembers what is said, also for later tasks."""

    async def plan(self, ctx: Context, state: Notes) -> list[PlanStep]:
        return [PlanStep(key="listen", title="listen")]

    async def act(self, ctx: Context, state: Notes, step: PlanStep) -> int:
        state.said.append(f"{ctx.tenant}: {state.goal}")
        return len(state.said)

    async def finish(self, ctx: Context, state: Notes) -> str:
        return "; ".join(state.said)


def record_ids(records: Any) -> set[str]:
    return {record.id for record in records}


async def test_the_same_task_id_of_two_tenants_is_two_tasks_that_see_themselves_only(app: App) -> None:
    @app.task
    async def order(ctx: Context, number: int) -> list[Any]:
        return [ctx.tenant, ctx.task_id, number]

    acme = await order.options(tenant="acme", task_id="order-17").enqueue(1)
    other = await order.options(tenant="other", task_id="order-17").enqueue(2)
    plain = await order.options(task_id="order-17").enqueue(3)
    assert not any(handle.existed for handle in (acme, other, plain))
    again = await order.options(tenant="acme", task_id="order-17").enqueue(1)
    assert (again.id, again.existed) == (acme.id, True)
    await work_off(app)
    assert await acme.result(BOUND) == ["acme", acme.id, 1]
    assert await other.result(BOUND) == ["other", other.id, 2]
    assert await plain.result(BOUND) == [None, "order-17", 3]

    mine = app.producer.for_tenant("acme")
    found = await mine.find("order-17")
    assert found is not None and found.id == acme.id
    assert await mine.find(acme.id) == found
    assert await mine.find(other.id) is None
    assert await app.producer.find(other.id) == other
    with pytest.raises(TaskNotFound):
        await mine.send_message(other.id, "hello")
    page = await page_tasks(mine.gateway, mine.namespace, TaskFilter(), limit=10)
    assert (record_ids(page.tasks), page.cursor) == ({acme.id}, None)
    everything = await page_tasks(mine.gateway, app.producer.namespace, TaskFilter(), limit=10)
    assert record_ids(everything.tasks) == {acme.id, other.id, plain.id}


async def test_a_list_of_a_tenant_is_paged_past_the_tasks_of_others(app: App) -> None:
    @app.task
    async def noop(ctx: Context) -> None: ...

    own = [await noop.options(tenant="acme").enqueue() for _ in range(3)]
    await noop.options(tenant="other").enqueue_many({} for _ in range(450))
    own.append(await noop.options(tenant="acme").enqueue())
    mine = app.producer.for_tenant("acme")
    found: list[str] = []
    cursor = None
    while True:
        page = await page_tasks(mine.gateway, mine.namespace, TaskFilter(), limit=2, cursor=cursor)
        found += [record.id for record in page.tasks]
        if (cursor := page.cursor) is None:
            break
    assert found == [handle.id for handle in reversed(own)]


async def test_unique_keys_and_goals_of_tenants_are_their_own(app: App) -> None:
    bot = app.agent(Bot)

    @app.task(unique=Unique("while_queued", by="number"))
    async def once(ctx: Context, number: int) -> str | None:
        return ctx.tenant

    first, second = [await once.options(tenant=name).enqueue(7) for name in ("acme", "other")]
    third = await once.options(tenant="acme").enqueue(7)
    assert (third.id, third.existed, second.existed) == (first.id, True, False)
    goals = [await bot.options(tenant=name).enqueue("greet", key="k") for name in ("acme", "other")]
    again = await bot.options(tenant="acme").enqueue("greet", key="k")
    assert again.existed and again.id == goals[0].id == bot.options(tenant="acme").task_id("greet", key="k")
    assert goals[0].id != goals[1].id
    await work_off(app)
    assert [await goal.result(BOUND) for goal in goals] == ["acme: greet", "other: greet"]
    assert await second.result(BOUND) == "other"


async def test_what_a_task_makes_has_its_tenant(app: App) -> None:
    bot = app.agent(Bot)

    @app.task
    async def leaf(ctx: Context) -> list[Any]:
        return [ctx.tenant, ctx.task_id]

    @app.task
    async def cleanup(ctx: Context, task_id: str) -> None:
        await redis_command(app, "HSET", "{tenants-seen}", task_id, ctx.task_id)

    @app.task(on_end=cleanup)
    async def root(ctx: Context, *, again: bool = True) -> list[Any]:
        if again:
            await ctx.continue_as(root, why="it is long", arguments={"again": False})
        child = await ctx.join(await ctx.spawn(leaf))
        both = await ctx.gather(leaf, [{}, {}])
        enqueued = await leaf.enqueue()
        named = await leaf.options(task_id=f"{ctx.task_id}-mail").enqueue()
        goal = await bot.enqueue("greet")
        with pytest.raises(InvalidArguments, match="tenant must be that of the task"):
            await leaf.options(tenant="other").enqueue()
        with pytest.raises(SpawnRefused, match="tenant must be that of the task"):
            await ctx.spawn(leaf.options(tenant="other"))
        return [ctx.task_id, child, *both, enqueued.id, named.id, goal.id]

    handle = await root.options(tenant="acme").enqueue()
    await work_off(app)
    successor = await handle.successor()
    assert successor is not None
    found = await handle.result(BOUND)
    texts = [one if isinstance(one, str) else one[1] for one in found]
    assert [text.partition("~")[0] for text in texts] == ["acme"] * len(texts)
    assert all(one[0] == "acme" for one in found if isinstance(one, list))
    seen = await redis_command(app, "HGETALL", "{tenants-seen}")
    assert seen and all(text.startswith(b"acme~") for text in seen)


async def test_a_group_and_many_have_the_tenant(app: App) -> None:
    @app.task
    async def double(ctx: Context, number: int) -> list[Any]:
        return [ctx.tenant, number * 2]

    @app.task
    async def total(ctx: Context, found: list[Any]) -> list[Any]:
        return [ctx.tenant, *found]

    group = await double.enqueue_group([{"number": 1}, {"number": 2}], then=total.options(tenant="acme"))
    many = await double.options(tenant="acme").enqueue_many({"number": number} for number in range(3))
    stream = [one async for one in double.options(tenant="acme").enqueue_stream([{"number": 1}])]
    await work_off(app)
    assert await group.result(BOUND) == ["acme", ["acme", 2], ["acme", 4]]
    assert [await one.result(BOUND) for one in (*many, *stream)] == [["acme", n] for n in (0, 2, 4, 2)]


@pytest.mark.parametrize("sealed", [False, True])
async def test_sessions_of_two_tenants_with_one_id_are_two_conversations(
    app: App, settings: Settings, sealed: bool
) -> None:
    if sealed:
        app = App(app.name, settings=settings.model_copy(update={"encryption_keys": SecretStr(generate_key())}))
    async with app:
        await converse(app)


async def converse(app: App) -> None:
    bot = app.agent(Bot)
    acme, other = (app.session(bot.options(tenant=name), "ada") for name in ("acme", "other"))
    turns = [await acme.send("one"), await other.send("two"), await acme.send("three")]
    async with running_worker(app):
        answers = [await turn.result(BOUND) for turn in turns]
    assert answers == ["acme: one", "other: two", "acme: one; acme: three"]
    assert all(
        turn.task_id.startswith(f"{name}~turn-") for turn, name in zip(turns, ("acme", "other", "acme"), strict=True)
    )
    mine = app.producer.for_tenant("acme")
    listed, _ = await list_sessions(mine.gateway, mine.namespace, limit=10)
    assert [record.id for record in listed] == ["acme~ada"]
    everything, _ = await list_sessions(mine.gateway, app.producer.namespace, limit=10)
    assert {record.id for record in everything} == {"acme~ada", "other~ada"}
    assert await acme.forget()
    assert (await other.state()).said == ["other: two"]
    with pytest.raises(ValueError, match="must be of tenant 'acme'"):
        await app.session(bot.options(tenant="acme"), "other~ada").send("mine?")


async def test_memories_of_two_tenants_are_apart(app: App, tmp_path: Path) -> None:
    app.configure(memory=str(tmp_path / "memory.db"))

    @app.task
    async def remember(ctx: Context, text: str) -> list[str]:
        kept = await ctx.memory.add(text, subject="user")
        return [kept.id, kept.owner]

    @app.task
    async def recall(ctx: Context, former: str) -> list[Any]:
        own = [one.memory.text for one in await ctx.memory.profile("user")]
        everyone = [one.memory.text for one in await ctx.memory.search("parcel", subject=None, everyone=True)]
        return [own, everyone, await ctx.memory.touch(former), await ctx.memory.forget(former)]

    kept = [await remember.options(tenant=name).enqueue(f"the parcel of {name}") for name in ("acme", "other")]
    await work_off(app)
    (of_acme, owner), (of_other, _) = [await one.result(BOUND) for one in kept]
    assert owner == "acme~remember"
    found = await recall.options(tenant="acme").enqueue(of_other)
    own = await recall.options(tenant="acme").enqueue(of_acme)
    await work_off(app)
    assert await found.result(BOUND) == [[], ["the parcel of acme"], 0, 0]
    assert (await own.result(BOUND))[2:] == [1, 0]  # of another owner of the tenant: used, and not forgotten


async def test_questions_and_tokens_of_tenants_are_apart(app: App) -> None:
    @app.task
    async def pay(ctx: Context) -> list[Any]:
        return [ctx.tenant, await ctx.wait_for("approval", str, token="order:17")]

    handles = [await pay.options(tenant=name).enqueue() for name in ("acme", "other")]
    async with running_worker(app):
        for handle in handles:
            await wait_until(handle.waits, "the question")
        mine = app.producer.for_tenant("acme")
        waiting = [one.task_id async for one in list_waiting(mine.gateway, [handles[0].partition], tenant="acme")]
        assert waiting == [handles[0].id]
        await mine.answer("order:17", "yes")
        assert await handles[0].result(BOUND) == ["acme", "yes"]
        assert await handles[1].waits()
        await app.producer.for_tenant("other").answer("order:17", "no")
        assert await handles[1].result(BOUND) == ["other", "no"]


async def test_a_replayed_dead_letter_keeps_its_tenant(app: App) -> None:
    from perdure.deadletter.replay import Replay, replay

    runs: list[str | None] = []

    @app.task(retry=Retry(max_attempts=1))
    async def fails(ctx: Context) -> None:
        runs.append(ctx.tenant)
        if len(runs) == 1:
            raise ValueError("no")

    handle = await fails.options(tenant="acme").enqueue()
    async with running_worker(app):
        assert await replay(app.producer.gateway, await letter(app, handle), Replay())
        await handle.result(BOUND)
    assert runs == ["acme", "acme"]


async def test_a_fork_and_an_imported_copy_have_the_tenant_of_their_source(app: App, tmp_path: Path) -> None:
    @app.task
    async def order(ctx: Context, number: int) -> list[Any]:
        return [ctx.tenant, ctx.task_id, number]

    source = await order.options(tenant="acme", task_id="order-17").enqueue(1)
    await work_off(app)
    mine, other = app.producer.for_tenant("acme"), app.producer.for_tenant("other")
    forks = [
        await fork(app.producer, source.id),
        await fork(mine, "order-17", edit={"number": 2}),
        await fork(mine, "order-17", new_id="order-18"),
    ]
    with pytest.raises(TaskNotFound):
        await fork(other, source.id)
    store = await artifact_store(app.producer.gateway, app.settings)
    file = io.BytesIO()
    handle: TaskHandle[Any] = source
    await export_task(mine, handle, store, file, archived=True)
    file.seek(0)
    copy = await import_task(mine, store, file, new_id="copy")
    file.seek(0)
    with pytest.raises(TransferError, match="must keep its tenant"):
        await import_task(other, store, file, new_id="copy")
    file.seek(0)
    with pytest.raises(TransferError, match="must keep its tenant"):
        await import_task(app.producer, store, file, new_id="other~copy")
    assert copy.handle.id == "acme~copy"
    await work_off(app)
    assert [await one.handle.result(BOUND) for one in forks] == [
        ["acme", one.handle.id, number] for one, number in zip(forks, (1, 2, 1), strict=True)
    ]
    assert [one.handle.id.partition("~")[0] for one in forks] == ["acme"] * 3
    assert forks[2].handle.id == "acme~order-18"


def test_the_tenant_is_part_of_what_encrypted_data_is_bound_to() -> None:
    from perdure.queues.keys import Namespace

    encryptor, place = Encryptor([bytes(32)]), Namespace("n").partition("q")
    kind = arguments_field("pay", ())
    sealed = encryptor.of(place, "acme~order-17").encrypt(kind, b'{"amount":7}')
    assert encryptor.of(place, "acme~order-17").decrypt(kind, sealed) == b'{"amount":7}'
    for stolen in ("other~order-17", "order-17"):
        with pytest.raises(TamperedData):
            encryptor.of(place, stolen).decrypt(kind, sealed)
    forged = Envelope.decode(b'{"v":1,"id":"acme~order-17","task":"pay","tenant":"other"}')
    assert forged.tenant == "acme"


async def test_a_caller_cannot_name_the_tasks_of_a_tenant_by_an_id(app: App) -> None:
    @app.task
    async def order(ctx: Context) -> None: ...

    with pytest.raises(ValueError, match="must have no '~'"):
        await order.options(task_id="acme~order-17").enqueue()
    with pytest.raises(ValueError, match="must be of tenant 'acme'"):
        await order.options(task_id="other~order-17", tenant="acme").enqueue()
    with pytest.raises(InvalidArguments, match="tenant must be 1 to 64 letters"):
        order.options(tenant="a b")
    with pytest.raises(ConfigurationError, match="cannot have the option tenant"):
        app.schedule("nightly", order.options(tenant="acme"), Every(60))
    with pytest.raises(ValueError, match="inside tenant 'acme'"):
        await app.producer.for_tenant("acme").enqueue("order", {}, queue=app.name, tenant="other")
    own = await app.producer.for_tenant("acme").enqueue("order", {}, queue=app.name)
    assert own.id.startswith("acme~")
    record = await read_record(app.producer.gateway, own.partition, own.id)
    assert record is not None and record.tenant == "acme"
