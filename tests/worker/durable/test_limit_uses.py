"""Uses of limits: each way to enqueue a task says in its envelope which tokens it needs, or stores nothing."""

from __future__ import annotations

from typing import Any

import pytest
from perdure import App, Context, Every, InvalidArguments, Limit, Producer, Rate, SyncContext, TaskHandle, Unique
from perdure.queues.catalog import CatalogTask, read_catalog
from perdure.queues.envelope import Envelope, EnvelopeTemplate, LimitUse
from perdure.queues.errors import CatalogError, ConfigurationError, InvalidLimitUse
from perdure.queues.limits.definition import key_digest
from perdure.queues.limits.store import LimitStore
from perdure.worker.errors import TaskDefinitionError
from perdure.worker.middleware import CallNext, EnqueueCall, Middleware
from pydantic import BaseModel, SecretStr

from tests.support.workers import BOUND, redis_command, running_worker, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.app("shop")]


class Order(BaseModel):
    number: int
    note: str = ""


def use(*values: Any, cost: int = 1, flags: str = "", name: str = "openai") -> LimitUse:
    return LimitUse(name, key_digest(name, values or None), cost, flags)


async def envelope(app: App, handle: TaskHandle[Any]) -> Envelope:
    return Envelope.decode(await redis_command(app, "HGET", handle.partition.record(handle.id), "env"))


async def uses(app: App, handle: TaskHandle[Any]) -> list[LimitUse]:
    return list((await envelope(app, handle)).limits)


# declaration


def test_a_task_takes_only_limits_that_fit_its_arguments() -> None:
    app = App("shop")
    limits = [app.limit(name, total=1) for name in "abcde"]

    def declare(*given: Any, limits: Any = None) -> None:
        @app.task(name="pay", limits=list(given) if limits is None else limits)
        async def pay(ctx: Context, tenant: str, token: SecretStr | None = None) -> None: ...

    for given, problem in (
        ((app.limit("f", by="tenan"),), "key of limit 'f': 'tenan' must be an argument; there are tenant, token"),
        (limits, "a task must have at most 4 limits, got 5"),
        ((limits[0], limits[0]), "a task must have each limit once, got a twice"),
        (("openai",), "limits must be limits of app.limit"),
    ):
        with pytest.raises(TaskDefinitionError, match=f"^task 'pay': {problem}"):
            declare(*given)
    with pytest.raises(TaskDefinitionError, match="task 'pay': limits must be a list of limits"):
        declare(limits=limits[0])
    with pytest.raises(ConfigurationError, match="app 'shop' has a limit 'a' already: use it, or another name"):
        app.limit("a", total=2)
    with pytest.raises(ValueError, match="running must be at most total"):
        app.limit("g", by="tenant", total=1, running=2)
    assert "g" not in app.limits
    declare(*limits[:4])


async def test_a_key_or_cost_that_does_not_fit_is_one_sentence_and_nothing_is_stored(app: App) -> None:
    openai = app.limit("openai", by="tenant", cost="100/m")
    named = app.limit("named", by=lambda args: args["order"]["name"])
    secret = app.limit("secret", by="token")

    @app.task(limits=[openai])
    async def pay(ctx: Context, tenant: Any = ("default",)) -> None: ...

    @app.task(limits=[named])
    async def ship(ctx: Context, order: Any) -> None: ...

    @app.task(limits=[secret])
    async def log_in(ctx: Context, token: SecretStr) -> None: ...

    @app.task
    async def plain(ctx: Context) -> None: ...

    bad = "task 'pay': key of limit 'openai': 'tenant' must be a text, a number, true, false or null, got list"
    with pytest.raises(InvalidLimitUse, match=bad):
        await pay.enqueue()
    with pytest.raises(InvalidLimitUse, match="got list"):
        await pay.enqueue_many([{"tenant": "a"}, {"tenant": [1]}])
    with pytest.raises(InvalidLimitUse, match="limit 'named': could not be made by its function: KeyError: 'name'"):
        await ship.enqueue({"number": 1})
    with pytest.raises(InvalidLimitUse, match=r"limit 'named': what its function returns must be a text.*got dict"):
        await ship.enqueue({"name": {}})
    with pytest.raises(InvalidLimitUse, match="'token' must not be a secret: name other arguments in by="):
        await log_in.enqueue(SecretStr("x"))
    with pytest.raises(InvalidLimitUse, match="must be at most its burst, 100 of 100/m, got 101"):
        pay.options(costs={"openai": 101})
    with pytest.raises(InvalidLimitUse, match="costs must name limits of the task, openai; got 'other'"):
        pay.options(costs={"other": 1})
    with pytest.raises(InvalidLimitUse, match="limit 'named' has no cost: define it with"):
        ship.options(costs={"named": 1})
    with pytest.raises(InvalidArguments, match="costs must name limits of the task, and it has none"):
        plain.options(costs={"openai": 1})
    with pytest.raises(InvalidArguments, match="costs must be a dict by the names of limits, got 5"):
        pay.options(costs=5)  # type: ignore[arg-type]
    assert await redis_command(app, "KEYS", f"{{{app.settings.namespace}:*:record:*") == []


