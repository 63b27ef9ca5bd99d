"""`perdure limit`: what holds a limit and what waits, changes while it is in use, and who has made them."""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
from perdure import App, Context, Producer, Retry, Settings, TaskFailed
from perdure.queues.envelope import LimitUse
from perdure.queues.limits.definition import Breaker, Limit, key_digest
from perdure.queues.limits.store import LimitStore, Outcome, ReleaseRequest, TakeRequest, token_member
from pydantic import SecretStr

from tests.support.command_line import BOUND, Answer, call
from tests.support.workers import running_worker, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("environment")]

OPENAI = Limit("openai", total=5, running=2, by="tenant", rate="500/m", cost="90_000/m")
CRM = Limit("crm", total=1, breaker=Breaker(errors=0.5, calls=2, window=60, open=30))


async def tool(*args: str) -> Answer:
    return await asyncio.to_thread(call, "limit", *args)


class Fleet:
    """Tokens of tasks that other processes run."""

    def __init__(self, producer: Producer) -> None:
        self.store = LimitStore(producer.gateway, producer.namespace)
        self._partition = producer.namespace.partition("work")

    def member(self, task_id: str) -> str:
        return token_member(self._partition, task_id, "n1")

    async def take(self, limit: Limit, task_id: str, *values: str) -> bool:
        use = LimitUse(limit.name, key_digest(limit.name, list(values) if values else None))
        taken = await self.store.take([TakeRequest(self.member(task_id), [use], labels=[", ".join(values)])])
        return taken.answers[0].granted

    async def end(self, limit: Limit, task_id: str, outcome: Outcome = "", *values: str) -> None:
        use = LimitUse(limit.name, key_digest(limit.name, list(values) if values else None))
        assert not (await self.store.release([ReleaseRequest(self.member(task_id), [use], outcome)])).gone


@pytest.fixture
async def producer(settings: Settings) -> AsyncIterator[Producer]:
    async with Producer(settings.redis_url, namespace=settings.namespace) as producer:
        yield producer


@pytest.fixture
async def fleet(producer: Producer) -> Fleet:
    fleet = Fleet(producer)
    await fleet.store.publish([OPENAI, CRM], "shop", starts=True)
    return fleet


async def test_a_list_shows_numbers_holders_and_state(fleet: Fleet) -> None:
    assert [await fleet.take(OPENAI, f"t{number}", "acme") for number in range(3)] == [True, True, False]
    crm, openai = (await tool("list", "--json")).json
    assert (openai["name"], openai["total"], openai["running"], openai["by"]) == ("openai", 5, 2, "tenant")
    assert (openai["rate"], openai["cost"], openai["in_use"], openai["changed"]) == ("500/m", "90,000/m", 2, [])
    assert (crm["total"], crm["running"], crm["breaker"], crm["held_until"]) == (1, None, "closed", None)
    answer = await tool("list")
    assert answer.code == 0
    [row] = [line.split() for line in answer.out.splitlines() if "openai" in line]
    assert row[:7] == ["openai", "5", "2", "tenant", "500/m", "90,000/m", "2"]


async def test_a_limit_is_shown_with_the_tasks_that_hold_it_and_their_keys(fleet: Fleet) -> None:
    assert await fleet.take(OPENAI, "t1", "acme")
    assert await fleet.take(OPENAI, "t2", "small")
    shown = (await tool("show", "openai", "--json")).json
    holders = {holder["task_id"]: holder for holder in shown["holders"]}
    assert {task_id: holder["key"] for task_id, holder in holders.items()} == {"t1": "acme", "t2": "small"}
    assert {holder["queue"] for holder in holders.values()} == {"work"}
    assert 0 < holders["t1"]["seconds"] <= 30
    answer = await tool("show", "openai")
    assert answer.code == 0
    assert "acme" in answer.out
    assert len((await tool("show", "openai", "--limit", "1", "--json")).json["holders"]) == 1


