"""States of the past, comparison with the stored snapshot, and forks."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar

import orjson
import pytest
from perdure import Agent, AgentState, App, Context, Ephemeral, PlanStep, Retry, Settings, TaskHandle
from perdure.queues import TaskEvent, TaskExists, set_partitions
from perdure.queues.inspection.views import checkpoint_fields
from perdure.queues.transport.large_results import recorded_results
from perdure.worker.agents.journal import forks
from perdure.worker.agents.journal.agent_events import Changed
from perdure.worker.agents.journal.forks import BadEdit, fork
from perdure.worker.agents.journal.history import PastState, check_state, read_snapshot, state_at
from perdure.worker.agents.journal.json_patch import diff
from perdure.worker.errors import BadHistory, StateError
from pydantic import SecretStr

from tests.support.command_line import Answer, call
from tests.support.stored_data import FIRST, everything, with_keys
from tests.support.workers import bounded, history, recorded_steps, redis_command, take_and_die, work_off

pytestmark = [pytest.mark.integration, pytest.mark.app(check_state=True)]


class Notes(AgentState):
    mood: str = "fresh"
    seen: list[str] = []  # noqa: RUF012 - pydantic copies it


class Reader(Agent[Notes]):
    """Agent that reads pages and pays for each page once."""

    snapshot_every: ClassVar[int] = 6
    paid: ClassVar[list[str]] = []

    async def plan(self, ctx: Context, state: Notes) -> list[PlanStep]:
        return [PlanStep(key=key, title=f"read {key}") for key in ("one", "two", "three")]

    async def act(self, ctx: Context, state: Notes, step: PlanStep) -> str:
        async def pay() -> str:
            self.paid.append(f"{ctx.task_id}:{step.key}")
            return step.key.upper()

        found: str = await ctx.tool("fetch", pay)
        await ctx.discover(found, source=step.key)
        state.seen.append(step.key)
        state.mood = f"after {step.key}"
        return found

    async def finish(self, ctx: Context, state: Notes) -> dict[str, Any]:
        return {"goal": state.goal, "seen": state.seen, "results": state.results, "mood": state.mood}


async def read_all(app: App) -> TaskHandle[Any]:
    """Run an agent to its end."""
    Reader.paid.clear()
    handle: TaskHandle[Any] = await app.agent(name="read")(Reader).enqueue("learn")
    await work_off(app)
    await bounded(handle.result())
    return handle


def place(app: App, handle: TaskHandle[Any]) -> tuple[Any, Any, str]:
    return app.producer.gateway, handle.partition, handle.id


async def numbered(handle: TaskHandle[Any]) -> dict[int, Any]:
    return {event.number: event for event in await history(handle) if event.number is not None}


async def cli(app: App, *args: str) -> Answer:
    where = ("--redis-url", app.settings.redis_url or "", "--namespace", app.settings.namespace)
    return await asyncio.to_thread(call, "task", *args, *where)


async def test_the_state_at_every_event_can_be_read(app: App) -> None:
    handle = await read_all(app)
    past = [await state_at(*place(app, handle), number) for number in range(len(await numbered(handle)) + 1)]
    moods = [one.state.get("mood") for one in past]
    assert [mood for mood, before in zip(moods, [None, *moods], strict=False) if mood != before] == [
        "fresh",
        "after one",
        "after two",
        "after three",
    ]
    assert [len(one.state["discoveries"]) for one in past] == sorted(len(one.state["discoveries"]) for one in past)
    assert (past[-1].agent, past[-1].state["seen"]) == ("read", ["one", "two", "three"])
    assert past[0].state == (await state_at(*place(app, handle), 0)).state
    with pytest.raises(BadHistory, match=f"task {handle.id} has no event 99: the last one is {len(past) - 1}"):
        await state_at(*place(app, handle), 99)


async def test_the_snapshot_equals_the_reduction_of_the_log(app: App) -> None:
    handle = await read_all(app)
    stored = await check_state(*place(app, handle))
    assert stored is not None
    assert stored.number > 0


async def test_values_that_are_not_json_are_logged_as_the_live_state_has_them(app: App) -> None:
    class Dated(Reader):
        snapshot_every: ClassVar[int] = 1

        async def act(self, ctx: Context, state: Notes, step: PlanStep) -> str:
            when = datetime(2026, 1, 2, tzinfo=UTC)
            await ctx.record_event(Changed(changes=({"op": "add", "path": "/context/when", "value": [when, (1, 2)]},)))
            return str(state.context["when"])

    handle: TaskHandle[Any] = await app.agent(name="dated")(Dated).enqueue("learn")
    await work_off(app)
    shown = "['2026-01-02T00:00:00Z', [1, 2]]"
    assert (await bounded(handle.result()))["results"] == {"one": shown, "two": shown, "three": shown}
    assert await check_state(*place(app, handle)) is not None


def test_a_fresh_replay_resets_the_state() -> None:
    past = PastState("t")
    entries: list[tuple[str, dict[str, Any], int | None]] = [
        ("started", {"goal": "one", "agent": "a"}, 1),
        ("replayed", {"fresh": False}, None),
        ("decided", {"choice": "left"}, 2),
        ("replayed", {"fresh": True}, None),
        ("discovered", {"fact": "a wall"}, 3),
    ]
    for position, (kind, data, number) in enumerate(entries):
        past.apply(TaskEvent(f"{position}-0", position, kind, None, data, number))
        if position == 2:
            assert (past.state["goal"], len(past.state["decisions"]), past.agent) == ("one", 1, "a")
    assert (past.state["goal"], past.state["decisions"], past.agent) == ("", [], None)
    assert [one["n"] for one in past.state["discoveries"]] == [3]


async def tamper(app: App, handle: TaskHandle[Any], **fields: Any) -> None:
    """Change the stored snapshot without an event."""
    steps = handle.partition.steps(handle.id)
    stored = orjson.loads(await redis_command(app, "HGET", steps, "s:#state"))
    stored["state"] |= fields
    await redis_command(app, "HSET", steps, "s:#state", orjson.dumps(stored))


async def test_state_drift_names_the_first_event_that_differs(app: App) -> None:
    handle = await read_all(app)
    stored = await read_snapshot(*place(app, handle))
    assert stored is not None
    found = [await state_at(*place(app, handle), number) for number in range(stored.number + 1)]
    second = next(one.number for one in found if len(one.state["discoveries"]) == 2)
    await tamper(app, handle, discoveries=found[second - 1].state["discoveries"])
    with pytest.raises(StateError, match=rf"task {handle.id} .* since event {second}: /discoveries"):
        await check_state(*place(app, handle))
    await tamper(app, handle, discoveries=stored.state["discoveries"], mood="never so")
    with pytest.raises(StateError, match=rf"since event {stored.number}: /mood"):
        await check_state(*place(app, handle))
    await tamper(app, handle, discoveries=stored.state["discoveries"], mood=stored.state.get("mood"), goal="")
    first = next(one.number for one in found if one.state["goal"])
    with pytest.raises(StateError, match=rf"since event {first}: /goal"):
        await check_state(*place(app, handle))


async def spoil(app: App, handle: TaskHandle[Any], number: int, data: bytes | None) -> None:
    """Break or remove one entry of the log. The log is written again, since entries cannot be changed."""
    log = handle.partition.log(handle.id)
    entries = await redis_command(app, "XRANGE", log, "-", "+")
    await redis_command(app, "DEL", log)
    for entry, fields in entries:
        kept = list(fields)
        if kept[2:4] == [b"n", b"%d" % number]:
            if data is None:
                continue
            kept[5] = data
        await redis_command(app, "XADD", log, entry, *kept)
    await redis_command(app, "PEXPIRE", log, 60_000)


@pytest.mark.parametrize("data", [b"{", b'{"v":9}', None], ids=["truncated", "of a later version", "missing"])
async def test_a_broken_event_is_named_unless_lenient(app: App, data: bytes | None) -> None:
    handle = await read_all(app)
    last = len(await numbered(handle))
    broken = next(number for number, event in (await numbered(handle)).items() if event.type == "discovered")
    await spoil(app, handle, broken, data)
    with pytest.raises(BadHistory, match=f"event {broken} .*task {handle.id}") as refused:
        await state_at(*place(app, handle))
    assert refused.value.task_id == handle.id
    assert (await state_at(*place(app, handle), broken - 1)).number == broken - 1
    past = await state_at(*place(app, handle), lenient=True)
    assert (past.number, len(past.state["discoveries"]), len(past.skipped)) == (last, 2, 1)
    for options in ((), ("--check",), ("--at", str(last))):
        answer = await cli(app, "state", handle.id, *options)
        assert (answer.code, answer.out, answer.err.count("\n")) == (1, "", 1)
        assert f"event {broken} " in answer.err
        if data is None:
            assert "unknown: ask for an earlier one with --at, or leave out what is missing" in answer.err
    shown = await cli(app, "state", handle.id, "--skip-unreadable", "--json")
    assert (shown.json["event"], shown.json["state"]["mood"]) == (last, "after three")
    assert "skipped: " in shown.err


async def test_the_command_shows_past_states(app: App) -> None:
    handle = await read_all(app)
    last = len(await numbered(handle))
    first = next(number for number, event in (await numbered(handle)).items() if event.type == "step_completed")
    assert (await cli(app, "state", handle.id, "--at", str(first), "--json")).json["state"]["seen"] == ["one"]
    shown = (await cli(app, "state", handle.id, "--at", str(first))).out
    for text in (f"event        {first}", "[done] one: read one", "[pending] two: read two", "ONE [one]", "after one"):
        assert text in shown
    changes = (await cli(app, "state", handle.id, "--diff", str(first), str(last), "--json")).json["changes"]
    states = [(await state_at(*place(app, handle), number)).state for number in (first, last)]
    assert changes == orjson.loads(orjson.dumps(diff(*states)))
    assert "replace /mood after three" in (await cli(app, "state", handle.id, "--diff", str(first), str(last))).out
    assert (await cli(app, "state", handle.id, "--check")).code == 0
    await tamper(app, handle, mood="never so")
    drifted = await cli(app, "state", handle.id, "--check")
    assert (drifted.code, drifted.out) == (1, "")
    assert "differs from its event log since event" in drifted.err
    for options in (("--at", "1", "--check"), ("--check", "--skip-unreadable"), ("--at", "x"), ("--at", "-1")):
        assert (await cli(app, "state", handle.id, *options)).code == 2


# forks


async def test_a_fork_of_an_agent_continues_from_that_state(app: App) -> None:
    handle = await read_all(app)
    first = next(number for number, event in (await numbered(handle)).items() if event.type == "step_completed")
    Reader.paid.clear()
    forked = await fork(app.producer, handle.id, at=first, edit={"goal": "be brief", "mood": "edited"})
    assert (forked.event, forked.agent, forked.within) == (first, "read", None)
    await work_off(app)
    assert await bounded(forked.handle.result()) == {
        "goal": "be brief",
        "seen": ["one", "two", "three"],
        "results": {"one": "ONE", "two": "TWO", "three": "THREE"},
        "mood": "after three",
    }
    assert Reader.paid == [f"{forked.handle.id}:two", f"{forked.handle.id}:three"]
    record = await forked.handle.record()
    assert (record.task, orjson.loads(record.shown_arguments() or b"")["goal"]) == ("read", "be brief")
    assert (await history(forked.handle))[0].data["source"] == handle.id
    assert await check_state(*place(app, forked.handle)) is not None
    began = (await state_at(*place(app, forked.handle), 1)).state
    assert (began["mood"], began["seen"]) == ("edited", ["one"])
    assert (await bounded(handle.result()))["goal"] == "learn"


async def test_a_fork_of_a_finished_agent_finishes_again_with_its_artifacts(app: App) -> None:
    class Writer(Reader):
        async def finish(self, ctx: Context, state: Notes) -> dict[str, Any]:
            await ctx.artifacts.save("notes.txt", state.mood)
            return await super().finish(ctx, state)

    write = app.agent(name="write")(Writer)
    handle: TaskHandle[Any] = await write.enqueue("learn")
    await work_off(app)
    saved = await checkpoint_fields(*place(app, handle), "#artifact:")
    assert list(saved) == ["#artifact:notes.txt"]
    Reader.paid.clear()
    await redis_command(app, "HSET", handle.partition.steps(handle.id), "s:#replan", b"1")
    forked = await fork(app.producer, handle.id, edit={"mood": "other"})
    assert {"s:#replan", "s:#state"} <= set(await recorded_steps(app, forked.handle))
    early = await fork(app.producer, handle.id, at=1)
    assert await checkpoint_fields(*place(app, forked.handle), "#artifact:") == saved
    assert await checkpoint_fields(*place(app, early.handle), "#artifact:") == {}
    assert forked.agent == "write"
    await early.handle.cancel()
    await work_off(app)
    assert (await bounded(forked.handle.result()))["mood"] == "other"
    assert Reader.paid == []


async def test_a_fork_within_a_step_keeps_its_nested_records(app: App) -> None:
    app.agent(name="read", retry=Retry(max_attempts=1))(Reader)
    Reader.paid.clear()
    handle: TaskHandle[Any] = await app.producer.enqueue("read", {"goal": "learn"}, queue=app.name)
    discover = Context.discover

    async def cut_off(ctx: Context, fact: str, *, source: str = "") -> None:
        await discover(ctx, fact, source=source)
        if source == "two":
            raise ConnectionError("cut off")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Context, "discover", cut_off)
        await work_off(app)
    forked = await fork(app.producer, handle.id)
    assert forked.within == "two"
    Reader.paid.clear()
    await work_off(app)
    assert (await bounded(forked.handle.result()))["seen"] == ["one", "two", "three"]
    assert Reader.paid == [f"{forked.handle.id}:three"]
    assert len((await state_at(*place(app, forked.handle))).state["discoveries"]) == 3


@pytest.fixture
def walk(app: App) -> Any:
    """Register a function of three steps that fails at its end."""

    @app.task(retry=Retry(max_attempts=1))
    async def walk(ctx: Context, start: int, fail: bool = True) -> list[int]:
        async def go(number: int) -> int:
            Reader.paid.append(f"{ctx.task_id}:{number}")
            return start + number

        found = [await ctx.step("a", go, 1)]
        await ctx.decide("continue", reasoning="because")
        found += [await ctx.tool("b", go, 2), await ctx.options(risky=True).step("c", go, 3)]
        await ctx.decide("stop")
        if fail:
            raise ValueError("too far")
        return found

    return walk


async def walked(app: App, walk: Any) -> TaskHandle[Any]:
    handle: TaskHandle[Any] = await walk.options(headers={"who": "me"}).enqueue(10)
    await work_off(app)
    Reader.paid.clear()
    return handle


@pytest.mark.parametrize(
    ("at", "kept", "paid"),
    [
        (0, set(), ["1", "2", "3"]),
        ("a", {"a"}, ["2", "3"]),
        (1, {"a", "#decided"}, ["2", "3"]),
        ("b", {"a", "#decided", "b"}, ["3"]),
        (None, {"a", "#decided", "b", "c", "#decided#2"}, []),
    ],
)
async def test_a_fork_of_a_function_has_the_steps_recorded_by_then(
    app: App, walk: Any, at: Any, kept: set[str], paid: list[str]
) -> None:
    handle = await walked(app, walk)
    forked = await fork(app.producer, handle.id, at=at, edit={"fail": False})
    assert set(await recorded_steps(app, forked.handle)) == {f"d:{key}" for key in kept}
    await work_off(app)
    assert await bounded(forked.handle.result()) == [11, 12, 13]
    assert Reader.paid == [f"{forked.handle.id}:{number}" for number in paid]
    assert (await forked.handle.record()).headers == {"who": "me"}
    assert (await handle.record()).state == "dead"
    decisions = (await state_at(*place(app, forked.handle))).state["decisions"]
    assert [one["choice"] for one in decisions] == ["continue", "stop"]


async def test_a_fork_can_be_forked(app: App, walk: Any) -> None:
    handle = await walked(app, walk)
    first = await fork(app.producer, handle.id, at="a", edit={"fail": False})
    await work_off(app)
    Reader.paid.clear()
    second = await fork(app.producer, first.handle.id, at="b")
    assert set(await recorded_steps(app, second.handle)) == {"d:a", "d:#decided", "d:b"}
    assert await recorded_steps(app, (await fork(app.producer, first.handle.id, at=0)).handle) == {}
    await work_off(app)
    assert await bounded(second.handle.result()) == [11, 12, 13]
    assert f"{second.handle.id}:3" in Reader.paid
    assert f"{second.handle.id}:1" not in Reader.paid


async def test_a_task_in_any_state_can_be_forked(app: App, walk: Any) -> None:
    waiting = await walk.options(delay=3600).enqueue(1, fail=False)
    queued = await walk.enqueue(2, fail=False)
    for source, result in ((waiting, [2, 3, 4]), (queued, [3, 4, 5])):
        forked = await fork(app.producer, source.id)
        await work_off(app)
        assert await bounded(forked.handle.result()) == result
    done = await fork(app.producer, queued.id, edit={"start": 100}, at=0)
    await work_off(app)
    assert await bounded(done.handle.result()) == [101, 102, 103]
    await waiting.cancel()
    again = await fork(app.producer, waiting.id)
    await work_off(app)
    assert await bounded(again.handle.result()) == [2, 3, 4]


async def test_a_repeated_fork_returns_the_same_task(app: App, walk: Any) -> None:
    handle = await walked(app, walk)
    first = await fork(app.producer, handle.id, new_id="mine", edit={"fail": False})
    await take_and_die(app)
    again = await fork(app.producer, handle.id, new_id="mine", edit={"fail": False})
    assert (again.handle.id, again.handle.partition) == (first.handle.id, first.handle.partition)
    assert await redis_command(app, "XLEN", handle.partition.ready) == 1
    await work_off(app)
    assert await bounded(first.handle.result()) == [11, 12, 13]
    with pytest.raises(TaskExists, match="task mine exists already"):
        await fork(app.producer, handle.id, at="a", new_id="mine")


async def test_records_written_during_a_fork_are_not_copied(
    app: App, walk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = await walked(app, walk)

    async def late(*where: Any) -> dict[str, bytes]:
        await redis_command(app, "HSET", handle.partition.steps(handle.id), "d:late", b"{}\n1")
        await redis_command(app, "XADD", handle.partition.log(handle.id), "*", "type", "step_completed", "step", "late")
        return await recorded_results(*where)

    monkeypatch.setattr(forks, "recorded_results", late)
    forked = await fork(app.producer, handle.id, edit={"fail": False})
    assert set(await recorded_steps(app, forked.handle)) == {"d:a", "d:#decided", "d:b", "d:c", "d:#decided#2"}
    await work_off(app)
    assert await bounded(forked.handle.result()) == [11, 12, 13]


async def test_a_fork_is_placed_on_an_open_partition(app: App, walk: Any) -> None:
    handle = await walked(app, walk)
    await set_partitions(app.producer.gateway, app.producer.namespace, app.name, 2)
    forked = await fork(app.producer, handle.id, edit={"fail": False}, new_id="elsewhere")
    assert forked.handle.partition.index in (1, 2)
    assert (await fork(app.producer, handle.id, new_id="elsewhere")).handle.partition == forked.handle.partition
    await work_off(app)
    assert await bounded(forked.handle.result()) == [11, 12, 13]


async def test_encrypted_data_is_encrypted_again_for_the_fork(settings: Settings) -> None:
    async with App("encrypted", settings=with_keys(settings, FIRST, required=True)) as app:
        handle = await read_all(app)
        first = next(number for number, event in (await numbered(handle)).items() if event.type == "step_completed")
        forked = await fork(app.producer, handle.id, at=first, edit={"mood": "a-marker"})
        assert b"a-marker" not in await everything(app)
        await work_off(app)
        assert (await bounded(forked.handle.result()))["mood"] == "after three"
        assert (await state_at(*place(app, forked.handle), 1)).state["mood"] == "a-marker"


async def test_an_edited_secret_argument_stays_secret(app: App) -> None:
    class Keyed(Notes):
        token: Annotated[SecretStr | None, Ephemeral] = None

    class Caller(Agent[Keyed]):
        async def plan(self, ctx: Context, state: Keyed) -> list[PlanStep]:
            return []

        async def act(self, ctx: Context, state: Keyed, step: PlanStep) -> None:
            raise AssertionError("there is no step")

        async def finish(self, ctx: Context, state: Keyed) -> str:
            assert state.token is not None
            await ctx.decide(f"use {state.token.get_secret_value()}")
            return str(len(state.token.get_secret_value()))

    handle: TaskHandle[Any] = await app.agent(name="call")(Caller).enqueue("learn", token=SecretStr("first-token"))
    await work_off(app)
    forked = await fork(app.producer, handle.id, edit={"token": "another-token-of-hers"})
    await work_off(app)
    assert await bounded(forked.handle.result()) == "21"
    log = await redis_command(app, "XRANGE", forked.handle.partition.log(forked.handle.id), "-", "+")
    assert b"another-token" not in repr(log).encode()
    assert "another" not in (await cli(app, "show", forked.handle.id)).out


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        ({"plan": "none"}, "the edited state is invalid: plan"),
        ({"mod": "calm"}, "cannot edit 'mod': the state has .*mood"),
        ({"plan.9.status": "done"}, "'9' does not exist"),
        ({"goal.deeper": 1}, "cannot edit 'goal.deeper'"),
    ],
)
async def test_an_invalid_edit_is_refused(app: App, edit: dict[str, Any], problem: str) -> None:
    handle = await read_all(app)
    with pytest.raises(BadEdit, match=problem):
        await fork(app.producer, handle.id, edit=edit)
    with pytest.raises(BadHistory, match="has no event, entry or step 'nowhere'"):
        await fork(app.producer, handle.id, at="nowhere")


async def test_the_command_forks_a_task(app: App, walk: Any) -> None:
    handle = await walked(app, walk)
    answer = await cli(app, "fork", handle.id, "--at", "a", "--edit", "fail=false", "--edit", '{"start": 10}')
    assert (answer.code, len(answer.ids)) == (0, 1)
    assert f"forked a new task from event 0 of task {handle.id}; recorded steps: 1" in answer.err
    await work_off(app)
    found = await app.producer.find(answer.ids[0])
    assert found is not None
    assert await bounded(found.result()) == [11, 12, 13]
    assert (await cli(app, "fork", handle.id, "--edit", "nonsense")).code == 2
    assert (await cli(app, "fork", "nothing")).err.startswith("perdure: no task nothing")