# calls


async def test_each_call_of_a_task_says_what_it_needs(app: App) -> None:
    openai = app.limit("openai", by=["tenant", "region"], cost="90_000/m")
    session = app.limit("session", total=1, ordered=True, while_parked=True)
    named = app.limit("named", by=lambda args: (args["order"]["number"], "x"), running=1, over="drop")

    @app.task(limits=[session, openai.costs(1200)])
    async def pay(ctx: Context, tenant: str, region: str = "eu") -> None: ...

    @app.task(limits=[named])
    async def ship(ctx: Context, order: Order) -> None: ...

    serial = use(name="session", flags="op")
    assert await uses(app, await pay.enqueue("a")) == [use("a", "eu", cost=1200), serial]
    assert await uses(app, await pay.enqueue(tenant="a", region="us")) == [use("a", "us", cost=1200), serial]
    cheap = pay.options(costs={"openai": 0}, tags=["x"])
    assert await uses(app, await cheap.enqueue("a")) == [use("a", "eu", cost=0), serial]
    many = await cheap.enqueue_many([{"tenant": "a"}, {"tenant": "b"}])
    assert [await uses(app, each) for each in many] == [[use(name, "eu", cost=0), serial] for name in "ab"]
    streamed = [handle async for handle in pay.enqueue_stream([{"tenant": "c"}])]
    assert await uses(app, streamed[0]) == [use("c", "eu", cost=1200), serial]
    assert await uses(app, await ship.enqueue(Order(number=7))) == [use(7, "x", name="named", flags="d")]
    other = pay.options(unique=Unique(by="tenant"), delay=60, task_id="own")
    assert await uses(app, await other.enqueue("z")) == [use("z", "eu", cost=1200), serial]
    assert (await other.enqueue("z")).existed
    assert (await envelope(app, await other.enqueue("z"))).unique is not None


async def test_a_hook_sees_the_costs_and_keeps_the_uses(settings: Any) -> None:
    seen: list[Any] = []

    class Tracing(Middleware):
        async def enqueue(self, call: EnqueueCall, call_next: CallNext) -> Any:
            seen.append(call.options.get("costs"))
            call.headers["trace"] = "1"
            return await call_next()

    app = App("shop", settings=settings, middleware=[Tracing()])
    openai = app.limit("openai", by="tenant", cost="90_000/m")

    @app.task(limits=[openai])
    async def pay(ctx: Context, tenant: str) -> None: ...

    async with app:
        handle = await pay.options(costs={"openai": 5}).enqueue("a")
        assert await uses(app, handle) == [use("a", cost=5)]
        assert (await envelope(app, handle)).headers == {"trace": "1"}
    assert seen == [{"openai": 5}]


async def test_a_task_without_limits_has_a_plain_envelope(app: App) -> None:
    @app.task
    async def plain(ctx: Context) -> None: ...

    handle = await plain.enqueue()
    assert await redis_command(app, "HGET", handle.partition.record(handle.id), "env") is None


# children and successors