async def test_numbers_change_at_once_and_return_to_those_of_the_code(fleet: Fleet) -> None:
    shown = (await tool("set", "openai", "running=1", "rate=10/s", "--by", "ada", "--why", "a 429", "--json")).json
    assert (shown["running"], shown["rate"], shown["total"]) == (1, "10/s", 5)
    assert shown["changed"] == ["burst", "interval", "running"]
    assert [await fleet.take(OPENAI, f"t{number}", "acme") for number in range(2)] == [True, False]
    assert "1*" in (await tool("list")).out
    shown = (await tool("set", "openai", "running=none", "--json")).json
    assert (shown["running"], shown["rate"]) == (None, "10/s")
    assert await fleet.take(OPENAI, "t1", "acme")
    shown = (await tool("set", "openai", "running=", "--json")).json
    assert (shown["running"], shown["rate"]) == (2, "10/s")
    shown = (await tool("set", "openai", "--reset", "--by", "bob", "--json")).json
    assert (shown["running"], shown["rate"], shown["changed"]) == (2, "500/m", [])
    newest, *_, oldest = shown["changes"]
    assert (oldest["by"], oldest["what"], oldest["why"]) == ("ada", "set running=1 rate=10/s", "a 429")
    assert (newest["by"], newest["what"]) == ("bob", "reset to the code")


async def test_what_an_operator_has_set_outlives_a_new_definition(fleet: Fleet) -> None:
    assert (await tool("set", "openai", "running=1")).code == 0
    await fleet.store.publish([Limit("openai", total=9, running=3, by="tenant")], "shop", starts=True)
    shown = (await tool("show", "openai", "--json")).json
    assert (shown["total"], shown["running"], shown["rate"]) == (9, 1, None)


async def test_a_total_of_zero_lets_nothing_start(fleet: Fleet) -> None:
    assert (await tool("set", "openai", "total=0")).code == 0
    assert not await fleet.take(OPENAI, "t1", "acme")


async def test_a_limit_without_keys_has_one_number(fleet: Fleet) -> None:
    shown = (await tool("set", "crm", "running=3", "--json")).json
    assert (shown["total"], shown["running"]) == (3, None)
    assert [await fleet.take(CRM, f"t{number}") for number in range(4)] == [True, True, True, False]
    assert "give total" in (await tool("set", "crm", "running=3", "total=3")).err
    assert (await tool("set", "crm", "running=", "--json")).json["total"] == 1
    assert (await tool("set", "crm", "total=5", "--json")).json["total"] == 5
    shown = (await tool("set", "crm", "--reset", "--json")).json
    assert (shown["total"], shown["changed"]) == (1, [])


async def test_an_earlier_time_never_shortens_a_hold(fleet: Fleet) -> None:
    assert await fleet.take(OPENAI, "t1", "acme")
    first = (await tool("hold", "openai", "10m", "--json")).json
    later = (await tool("hold", "openai", "5s", "--json")).json
    assert later["held_until"] == first["held_until"]
    assert later["in_use"] == 1
    assert not await fleet.take(OPENAI, "t2", "acme")
    assert "held 10 min" in (await tool("list")).out
    await fleet.store.hold("openai", 7200)
    assert (await tool("show", "openai", "--json")).json["held_until"] > first["held_until"]
    released = (await tool("release", "openai", "--json")).json
    assert (released["held_until"], released["in_use"]) == (None, 1)
    assert [change["what"] for change in released["changes"]] == ["release", "hold for 5.0 s", "hold for 10 min"]
    assert await fleet.take(OPENAI, "t2", "acme")


