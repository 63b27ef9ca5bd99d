"""The agent loop: from a goal to a result, and resumption after an earlier run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar

import pytest
from perdure import (
    Agent,
    AgentState,
    App,
    Context,
    Ephemeral,
    InvalidArguments,
    PlanStep,
    Retry,
    Settings,
    State,
    TaskHandle,
    Worker,
)
from perdure.deadletter.policy import Reason
from perdure.deadletter.replay import Replay, replay
from perdure.queues import Gateway
from perdure.queues.transport.scripts import Script, pairs
from perdure.worker.agents.journal.history import check_state, state_at
from perdure.worker.agents.journal.reducer import empty_state, reduce
from perdure.worker.durable.journal.parsing import parse_event
from perdure.worker.errors import BadHistory, TaskDefinitionError
from pydantic import Field, SecretStr, field_serializer

from tests.support.workers import bounded, history, letter, recorded_steps, redis_command, work_off

pytestmark = [pytest.mark.integration, pytest.mark.app("agents", check_state=True, lease=30.0)]

AGAIN = Retry(max_attempts=5, base=0.0)


class Counting(AgentState):
    """Words to count, their total so far, and `scratch`, which is never stored."""

    words: list[str] = Field(default_factory=list)
    total: int = 0
    scratch: Annotated[list[str] | None, Ephemeral] = None


class Counter(Agent[Counting]):
    """An agent that counts the letters of words, one word per step."""

    acts: ClassVar[list[str]] = []
    fails: ClassVar[dict[str, int]] = {}

    async def plan(self, ctx: Context, state: Counting) -> list[PlanStep]:
        return [PlanStep(key=word, title=f"count {word}") for word in state.words]

    async def act(self, ctx: Context, state: Counting, step: PlanStep) -> int:
        self.acts.append(step.key)
        found = await ctx.step("length", len, step.key)
        await ctx.discover(f"{step.key} has {found} letters", source="len")
        state.total += found
        if self.fails.get(step.key, 0) >= step.attempts:
            raise ConnectionError(f"cut off in {step.key}")
        return found

    async def finish(self, ctx: Context, state: Counting) -> dict[str, Any]:
        return {"total": state.total, "discoveries": len(state.discoveries), "results": state.results}


@pytest.fixture
def counter() -> type[Counter]:
    class Fresh(Counter):
        acts: ClassVar[list[str]] = []
        fails: ClassVar[dict[str, int]] = {}

    return Fresh


async def test_an_agent_plans_acts_and_finishes(app: App, counter: type[Counter]) -> None:
    count = app.agent(name="count", retry=AGAIN)(counter)
    handle = await count.enqueue("count", words=["one", "three"])
    await work_off(app)
    assert await bounded(handle.result()) == {"total": 8, "discoveries": 2, "results": {"one": 3, "three": 5}}
    reported = [(event.type, event.step) for event in await history(handle) if event.number is not None]
    assert reported == [
        ("started", None),
        ("planned", None),
        ("step_started", "one"),
        ("discovered", "one"),
        ("step_completed", "one"),
        ("step_started", "three"),
        ("discovered", "three"),
        ("step_completed", "three"),
        ("finished", None),
    ]
    assert set(await recorded_steps(app, handle)) == {"d:#plan", "d:#finish", "s:#memories:0"}


async def test_a_retry_resumes_at_the_failed_step_and_applies_nothing_twice(app: App, counter: type[Counter]) -> None:
    counter.fails["three"] = 2
    count = app.agent(name="count", retry=AGAIN)(counter)
    handle = await count.enqueue("count", words=["one", "three", "five"])
    await work_off(app)
    assert await bounded(handle.result()) == {
        "total": 12,
        "discoveries": 3,
        "results": {"one": 3, "three": 5, "five": 4},
    }
    assert counter.acts == ["one", "three", "three", "three", "five"]
    failed = [event for event in await history(handle) if event.type == "step_failed"]
    assert [(event.step, event.data["error"]) for event in failed] == [("three", "ConnectionError")] * 2


async def test_a_producer_enqueues_an_agent_by_name_with_goal_and_inputs(
    app: App, counter: type[Counter], settings: Settings
) -> None:
    app.agent(name="count")(counter)
    handle = await app.producer.enqueue("count", {"goal": "count", "words": ["four"]}, queue=app.name)
    await work_off(app)
    assert (await bounded(handle.result()))["total"] == 4
    with pytest.raises(InvalidArguments, match="unexpected keyword argument 'word'"):
        await app.agent(name="other")(counter).enqueue("count", word="four")


async def test_a_stopping_worker_ends_after_the_step_and_the_next_one_resumes(app: App) -> None:
    acts: list[str] = []

    class Stopped(Counter):
        async def act(self, ctx: Context, state: Counting, step: PlanStep) -> int:
            acts.append(step.key)
            if step.key == "one":
                running[0].stop()
            return len(step.key)

    running: list[Worker] = []
    count = app.agent(name="count")(Stopped)
    handle = await count.enqueue("count", words=["one", "two"])
    async with Worker(app) as worker:
        running.append(worker)
        await bounded(worker.run())
    assert acts == ["one"]
    assert (await handle.record()).attempts == 0
    await work_off(app)
    assert (await bounded(handle.result()))["results"] == {"one": 3, "two": 3}
    assert acts == ["one", "two"]


# stored and ephemeral fields


class Login(AgentState):
    password: Annotated[SecretStr, Ephemeral] = SecretStr("")
    opened: Annotated[Any, Ephemeral] = None
    note: str = ""


async def test_ephemeral_fields_are_not_stored_and_ephemeral_inputs_are_set_again(app: App) -> None:
    seen: list[tuple[str, object, str]] = []

    class Spy(Agent[Login]):
        async def plan(self, ctx: Context, state: Login) -> list[PlanStep]:
            state.opened = object()
            return [PlanStep(key="look", title="look")]

        async def act(self, ctx: Context, state: Login, step: PlanStep) -> None:
            seen.append((state.password.get_secret_value(), state.opened, state.note))
            state.note = f"logged in with {state.password.get_secret_value()}"
            if step.attempts == 1:
                raise ConnectionError

        async def finish(self, ctx: Context, state: Login) -> str:
            return state.note

    spy = app.agent(name="spy", retry=AGAIN)(Spy)
    handle = await spy.enqueue("look", password="hunter22")
    await work_off(app)
    assert await bounded(handle.result()) == "logged in with hunter22"
    assert [(password, note) for password, _, note in seen] == [("hunter22", "")] * 2
    assert seen[0][1] is not None
    assert seen[1][1] is None
    stored = await recorded_steps(app, handle)
    assert not any(b"hunter22" in value and name != "d:#finish" for name, value in stored.items())
    assert not any("hunter22" in str(event.data) for event in await history(handle))


class Keyring(AgentState):
    passwords: Annotated[list[SecretStr], Ephemeral] = Field(default_factory=list)


async def test_too_many_secrets_to_redact_are_refused(app: App) -> None:
    kind = type("Locksmith", (Counter,), {"state_type": Keyring})
    handle = await app.agent(kind, name="locksmith").enqueue(
        "open", passwords=[f"hunter{one:03}" for one in range(300)]
    )
    await work_off(app)
    found = await letter(app, handle)
    assert (found.reason, found.error) == (Reason.NOT_RETRYABLE, "perdure.worker.errors.StateError")


class Pages(AgentState):
    pages: dict[str, str] = Field(default_factory=dict)


def reader(**settings: Any) -> type[Agent[Pages]]:
    """Return an agent that reads pages of the sizes in its goal, and fails once after each."""

    class Reader(Agent[Pages]):
        async def plan(self, ctx: Context, state: Pages) -> list[PlanStep]:
            return [PlanStep(key=f"{at}-{size}", title="read") for at, size in enumerate(state.goal.split())]

        async def act(self, ctx: Context, state: Pages, step: PlanStep) -> None:
            at, size = step.key.split("-")
            state.pages[at] = at * int(size)

        async def finish(self, ctx: Context, state: Pages) -> dict[str, int]:
            return {at: len(page) for at, page in state.pages.items()}

    for name, value in settings.items():
        setattr(Reader, name, value)
    return Reader


async def test_large_values_are_stored_once_outside_the_snapshots(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    run = Gateway.run

    async def watched(
        gateway: Gateway, script: Script, keys: Sequence[str], args: Sequence[Any], **options: Any
    ) -> Any:
        if script.name == "write_checkpoint":
            written.extend(str(key) for kind, key in zip(args[6::4], args[7::4], strict=True) if kind == "saved")
        return await run(gateway, script, keys, args, **options)

    monkeypatch.setattr(Gateway, "run", watched)
    read = app.agent(name="read")(reader(snapshot_every=1))
    handle = await read.enqueue("20000 30000 10")
    await work_off(app)
    assert await bounded(handle.result()) == {"0": 20_000, "1": 30_000, "2": 10}
    stored = await recorded_steps(app, handle)
    blobs = sorted(len(value) for name, value in stored.items() if name.startswith("s:#blob:"))
    assert blobs == [20_002, 30_002]
    assert len(stored["s:#state"]) < 2000
    assert len([key for key in written if key.startswith("#blob:")]) == 2
    assert len([key for key in written if key == "#state"]) > 6


async def test_a_growing_state_logs_warnings_and_parks_over_the_limit(settings: Settings, log: list[str]) -> None:
    async with App("small", settings=settings.model_copy(update={"payload_limit": 300_000})) as app:
        read = app.agent(name="read")(reader())
        handle = await read.enqueue("70000 10000 10000 80000 200000")
        await work_off(app)
        assert await handle.status() is State.WAITING
        (waiting,) = [event for event in await history(handle) if event.type == "waiting"]
    assert "largest fields: pages (370," in waiting.data["why"]
    warnings = [line for line in log if line.startswith("state grew to")]
    assert len(warnings) == 2, "once above 64 KB, and once above twice that"


async def test_an_unstorable_state_is_a_dead_letter_with_the_cause(app: App) -> None:
    class Broken(Counter):
        async def act(self, ctx: Context, state: Counting, step: PlanStep) -> int:
            state.total = "many"  # type: ignore[assignment]
            return 1

    handle = await app.agent(name="count", retry=AGAIN)(Broken).enqueue("count", words=["one"])
    await work_off(app)
    found = await letter(app, handle)
    assert (found.reason, found.error) == (Reason.NOT_RETRYABLE, "perdure.worker.errors.StateError")
    assert found.message.endswith("cannot be stored: field 'total' must be int, got 'many'")


@pytest.mark.parametrize("plan", [None, PlanStep(key="a", title="a"), "abc", {"a": 1}])
async def test_a_plan_that_is_no_list_is_refused(app: App, plan: Any) -> None:
    class Planless(Counter):
        async def plan(self, ctx: Context, state: Counting) -> Any:
            return plan

    handle = await app.agent(name="count", retry=AGAIN)(Planless).enqueue("count", words=["one"])
    await work_off(app)
    found = await letter(app, handle)
    assert (found.reason, found.attempts) == (Reason.NOT_RETRYABLE, 1)
    assert found.error == "perdure.worker.errors.StepDefinitionError"
    assert found.message.startswith(f"plan must return a list of PlanStep, got {plan!r}"[:60])


@pytest.mark.parametrize("method", ["plan", "replan", "act"])
@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"key": "a"}, "PlanStep 'a' has no title; pass title="),
        ({"title": "a"}, "a PlanStep has no key; pass key="),
        ({"key": "a", "title": 7}, "a PlanStep is not valid: title: Input should be a valid string"),
    ],
)
async def test_a_step_without_a_title_is_refused_at_once(
    app: App, counter: type[Counter], method: str, fields: dict[str, Any], problem: str
) -> None:
    """No other attempt could make it."""

    async def broken(self: Counter, ctx: Context, state: Counting, *step: PlanStep) -> Any:
        return [PlanStep(**fields)]

    setattr(counter, method, broken)
    handle = await app.agent(name="count", retry=AGAIN)(counter).enqueue("count", words=["one"])
    await work_off(app)
    found = await letter(app, handle)
    assert (found.reason, found.attempts) == (Reason.NOT_RETRYABLE, 1)
    assert found.message.startswith(problem)


def test_the_coherence_of_an_agent_is_a_coherence(app: App) -> None:
    class Strict(Counter):
        coherence: ClassVar[Any] = 3

    with pytest.raises(TaskDefinitionError, match=r"agent 'strict': coherence must be a Coherence, such as .*, got 3"):
        app.agent(Strict)


# deploys between two runs


class Halfway(Counter):
    """An agent that completes its first step and fails in the second."""

    snapshot_every: ClassVar[int] = 1

    async def act(self, ctx: Context, state: Counting, step: PlanStep) -> int:
        if step.key == "two":
            raise ConnectionError
        state.total += 1
        return 1


async def after_a_deploy(
    app: App, settings: Settings, later: type[Agent[Any]], snapshot: Callable[[bytes], bytes] = lambda stored: stored
) -> TaskHandle[Any]:
    """Let a task fail halfway, change its snapshot, and replay it with a later version."""
    once = Retry(max_attempts=1)
    handle = await app.agent(name="count", retry=once)(Halfway).enqueue("count", words=["one", "two"])
    await work_off(app)
    found = await letter(app, handle)
    stored = await recorded_steps(app, handle)
    await redis_command(app, "HSET", handle.partition.steps(handle.id), "s:#state", snapshot(stored["s:#state"]))
    async with App("agents", settings=settings) as newer:
        newer.agent(name="count", retry=once)(later)
        await replay(newer.producer.gateway, found, Replay())
        await work_off(newer)
    return handle


class Extended(Counting):
    unit: str = "letters"


class Later(Agent[Extended]):
    async def plan(self, ctx: Context, state: Extended) -> list[PlanStep]:
        raise AssertionError("there is a plan")

    async def act(self, ctx: Context, state: Extended, step: PlanStep) -> int:
        state.total += 1
        return 2

    async def finish(self, ctx: Context, state: Extended) -> dict[str, Any]:
        return {"total": state.total, "unit": state.unit, "results": state.results}


async def test_a_new_field_has_its_default_in_a_stored_state(app: App, settings: Settings) -> None:
    handle = await after_a_deploy(app, settings, Later)
    assert await bounded(handle.result()) == {"total": 2, "unit": "letters", "results": {"one": 1, "two": 2}}


async def test_an_unknown_field_of_a_stored_state_is_kept(app: App, settings: Settings) -> None:
    handle = await after_a_deploy(app, settings, Later, lambda data: data.replace(b'"total":1', b'"total":1,"of":[7]'))
    assert await bounded(handle.result()) == {"total": 2, "unit": "letters", "results": {"one": 1, "two": 2}}
    state = empty_state()
    for event in await history(handle):
        if event.number is not None:
            assert not any(change["path"] == "/of" for change in (event.data or {}).get("changes", ()))
            state = reduce(state, parse_event(event), event.number)
    assert state["total"] == 2


@pytest.mark.parametrize(
    ("old", "new", "error", "message"),
    [
        (b'"total":1', b'"total":"one"', "StateMismatch", "total: Input should be a valid integer"),
        (b'{"v":1', b'{"v":7', "BadSnapshot", "version 7"),
        (b'{"v":1', b'{"v":1,', "BadSnapshot", "not JSON"),
        (b'"agent":"count"', b'"agent":"other"', "BadSnapshot", "it belongs to agent 'other'"),
        (b'"total":1', b'"total":{"$ref":"sha256:00"}', "BadSnapshot", "'#blob:00' is missing"),
    ],
)
async def test_an_unreadable_state_is_a_dead_letter_and_is_kept(
    app: App, settings: Settings, old: bytes, new: bytes, error: str, message: str
) -> None:
    handle = await after_a_deploy(app, settings, Later, lambda data: data.replace(old, new))
    found = await letter(app, handle)
    assert (found.reason, found.error) == (Reason.NOT_RETRYABLE, f"perdure.worker.errors.{error}")
    assert message in found.message
    assert handle.id in found.message
    assert new in (await recorded_steps(app, handle))["s:#state"]


async def change_log(app: App, handle: TaskHandle[Any], change: Callable[[dict[bytes, bytes]], bool]) -> None:
    """Write the log of a task again. change: changes the fields of an entry, and returns whether it stays."""
    key = handle.partition.log(handle.id)
    entries = [pairs(fields) for _, fields in await redis_command(app, "XRANGE", key, "-", "+")]
    await redis_command(app, "DEL", key)
    for fields in entries:
        if change(fields):
            await redis_command(app, "XADD", key, "*", *(one for pair in fields.items() for one in pair))


class Rarely(Halfway):
    """The same without a snapshot."""

    snapshot_every: ClassVar[int] = 50


@pytest.mark.parametrize(("later", "message"), [(b'{"v":9}', "it has version 9"), (b"{", "not JSON")])
async def test_an_unreadable_event_after_the_snapshot_is_a_dead_letter(app: App, later: bytes, message: str) -> None:
    """Event 4 has the result of the first step."""
    handle = await app.agent(name="count", retry=Retry(max_attempts=1))(Rarely).enqueue("count", words=["one", "two"])
    await work_off(app)
    found = await letter(app, handle)

    def spoil(fields: dict[bytes, bytes]) -> bool:
        if fields.get(b"n") == b"4":
            fields[b"data"] = later
        return True

    await change_log(app, handle, spoil)
    await replay(app.producer.gateway, found, Replay())
    await work_off(app)
    found = await letter(app, handle)
    assert (found.reason, found.error) == (Reason.NOT_RETRYABLE, "perdure.worker.errors.BadSnapshot")
    assert message in found.message
    assert handle.id in found.message


@pytest.mark.parametrize("lost", range(1, 6))
async def test_an_agent_resumes_from_before_a_gap_in_its_log(app: App, settings: Settings, lost: int) -> None:
    """An earlier version wrote over a gap: event 4 has the result of the first step, event 5 starts the second."""
    handle = await app.agent(name="count", retry=Retry(max_attempts=1))(Rarely).enqueue("count", words=["one", "two"])
    await work_off(app)
    found = await letter(app, handle)
    last = max(event.number or 0 for event in await history(handle))
    await change_log(app, handle, lambda fields: fields.get(b"n") != b"%d" % lost)
    await replay(app.producer.gateway, found, Replay())
    async with App("agents", settings=settings) as newer:
        newer.agent(name="count")(Counter)
        await work_off(newer)
    assert (await bounded(handle.result()))["results"] == {"one": 1 if lost == 5 else 3, "two": 3}
    rewound = [event.data for event in await history(handle) if event.type == "rewound"]
    assert [(one["first"], one["last"]) for one in rewound] == [(lost, last + 1)]  # and the event of the resumption
    numbers = [event.number for event in await history(handle) if event.number is not None]
    assert numbers == [number for number in range(1, numbers[-1] + 1) if number != lost]

    place = (app.producer.gateway, handle.partition, handle.id)
    assert (await check_state(*place)) is not None, "what came before the gap and what came after it is known"
    assert (await state_at(*place)).state["results"] == (await bounded(handle.result()))["results"]
    assert (await state_at(*place, lost - 1)).number == lost - 1
    for unknown in (lost, last + 1):
        with pytest.raises(
            BadHistory, match=f"^event {lost} is missing from the log of task {handle.id}: lost by Redis"
        ):
            await state_at(*place, unknown)
    lenient = await state_at(*place, lenient=True)
    assert (lenient.state["results"], len(lenient.skipped) > 0) == ((await state_at(*place)).state["results"], True)


async def test_check_state_reports_a_state_that_differs_from_its_log(settings: Settings, app: App) -> None:
    class Fickle(Counting):
        @field_serializer("total")
        def change(self, total: int) -> int:
            self.total += 1
            return total

    handles = {}
    async with App("unchecked", settings=settings) as unchecked:
        for one in (app, unchecked):
            kind = type("Fickle_", (Counter,), {"state_type": Fickle, "acts": []})
            handle = await one.agent(kind, name=one.name, queue=one.name).enqueue("count", words=["one"])
            await work_off(one)
            handles[one.name] = handle
        assert await bounded(handles["unchecked"].result())
    found = await letter(app, handles["agents"])
    assert found.error == "perdure.worker.errors.StateError"
    assert "since event 1: /total" in found.message