async def test_children_groups_and_successors_have_the_limits_of_their_tasks(app: App) -> None:
    openai = app.limit("openai", by="tenant", cost="90_000/m", total=50)

    @app.task(limits=[openai.costs(3)])
    async def pay(ctx: Context, tenant: str) -> str:
        return tenant

    @app.task(limits=[openai])
    async def total(ctx: Context, paid: list[str], tenant: str) -> str:
        return f"{paid} {tenant}"

    @app.task
    async def shop(ctx: Context) -> str:
        child = await ctx.spawn(pay.options(costs={"openai": 9}), "a")
        await child.result()
        return child.id

    @app.task(limits=[openai])
    async def moves(ctx: Context, tenant: str) -> None:
        await ctx.continue_as(pay, why="done", arguments={"tenant": "b"})

    @app.task
    def threaded(ctx: SyncContext) -> str:
        return pay.enqueue_sync("c").id

    async with running_worker(app):
        child = await (await shop.enqueue()).result(BOUND)
        found = await app.producer.find(child)
        assert found is not None
        assert await uses(app, found) == [use("a", cost=9)]
        group = await pay.enqueue_group(["x", "y"], then=total, tenant="z")
        assert await uses(app, group) == [use("z")]
        assert await group.result(BOUND) == "['x', 'y'] z"
        moved = await moves.enqueue("a")
        following = f"{moved.id}.h1"
        await wait_until(lambda: app.producer.find(following), "the successor is stored")
        successor = await app.producer.find(following)
        assert successor is not None
        assert await uses(app, successor) == [use("b", cost=3)]
        assert await successor.result(BOUND) == "b"
        own = await app.producer.find(await (await threaded.enqueue()).result(BOUND))
        assert own is not None
        assert await uses(app, own) == [use("c", cost=3)]
        assert await own.result(BOUND) == "c"


async def test_an_ordering_key_beside_an_ordered_limit_is_refused(app: App) -> None:
    session = app.limit("session", running=1, by="tenant", ordered=True)
    plain = app.limit("plain", total=5, by="tenant")

    @app.task(limits=[session])
    async def reply(ctx: Context, tenant: str) -> None: ...

    @app.task(limits=[plain])
    async def note(ctx: Context, tenant: str) -> None: ...

    problem = "task 'reply': key must not be given beside limit 'session', which is ordered, got 'k'"
    with pytest.raises(InvalidLimitUse, match=problem):
        await reply.options(key="k").enqueue("a")
    with pytest.raises(InvalidLimitUse, match=problem):
        await reply.options(key="k").enqueue_many([{"tenant": "a"}])
    with pytest.raises(InvalidLimitUse, match=problem):
        app.schedule("nightly", reply.options(key="k"), Every(60), args={"tenant": "a"})
    published = CatalogTask("reply", "shop", limits=reply.limits.published() if reply.limits else None)
    message = EnvelopeTemplate("reply").message(b'{"tenant":"a"}', key="k")
    with pytest.raises(InvalidLimitUse, match=problem):
        published.limited(message)
    assert await uses(app, await reply.options(task_id="own").enqueue("key")) == [use("key", name="session", flags="o")]
    assert await uses(app, await note.options(key="k").enqueue("a")) == [use("a", name="plain")]


# producers that know the catalog only