async def test_a_breaker_is_shown_open_and_half_open_and_can_be_closed(fleet: Fleet) -> None:
    for number in range(2):
        assert await fleet.take(CRM, f"t{number}")
        await fleet.end(CRM, f"t{number}", "error")
    shown = (await tool("show", "crm", "--json")).json
    assert shown["breaker"] == "open"
    assert shown["open_until"] is not None
    assert "breaker open" in (await tool("list")).out
    assert not await fleet.take(CRM, "t2")
    shown = (await tool("release", "crm", "--json")).json
    assert (shown["breaker"], shown["open_until"]) == ("closed", None)
    assert await fleet.take(CRM, "t2")


async def test_a_breaker_is_changed_and_switched_off(fleet: Fleet) -> None:
    shown = (await tool("set", "openai", "errors=0.2", "--json")).json
    assert (shown["breaker"], shown["changed"]) == ("closed", ["calls", "errors", "open", "window"])
    shown = (await tool("set", "crm", "errors=none", "--json")).json
    assert shown["breaker"] is None


async def test_the_token_of_one_task_is_taken_away(fleet: Fleet) -> None:
    assert await fleet.take(CRM, "frozen")
    assert not await fleet.take(CRM, "next")
    answer = await tool("release", "crm", "--task", "frozen", "--by", "ada")
    assert answer.code == 0
    assert "took crm from task frozen; if it still runs, its worker stops it" in answer.err
    assert await fleet.take(CRM, "next")
    assert (await tool("show", "crm", "--json")).json["changes"][0]["what"] == "release 1 token of task frozen"
    answer = await tool("release", "crm", "--task", "frozen")
    assert (answer.code, answer.out) == (1, "")
    assert "task 'frozen' does not hold limit 'crm'" in answer.err


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (("set", "openai"), "give either settings, such as running=3 rate=100/m, or --reset"),
        (("set", "openai", "running=1", "--reset"), "give either settings"),
        (("set", "openai", "runing=1"), "runing must be one of total, running"),
        (("set", "openai", "running"), "a setting must be NAME=VALUE, such as running=3, got 'running'"),
        (("set", "openai", "running=1", "running=2"), "running must be given once"),
        (("set", "openai", "running=x"), "or none, got 'x'\n"),
        (("set", "openai", "running=-1"), "running must be a whole number from 0 to 1,000,000, or none, got '-1'"),
        (("set", "openai", "running=9"), "running of limit 'openai' must be at most total, got 9 of 5"),
        (("set", "openai", "total=1"), "running of limit 'openai' must be at most total, got 2 of 1"),
        (("set", "openai", "rate=fast"), "rate must be such as '500/m'"),
        (("set", "openai", "errors=2"), "errors must be a share, more than 0 and at most 1, or none, got '2'"),
        (("set", "crm", "burst=3"), "burst of limit 'crm' must go with a rate: set rate as well"),
        (("hold", "openai", "0"), "greater than 0"),
        (("show", "no spaces"), "limit must be 1 to 64 letters"),
    ],
)
async def test_a_wrong_setting_is_misuse_and_changes_nothing(fleet: Fleet, args: tuple[str, ...], problem: str) -> None:
    answer = await tool(*args)
    assert (answer.code, answer.out) == (2, "")
    assert problem in answer.err
    assert all(not row["changed"] for row in (await tool("list", "--json")).json)


@pytest.mark.parametrize("args", [("show", "opneai"), ("set", "opneai", "total=1"), ("hold", "opneai", "9")])
async def test_an_unknown_limit_is_refused_with_a_similar_one(fleet: Fleet, args: tuple[str, ...]) -> None:
    answer = await tool(*args)
    assert (answer.code, answer.out) == (1, "")
    assert "no worker has published a limit 'opneai'" in answer.err
    assert "did you mean 'openai'?" in answer.err


async def test_a_namespace_without_limits_has_an_empty_list() -> None:
    answer = await tool("list")
    assert (answer.code, answer.out) == (0, "")
    assert "no worker has published a limit in namespace" in answer.err
    assert (await tool("list", "--json")).json == []
    assert "start a worker of its app" in (await tool("show", "openai")).err


async def test_what_another_program_wrote_hides_no_other_limit(fleet: Fleet, producer: Producer) -> None:
    keys = producer.namespace.limits
    await producer.gateway.command("SET", keys.holders("crm"), "foreign", "PX", 60_000)
    await producer.gateway.command("ZADD", keys.names, 1, "no name", 2, "gone")
    await producer.gateway.command("HSET", keys.limit("openai"), "burst", "many", "total", "x", "hold", "soon")
    crm, openai = (await tool("list", "--json")).json
    assert (crm["name"], openai["name"]) == ("crm", "openai")
    assert "another program wrote a key of it" in crm["problem"]
    assert (openai["rate"], openai["total"], openai["held_until"]) == (None, None, None)
    answer = await tool("list")
    assert (answer.code, "limit crm: " in answer.err) == (0, True)
    assert (await tool("show", "crm")).code == 1
    assert (await tool("show", "openai")).code == 0
    await producer.gateway.command("DEL", keys.holders("crm"))


async def test_of_two_operators_the_second_one_does_not_undo_the_first(fleet: Fleet) -> None:
    answers = await asyncio.gather(*(tool("set", "openai", f"{name}=2") for name in ("total", "running", "burst")))
    assert {answer.code for answer in answers} == {0}
    assert (await tool("show", "openai", "--json")).json["changed"] == ["burst", "running", "total"]


async def test_metrics_show_what_holds_a_limit_and_whether_it_is_stopped(fleet: Fleet, namespace_name: str) -> None:
    assert await fleet.take(OPENAI, "t1", "acme")
    assert (await tool("hold", "openai", "60")).code == 0
    out = (await asyncio.to_thread(call, "queue", "metrics")).out
    for limit, held, stopped in (("openai", 1, 1), ("crm", 0, 0)):
        labels = f'{{limit="{limit}",namespace="{namespace_name}"}}'
        assert f"perdure_limit_in_use{labels} {held}.0" in out
        assert f"perdure_limit_waiting{labels} 0.0" in out
        assert f"perdure_limit_stopped{labels} {stopped}.0" in out


# with tasks and workers


class Crawl:
    """An app whose tasks run until they are let go."""

    def __init__(self, settings: Settings) -> None:
        self.app = App("crawl", settings=settings)
        self.go = asyncio.Event()
        pages = self.app.limit("pages", total=2, running=1, by=("tenant", "part"))
        session = self.app.limit("session", running=1, by="tenant", ordered=True)

        @self.app.task(limits=[pages])
        async def fetch(ctx: Context, tenant: str, part: int = 1) -> str:
            await self.go.wait()
            return tenant

        @self.app.task(limits=[session])
        async def reply(ctx: Context, tenant: str) -> None:
            await self.go.wait()

        self.fetch, self.reply = fetch, reply

    async def held(self, count: int, limit: str = "pages") -> Any:
        """Wait until so many tasks hold the limit; return what is shown then."""
        shown: Any = None

        async def is_held() -> bool:
            nonlocal shown
            answer = await tool("show", limit, "--json")
            shown = answer.json if answer.code == 0 else None
            return shown is not None and shown["in_use"] == count

        await wait_until(is_held, f"{count} tasks hold {limit}")
        return shown


@pytest.fixture
async def crawl(settings: Settings) -> AsyncIterator[Crawl]:
    crawl = Crawl(settings)
    async with crawl.app, running_worker(crawl.app):
        yield crawl
        crawl.go.set()