async def test_an_untyped_producer_obeys_published_limits(app: App) -> None:
    openai = app.limit("openai", by=("tenant", "region"), cost=Rate(90_000, per=60, burst=2_000), total=50)
    session = app.limit("session", total=50, ordered=True)
    named = app.limit("named", by=lambda args: args["order"])

    @app.task(limits=[openai.costs(1200), session])
    async def pay(ctx: Context, tenant: str, region: str = "eu") -> str:
        return ctx.task_id

    @app.task(limits=[named])
    async def ship(ctx: Context, order: int) -> None: ...

    @app.task
    async def total(ctx: Context, paid: list[str], tenant: str = "x") -> str:
        return paid[0]

    async with running_worker(app), Producer(app.settings.redis_url, namespace=app.settings.namespace) as producer:

        async def is_published() -> bool:
            return bool((await read_catalog(app.producer.gateway, app.producer.namespace)).tasks)

        await wait_until(is_published, "the tasks are published")
        serial = use(name="session", flags="o")
        same = [use("a", "eu", cost=1200), serial]
        assert await uses(app, await pay.enqueue("a")) == same
        assert await uses(app, await producer.enqueue("pay", {"tenant": "a"})) == same
        cheap = await producer.enqueue("pay", {"tenant": "a"}, costs={"openai": 7})
        assert await uses(app, cheap) == [use("a", "eu", cost=7), serial]
        [many] = await producer.enqueue_many("pay", [{"tenant": "a", "region": "us"}])
        assert await uses(app, many) == [use("a", "us", cost=1200), serial]
        streamed = [handle async for handle in producer.enqueue_stream("pay", [{"tenant": "a"}])]
        assert await uses(app, streamed[0]) == same
        group = await producer.enqueue_group("pay", [{"tenant": "a"}], then="total")
        child = await producer.find(await group.result(BOUND))
        assert child is not None
        assert await uses(app, child) == same
        for args, costs, problem in (
            ({"tenant": "a"}, {"openai": 2_001}, "a cost of limit 'openai' must be at most its burst, 2,000"),
            ({"tenant": "a"}, {"other": 1}, "costs must name limits of the task, openai, session; got 'other'"),
        ):
            with pytest.raises(InvalidLimitUse, match=problem):
                await producer.enqueue("pay", args, costs=costs)
        with pytest.raises(CatalogError, match="has limit 'named' by a function of app 'shop', which only that"):
            await producer.enqueue("ship", {"order": 1})
        with pytest.raises(CatalogError, match="task 'total' has no limits, got costs of openai"):
            await producer.enqueue("total", {"paid": []}, costs={"openai": 1})
        with pytest.raises(ValueError, match="costs must be without queue"):
            await producer.enqueue("pay", {"tenant": "a"}, queue="shop", costs={"openai": 1})


@pytest.mark.parametrize(
    "published", [{"limits": [{}]}, {"limits": [7]}, {"limits": 5}, {"a": 1}, [1], {"limits": [{"name": "a:b"}]}]
)
async def test_published_limits_that_are_none_are_one_sentence(published: Any) -> None:
    with pytest.raises(CatalogError, match="could not read the limits of task 'pay'"):
        CatalogTask("pay", "shop", limits=published).task_limits()


# definitions


async def test_a_worker_publishes_the_limits_of_its_app_before_it_reads(app: App) -> None:
    openai = app.limit("openai", total=3)

    @app.task(limits=[openai])
    async def pay(ctx: Context) -> int:
        return 5

    handle = await pay.enqueue()
    store = LimitStore(app.producer.gateway, app.producer.namespace)
    assert await store.names() == []
    async with running_worker(app):
        (view,) = await store.read(["openai"])
        assert (view.defined["total"], view.defined["app"]) == ("3", "shop")
        assert await handle.result(BOUND) == 5


async def test_an_app_holds_a_limit_from_async_and_from_plain_code(app: App) -> None:
    openai = app.limit("openai", total=3)

    @app.task
    async def limits(ctx: Context) -> None:
        await openai.hold(50)

    @app.task
    def threaded(ctx: SyncContext) -> None:
        openai.hold_sync(500)

    store = LimitStore(app.producer.gateway, app.producer.namespace)

    async def left() -> float:
        (view,) = await store.read(["openai"])
        return (int(view.defined["hold"]) - view.now) / 1000

    await openai.hold(5)
    assert 0 < await left() <= 5
    async with running_worker(app):
        await (await limits.enqueue()).result(BOUND)
        assert 5 < await left() <= 50
        await (await threaded.enqueue()).result(BOUND)
        assert 50 < await left() <= 500


async def test_two_apps_that_differ_are_logged_once(app: App) -> None:
    first = Limit("openai", total=3)
    await LimitStore(app.producer.gateway, app.producer.namespace).publish([first], "other", starts=True)
    app.limit("openai", total=4)

    @app.task
    async def plain(ctx: Context) -> int:
        return 1

    handle = await plain.enqueue()
    async with running_worker(app):
        await handle.result(BOUND)
        (view,) = await LimitStore(app.producer.gateway, app.producer.namespace).read(["openai"])
        assert (view.defined["total"], view.defined["app"]) == ("4", "shop")