async def test_what_waits_is_counted_and_its_keys_are_named(crawl: Crawl) -> None:
    handles = await crawl.fetch.enqueue_many([{"tenant": "acme"}] * 3 + [{"tenant": "small"}])
    await crawl.held(2)
    handles.append(await crawl.fetch.enqueue("third"))
    shown = await crawl.held(2)
    assert {holder["key"] for holder in shown["holders"]} == {"acme, 1", "small, 1"}
    assert (shown["waiting"], shown["waiting_by_queue"]) == (3, {"crawl": 3})
    waiting = {key["key"]: key for key in shown["waiting_keys"]}
    assert {key: row["tasks"] for key, row in waiting.items()} == {"acme, 1": 2, "third, 1": 1}
    assert waiting["acme, 1"]["first"] == handles[1].id
    assert waiting["third, 1"]["limits"] == ["pages"]
    [row] = [line.split() for line in (await tool("list")).out.splitlines() if line.startswith("pages")]
    assert row[-3:] == ["2", "3", "-"]
    crawl.go.set()
    assert [await handle.result(BOUND) for handle in handles] == ["acme", "acme", "acme", "small", "third"]


async def test_a_raised_number_and_a_release_start_what_waits_at_once(crawl: Crawl) -> None:
    await crawl.held(0)
    assert (await tool("hold", "pages", "1h")).code == 0
    handles = await crawl.fetch.enqueue_many({"tenant": f"t{number}"} for number in range(4))
    assert (await tool("release", "pages", "--json")).json["in_use"] == 2
    assert (await tool("set", "pages", "total=4", "--json")).json["in_use"] == 4
    crawl.go.set()
    assert [await handle.result(BOUND) for handle in handles] == ["t0", "t1", "t2", "t3"]


async def test_tasks_of_an_ordered_key_that_run_do_not_count_as_waiting(crawl: Crawl) -> None:
    handles = await crawl.reply.enqueue_many([{"tenant": "acme"}] * 3)
    shown = await crawl.held(1, "session")
    assert shown["holders"][0]["task_id"] == handles[0].id
    [key] = shown["waiting_keys"]
    assert (key["tasks"], key["first"], key["key"]) == (2, handles[1].id, "acme")
    crawl.go.set()
    for handle in handles:
        await handle.result(BOUND)


async def test_keys_of_encrypted_tasks_are_shown_to_those_who_have_the_key(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = base64.b64encode(b"k" * 32).decode()
    crawl = Crawl(settings.model_copy(update={"encryption_keys": SecretStr(key)}))
    async with crawl.app, running_worker(crawl.app):
        handle = await crawl.fetch.enqueue("acme")
        digest = (await crawl.held(1))["holders"][0]["key"]
        assert re.fullmatch("[0-9a-f]{16}", digest)
        monkeypatch.setenv("PERDURE_ENCRYPTION_KEYS", key)
        assert (await crawl.held(1))["holders"][0]["key"] == "acme, 1"
        crawl.go.set()
        await handle.result(BOUND)


async def test_a_breaker_that_opens_and_closes_is_logged_and_noted(settings: Settings, log: list[str]) -> None:
    app = App("calls", settings=settings)
    crm = app.limit("crm", total=1, breaker=Breaker(errors=0.5, calls=2, window=60, open=0.2))
    down = True

    @app.task(limits=[crm], retry=Retry(max_attempts=1))
    async def calls(ctx: Context) -> None:
        if down:
            raise OSError("down")

    async with app, running_worker(app):
        for _ in range(2):
            with pytest.raises(TaskFailed):
                await (await calls.enqueue()).result(BOUND)

        async def what() -> list[str]:
            answer = await tool("show", "crm", "--json")
            return [change["what"] for change in answer.json["changes"]]

        async def is_noted() -> bool:
            return await what() == ["breaker opened: 2 of 2 calls failed"]

        await wait_until(is_noted, "the note of the open breaker")
        down = False
        await (await calls.enqueue()).result(BOUND)

        async def is_closed() -> bool:
            return (await what())[0] == "breaker closed: its probe succeeded"

        await wait_until(is_closed, "the note of the closed breaker")
    assert any(line.startswith("limit crm opened: 2 of 2 calls have failed") for line in log)
    assert any(line.startswith("limit crm closed") for line in log)
