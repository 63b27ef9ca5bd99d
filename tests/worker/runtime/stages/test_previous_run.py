"""Resumed runs: why the previous run stopped, how long ago, and what was restored."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest
from perdure import (
    Agent,
    AgentState,
    App,
    Context,
    InvalidArguments,
    PlanStep,
    Producer,
    Retry,
    Settings,
    Snooze,
    State,
    TaskFailed,
    Worker,
)
from perdure.deadletter.letters import find_letter
from perdure.deadletter.replay import Replay, replay
from perdure.queues import HandOffRefused, ServerFull, TaskHandle, Unavailable
from perdure.queues.delivery.due_set import promote_due
from perdure.queues.derived_tasks import enqueue_successor
from perdure.queues.keys import GROUP
from perdure.worker.durable import continuation
from perdure.worker.durable.checkpoint_writer import CheckpointWriter
from perdure.worker.durable.journal.handoff.document import CompletedStep, Handoff
from perdure.worker.durable.journal.resumption import Resumption
from perdure.worker.runtime import settler
from perdure.worker.runtime.slots import Slots
from perdure.worker.runtime.stages import successor as handing_on
from pydantic import SecretStr

from tests.support.consumers import make_due
from tests.support.processes import push_token, worker_processes
from tests.support.workers import (
    BOUND,
    FRESH,
    bounded,
    history,
    pending,
    recorded_steps,
    redis_command,
    running_worker,
    steal,
    take_and_die,
    wait_until,
    work_off,
)

pytestmark = [pytest.mark.integration, pytest.mark.app(check_state=True)]


async def handoff_of(app: App, handle: TaskHandle[Any]) -> Handoff:
    return Handoff.from_json(handle.id, (await recorded_steps(app, handle))["s:#handoff"])


async def resumed(handle: TaskHandle[Any]) -> list[dict[str, Any]]:
    return [event.data for event in await history(handle) if event.type == "resumed"]


async def test_a_first_run_has_no_resumption_and_leaves_no_handoff(app: App) -> None:
    @app.task
    async def job(ctx: Context) -> bool:
        await ctx.step("one", len, "x")
        return ctx.resumption is None

    handle = await job.options(delay=0.01).enqueue()
    async with running_worker(app):
        assert await bounded(handle.result()) is True
    assert list(await recorded_steps(app, handle)) == ["d:one"]
    assert await resumed(handle) == []


async def test_a_run_after_a_failure_gets_a_handoff_from_the_log(app: App) -> None:
    found: list[Resumption | None] = []

    @app.task(retry=Retry(max_attempts=2, base=0.0))
    async def job(ctx: Context) -> None:
        found.append(ctx.resumption)
        await ctx.decide("begin with src", reasoning="it is small", alternatives=["docs"])
        await ctx.discover("12 files", source="src")
        await ctx.step("one", len, "x")
        if ctx.attempt == 1:
            raise ValueError("not today")

    handle = await job.enqueue()
    await work_off(app)
    await bounded(handle.result())
    first, second = found
    assert first is None
    assert second is not None
    assert (second.after, second.interrupted) == ("failure", False)
    assert second.gap is not None
    assert second.gap >= 0
    assert second.restored == {"steps": 1, "events": 2, "decisions": 1, "discoveries": 1}
    assert second.handoff is not None
    assert (second.handoff.why, second.handoff.goal) == ("failure", "job()")
    assert [made.reasoning for made in second.handoff.decisions] == ["it is small"]
    assert "ValueError: not today" in second.handoff.to_markdown()
    assert "begin with src" in second.text(300)
    assert [event["after"] for event in await resumed(handle)] == ["failure"]


async def test_a_failure_without_steps_adds_no_resumed_event(app: App) -> None:
    @app.task(retry=Retry(max_attempts=2, base=0.0))
    async def job(ctx: Context) -> str | None:
        if ctx.attempt == 1:
            raise ValueError
        return None if ctx.resumption is None else ctx.resumption.after

    handle = await job.enqueue()
    await work_off(app)
    assert await bounded(handle.result()) == "failure"
    assert [event.type for event in await history(handle)] == ["attempt_failed"]


async def test_the_next_run_gets_the_handoff_of_a_shutdown(app: App) -> None:
    started = asyncio.Event()
    found: list[Resumption | None] = []

    async def first() -> None:
        started.set()

    @app.task
    async def job(ctx: Context) -> None:
        found.append(ctx.resumption)
        await ctx.decide("one thing")
        await ctx.step("first", first)
        if ctx.resumption is None:
            await asyncio.sleep(60)
        await ctx.step("second", len, "x")

    async with running_worker(app):
        handle = await job.enqueue()
        await bounded(started.wait())
    handoff = await handoff_of(app, handle)
    assert (handoff.why, handoff.last_completed, handoff.events) == ("shutdown", "first", 1)
    await work_off(app)
    resumption = found[1]
    assert resumption is not None
    done = (CompletedStep(key="first", result="no result"),)
    assert (resumption.after, resumption.handoff) == ("hand_off", handoff.model_copy(update={"completed": done}))
    assert resumption.summary().startswith("resumed after a shutdown of its worker at ")


async def test_a_handoff_is_rebuilt_after_later_events(app: App) -> None:
    found: list[Resumption] = []

    @app.task(retry=Retry(max_attempts=2, base=0.0))
    async def job(ctx: Context) -> None:
        await ctx.decide("one")
        if ctx.resumption is None:
            raise Snooze(0.01, "the shop is closed")
        found.append(ctx.resumption)
        await ctx.decide("two")
        if ctx.attempt == 1:
            raise ValueError

    handle = await job.enqueue()
    await work_off(app)
    await bounded(handle.result())
    waited, failed = found
    assert (waited.after, failed.after) == ("wait", "failure")
    assert waited.handoff is not None
    assert [(one.what, one.why) for one in waited.handoff.waiting_on] == [("0.01 s to pass", "the shop is closed")]
    assert failed.handoff is not None
    assert [made.choice for made in failed.handoff.decisions] == ["one", "two"]


async def test_a_replay_gets_the_handoff_of_a_burial(app: App) -> None:
    found: list[str] = []

    @app.task(timeout=0.2, retry=Retry(max_attempts=2, base=0.0))
    async def job(ctx: Context) -> None:
        await ctx.step("one", len, "x")
        if ctx.resumption is not None:
            assert ctx.resumption.handoff is not None
            found.append(f"{ctx.resumption.after} {ctx.resumption.handoff.why}")
            assert ctx.resumption.gap is not None
            assert 0 <= ctx.resumption.gap < BOUND
        if len(found) < 2:
            await ctx.step("slow", asyncio.sleep, 60)

    handle = await job.enqueue()
    await work_off(app)
    with pytest.raises(TaskFailed):
        await bounded(handle.result())
    handoff = await handoff_of(app, handle)
    assert handoff.why == "burial"
    assert "ran longer than 0.2 s" in handoff.detail
    assert [step.key for step in handoff.in_progress] == ["slow"]
    letter = await find_letter(app.producer.gateway, [handle.partition], handle.id)
    assert letter is not None
    assert await replay(app.producer.gateway, letter, Replay())
    await work_off(app)
    await bounded(handle.result())
    assert found == ["failure budget", "replay burial"]


async def test_a_fresh_replay_gets_no_handoff(app: App) -> None:
    found: list[Resumption | None] = []

    @app.task(retry=Retry(max_attempts=1))
    async def job(ctx: Context) -> None:
        found.append(ctx.resumption)
        await ctx.decide(f"way {len(found)}", reasoning="none")
        if len(found) < 4:
            raise ConnectionError

    handle = await job.enqueue()
    await work_off(app)
    for fresh in (True, False, False):
        letter = await find_letter(app.producer.gateway, [handle.partition], handle.id)
        assert letter is not None
        assert await replay(app.producer.gateway, letter, Replay(fresh=fresh))
        await work_off(app)
    await bounded(handle.result())
    _, started, after, _ = found
    assert started is not None
    assert (started.after, started.handoff, started.restored) == ("replay", None, {})
    assert after is not None
    assert after.handoff is not None
    assert [one.choice for one in after.handoff.decisions] == ["way 2"]


async def test_a_lost_lease_counts_as_a_crash(app: App) -> None:
    started = asyncio.Event()

    @app.task
    async def job(ctx: Context) -> str:
        await ctx.step("one", len, "x")
        if ctx.resumption is None:
            started.set()
            await asyncio.sleep(60)
        assert ctx.resumption is not None
        assert ctx.resumption.handoff is not None
        return f"{ctx.resumption.after}, {ctx.resumption.handoff.why}, after {ctx.resumption.handoff.last_completed}"

    async with running_worker(app):
        handle = await job.enqueue()
        await bounded(started.wait())
        await steal(app, handle, expired=True)
    await work_off(app)
    assert await bounded(handle.result()) == "crash, crash, after one"
    assert [event["after"] for event in await resumed(handle)] == ["crash"]


async def test_a_run_that_crashed_without_a_write_counts_as_a_crash(app: App) -> None:
    @app.task(retry=Retry(max_attempts=2, base=0.2))
    async def job(ctx: Context) -> str:
        if ctx.attempt == 1:
            raise ValueError
        return "none" if ctx.resumption is None else ctx.resumption.after

    handle = await job.enqueue()
    async with running_worker(app):
        while await handle.status() is not State.SCHEDULED:  # noqa: ASYNC110 - Redis sends no notification
            await asyncio.sleep(0.005)
    await make_due(app.producer.gateway, handle.partition, handle.id)
    assert await promote_due(app.producer.gateway, handle.partition)
    await take_and_die(app)
    async with running_worker(app):
        assert await bounded(handle.result()) == "crash"


async def test_a_renewal_before_the_run_began_is_no_sign_of_the_previous_run(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claimed task that waits for its turn has its lease renewed; what it resumes from is that of the dead worker."""
    found: list[Resumption | None] = []

    @app.task
    async def job(ctx: Context) -> None:
        found.append(ctx.resumption)

    handle = await job.enqueue()
    await take_and_die(app)
    crashed = round(time.time() * 1000) - FRESH
    await redis_command(app, "HSET", handle.partition.record(handle.id), "run", 1, "began", crashed, "alive", crashed)
    async with running_worker(app) as worker:

        async def renewed() -> bool:
            ((_, name, idle, _),) = await pending(app)
            return name == worker.id and idle < FRESH

        async def wait_turn(_slots: Slots) -> None:
            ((entry, name, _, _),) = await pending(app)
            await redis_command(app, "XCLAIM", handle.partition.ready, GROUP, name, 0, entry, "IDLE", FRESH, "JUSTID")
            worker._heartbeat.renew_now()
            await wait_until(renewed, "the worker has renewed the lease of the task that waits")

        monkeypatch.setattr(Slots, "wait_turn", wait_turn)
        await bounded(handle.result())
    assert found[0] is not None
    assert (found[0].after, found[0].at) == ("crash", crashed)
    assert found[0].gap is not None and found[0].gap >= FRESH / 1000 - 1


@pytest.mark.parametrize("error", [ServerFull("here", "full"), Unavailable("away")])
async def test_a_failed_write_of_a_handoff_does_not_delay_the_outcome(
    app: App, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    async def refuse(*_: Any, **__: Any) -> None:
        raise error

    @app.task(retry=Retry(max_attempts=1))
    async def job(ctx: Context) -> None:
        await ctx.step("one", len, "x")
        raise ValueError

    monkeypatch.setattr(CheckpointWriter, "put_or_drop", refuse)
    handle = await job.enqueue()
    await work_off(app)
    with pytest.raises(TaskFailed):
        await bounded(handle.result())
    assert list(await recorded_steps(app, handle)) == ["d:one"]


async def test_an_unreadable_handoff_is_rebuilt_from_the_log(app: App) -> None:
    found: list[Resumption] = []

    @app.task
    async def job(ctx: Context) -> None:
        await ctx.step("one", len, "x")
        if ctx.resumption is None:
            raise Snooze(0.2)
        found.append(ctx.resumption)

    handle = await job.enqueue()
    async with Worker(app) as worker:
        running = asyncio.create_task(worker.run())
        while "s:#handoff" not in await recorded_steps(app, handle):  # noqa: ASYNC110 - Redis sends no notification
            await asyncio.sleep(0.005)
        await redis_command(app, "HSET", handle.partition.steps(handle.id), "s:#handoff", '{"v":7}')
        await handle.result(timeout=20)
        worker.stop()
        await bounded(running)
    assert found[0].handoff is not None
    assert (found[0].handoff.why, found[0].handoff.last_completed) == ("waiting", "one")


async def test_a_handoff_survives_a_crash_before_the_release(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    started = asyncio.Event()
    found: list[Resumption] = []

    async def die(*_: Any, **__: Any) -> None:
        raise RuntimeError("the worker dies here")

    async def first() -> None:
        started.set()

    @app.task
    async def job(ctx: Context) -> None:
        await ctx.step("first", first)
        if ctx.resumption is None:
            await asyncio.sleep(60)
        else:
            found.append(ctx.resumption)

    with monkeypatch.context() as patched:
        patched.setattr(settler, "release", die)
        async with running_worker(app):
            handle = await job.enqueue()
            await bounded(started.wait())
    handoff = await handoff_of(app, handle)
    async with running_worker(app):
        await bounded(handle.result())
    done = (CompletedStep(key="first", result="no result"),)
    assert (found[0].after, found[0].handoff) == ("crash", handoff.model_copy(update={"completed": done}))
    assert handoff.why == "shutdown"


async def test_handoffs_and_their_messages_are_encrypted(settings: Settings) -> None:
    keys = {"encryption_keys": SecretStr("c2VhbGluZy1rZXktb2YtMzItYnl0ZXMtZm9yLXRlc3Q=")}
    marker = "the-patient-is-Ada"
    async with App("sealed", settings=settings.model_copy(update=keys)) as app:

        @app.task(retry=Retry(max_attempts=1))
        async def second(ctx: Context, patient: str) -> str:
            assert ctx.resumption is not None
            assert ctx.resumption.handoff is not None
            return f"{ctx.resumption.handoff.message} {ctx.resumption.handoff.decisions[0].choice}"

        @app.task
        async def first(ctx: Context, patient: str) -> str:
            await ctx.decide(patient)
            if ctx.resumption is None:
                raise Snooze(0.2, patient)
            assert ctx.resumption.handoff is not None
            assert ctx.resumption.handoff.waiting_on[0].why == patient
            stored = await redis_command(app, "HGETALL", handle.partition.steps(handle.id))
            assert b"s:#handoff" in stored
            assert patient.encode() not in b" ".join(stored)
            await ctx.continue_as(second, message=patient)

        handle = await first.enqueue(marker)
        async with running_worker(app):
            assert await bounded(handle.result()) == f"{marker} {marker}"
        following = await handle.successor()
        assert following is not None
        for one in (handle, following):
            for key in (one.partition.record(one.id), one.partition.steps(one.id)):
                assert marker.encode() not in b" ".join(await redis_command(app, "HGETALL", key))
            log = await redis_command(app, "XRANGE", one.partition.log(one.id), "-", "+")
            assert marker not in str(log)


# real processes


@pytest.mark.processes
@pytest.mark.parametrize("signal", ["SIGKILL", "SIGTERM"])
async def test_another_process_gets_the_end_of_the_previous_run(
    settings: Settings, tmp_path: Path, signal: str
) -> None:
    async with Producer(settings.redis_url, namespace=settings.namespace) as producer:
        with worker_processes(settings, tmp_path) as workers:
            former = await workers.start().ready()
            handle = await producer.enqueue("resumes", {"gate": "g"}, queue="replica")
            await workers.line("saved", f"{handle.id}:second")
            if signal == "SIGKILL":
                former.kill()
                await workers.start().ready()
                await push_token(producer, "g")
            else:
                former.stop()
                await workers.line("stopping", pid=former.pid)
                await push_token(producer, "g")
                assert await former.ended() == 0
                await workers.start().ready()
            found = await bounded(handle.result())
    assert found.pop("gap") >= 0
    if signal == "SIGKILL":
        reported = {"after": "crash", "why": "crash", "last_completed": "first"}
        restored = {"steps": 1, "events": 1, "decisions": 1, "progress": 1}
    else:
        reported = {"after": "hand_off", "why": "shutdown", "last_completed": "second"}
        restored = {"steps": 2, "events": 1, "decisions": 1}
    assert found == reported | {"restored": restored, "reasons": ["there is no other way"]}


# continuing as another task


async def test_the_result_of_the_successor_is_the_result_of_the_first_task(app: App) -> None:
    messages: list[Any] = []

    @app.task(queue="other")
    async def writer(ctx: Context, topic: str) -> str:
        messages.extend(one.content for one in await ctx.inbox())
        found = ctx.resumption
        assert found is not None
        assert found.handoff is not None
        return f"{found.after}: {topic}, {found.handoff.decisions[0].choice}, {found.handoff.message}, {ctx.task_id}"

    @app.task
    async def reader(ctx: Context, topic: str) -> str:
        await ctx.step("read", len, topic)
        await ctx.decide("be short")
        await ctx.continue_as(writer, why="it is read", message="mind the commas")

    handle = await reader.enqueue("redis")
    await handle.send("mind the gap")
    await work_off(app)
    assert messages == ["mind the gap"]
    assert await bounded(handle.result()) == f"hand_off: redis, be short, mind the commas, {handle.id}.h1"
    record = await handle.record()
    assert (record.state, record.handed_to) == (State.SUCCEEDED, f"{handle.id}.h1")
    assert record.result == f'"{handle.id}.h1"'.encode(), "encrypted, it says which successor has the result"
    assert [event.type for event in await history(handle)][-1] == "handed_off"
    handoff = await handoff_of(app, handle)
    assert (handoff.why, handoff.detail, handoff.to) == ("hand_off", "it is read", f"{handle.id}.h1")
    following = await app.producer.find(f"{handle.id}.h1")
    assert following is not None
    (event,) = await resumed(following)
    assert event["after"] == "hand_off"
    assert event["summary"].startswith("resumed after a handoff from another task at ")
    assert (await following.record()).headers == record.headers


async def test_a_timeout_of_a_successor_names_the_time_that_was_asked_for(app: App) -> None:
    @app.task
    async def hop(ctx: Context, left: int) -> None:
        if left:
            await ctx.continue_as(hop, arguments={"left": left - 1}, queue="elsewhere" if left == 1 else None)

    handle = await hop.enqueue(2)
    await work_off(app)
    with pytest.raises(TimeoutError, match=r"^task .*\.h2 \(hop\) did not end within 1 s: it is queued, and no worker"):
        await handle.result(timeout=1)


async def test_a_task_may_continue_on_another_queue_with_other_arguments(app: App) -> None:
    @app.task
    async def hop(ctx: Context, left: int, note: str = "") -> str:
        if left > 0:
            await ctx.continue_as(queue=f"q{left}", arguments={"left": left - 1, "note": "x"})
        return f"{ctx.task_id.rpartition('.')[2]} on {ctx.queue} {note}"

    handle = await hop.enqueue(2)
    await work_off(app, queues=[app.name, "q1", "q2"])
    assert await bounded(handle.result()) == "h2 on q1 x"


async def test_the_producers_options_apply_to_a_successor_of_the_same_task_only(app: App) -> None:
    attempts: list[str] = []

    @app.task(retry=Retry(max_attempts=2, base=0.0))
    async def other(ctx: Context, to: str) -> None:
        attempts.append("other")
        raise ValueError("failed")

    @app.task(retry=Retry(max_attempts=2, base=0.0))
    async def job(ctx: Context, to: str) -> None:
        if to:
            await ctx.continue_as(to, arguments={"to": ""})
        attempts.append("job")
        raise ValueError("failed")

    for name in ("job", "other"):
        handle = await job.options(max_attempts=1).enqueue(name)
        await work_off(app)
        with pytest.raises(TaskFailed, match="failed"):
            await bounded(handle.result())
    assert attempts == ["job", "other", "other"]


async def test_the_successor_of_an_agent_gets_its_goal_and_decisions(app: App) -> None:
    class Reader(Agent[AgentState]):
        async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
            return [PlanStep(key="read", title="Read"), PlanStep(key="write", title="Write")]

        async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> str:
            await ctx.decide(f"do {step.key}", alternatives=["leave it"])
            await ctx.discover("it is long", source="the book")
            if step.key == "write":
                await ctx.continue_as(writer, why="reading is done")
            return step.key

        async def finish(self, ctx: Context, state: AgentState) -> str:
            return "never"

    class Writer(Reader):
        async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
            return []

        async def finish(self, ctx: Context, state: AgentState) -> str:
            return f"{state.goal}: {[one.choice for one in state.decisions]}, {state.discoveries[0].fact}"

    reader, writer = app.agent(Reader), app.agent(queue="writing")(Writer)
    handle = await reader.enqueue("a review")
    await work_off(app)
    assert await bounded(handle.result()) == "a review: ['do read', 'do write'], it is long"
    handoff = await handoff_of(app, handle)
    assert (handoff.agent, handoff.goal, handoff.detail) == ("reader", "a review", "reading is done")
    assert [step.key for step in handoff.in_progress] == ["write"]


@pytest.mark.parametrize("place", ["before the other is stored", "after that"])
async def test_a_crash_before_the_outcome_creates_one_successor(
    app: App, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    calls: list[str] = []

    async def and_die(*given: Any) -> Any:
        dies = "died" not in calls
        found = None if dies and place.startswith("before") else await enqueue_successor(*given)
        if dies:
            calls.append("died")
            raise RuntimeError("the worker dies here")
        return found

    monkeypatch.setattr(handing_on, "enqueue_successor", and_die)

    @app.task
    async def second(ctx: Context) -> str:
        calls.append("second")
        return "done"

    @app.task(retry=Retry(base=0.0))
    async def first(ctx: Context) -> str:
        calls.append("first")
        await ctx.continue_as("second")

    handle = await first.enqueue()
    async with running_worker(app):
        assert await bounded(handle.result()) == "done"
    assert sorted(calls) == ["died", "first", "second"]
    assert (await handle.record()).crashes == 1


async def test_the_id_of_another_task_is_skipped(app: App) -> None:
    @app.task
    async def job(ctx: Context, hands_on: bool) -> str:
        if hands_on:
            await ctx.continue_as("job", arguments={"hands_on": False})
        return ctx.task_id

    taken = await job.options(task_id="job.h1").enqueue(False)
    handle = await job.options(task_id="job").enqueue(True)
    await work_off(app)
    assert (await taken.result(), await handle.result()) == ("job.h1", "job.h2")


async def test_an_id_that_was_taken_later_makes_a_dead_letter(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    async def nowhere(*_: Any) -> None:
        return None

    @app.task
    async def job(ctx: Context, hands_on: bool) -> None:
        if hands_on:
            await ctx.continue_as("job", arguments={"hands_on": False})

    monkeypatch.setattr(continuation, "find_task", nowhere)
    await job.options(task_id="job.h1").enqueue(False)
    handle = await job.options(task_id="job").enqueue(True)
    await work_off(app)
    with pytest.raises(TaskFailed, match=r"could not continue the task as job\.h1"):
        await bounded(handle.result())


async def test_a_circle_of_successors_has_no_result(app: App) -> None:
    @app.task
    async def job(ctx: Context) -> None: ...

    handles = [await job.options(task_id=name).enqueue() for name in ("a", "b")]
    await work_off(app)
    for one, other in zip(handles, reversed(handles), strict=True):
        await redis_command(app, "HSET", one.partition.record(one.id), "handed_to", other.id)
    with pytest.raises(HandOffRefused, match="circle"):
        await bounded(handles[0].result())


async def test_an_invalid_continuation_is_refused_before_a_write(app: App) -> None:
    @app.task
    async def needs(ctx: Context, path: str) -> None: ...

    reported: list[str] = []

    @app.task
    async def job(ctx: Context) -> None:
        for to in (None, needs, cast("str", 3)):
            try:
                await ctx.continue_as(to)
            except (ValueError, TypeError, InvalidArguments) as error:
                reported.append(str(error))

    handle = await job.enqueue()
    await work_off(app)
    await bounded(handle.result())
    assert "continue_as needs to=" in reported[0]
    assert "'needs': path" in reported[1]
    assert "a task, an agent, or the name of one, got 3" in reported[2]
    assert await recorded_steps(app, handle) == {}


async def test_a_function_gets_the_results_of_its_steps_and_the_messages(app: App) -> None:
    """Also a failure that it has handled and a large result; secrets are masked, and no result is in the document."""
    texts: list[str] = []

    def call(url: str) -> None:
        raise ConnectionError("no route to host")

    @app.task(retry=Retry(max_attempts=2, base=0.0))
    async def job(ctx: Context, token: SecretStr) -> None:
        if ctx.resumption is not None:
            texts.append(ctx.resumption.text())
        await ctx.step("login", lambda: f"logged in with {token.get_secret_value()}")
        with suppress(ConnectionError):
            await ctx.options(retry=Retry(max_attempts=1)).step("call", call, "https://example.org")
        await ctx.step("read", lambda: "word " * 1000)
        await ctx.step("note", lambda: None)
        if ctx.attempt == 1:
            raise ValueError("not today")

    handle = await job.enqueue(SecretStr("hunter2-hunter2"))
    await handle.send({"city": "Oslo"}, sender="ada")
    await work_off(app)
    await bounded(handle.result())
    (text,) = texts
    assert text.startswith("You are resuming job after a failure (20")
    assert "- `login`: logged in with **********" in text
    assert "- `call`: failed: no route to host" in text
    assert "earlier step" not in text
    assert "- `read`: word word " in text
    assert "- `note`: no result\n\nContinue after `note`. Do not repeat completed steps." in text
    assert 'Messages that came meanwhile:\n- message from ada: {"city":"Oslo"}' in text
    assert "- the last error: ValueError: not today" in text
    assert "hunter2" not in text


async def test_a_function_with_a_large_checkpoint_gets_its_latest_steps(app: App) -> None:
    texts: list[str] = []

    @app.task(retry=Retry(max_attempts=2, base=0.0))
    async def job(ctx: Context) -> None:
        if ctx.resumption is not None:
            texts.extend((ctx.resumption.text(), ctx.resumption.notice()))
        await ctx.decide("all of them", reasoning="there are few")
        for number in range(600):
            await ctx.step(f"step-{number}", int, number)
        if ctx.attempt == 1:
            raise ValueError("not today")

    handle = await job.enqueue()
    await work_off(app)
    await bounded(handle.result())
    text, notice = texts
    assert "- 550 earlier steps\n" in text
    assert "Restored: 600 completed steps." in notice
    assert [line for line in text.splitlines() if line.startswith("- `")] == [
        f"- `step-{number}`: {number}" for number in range(550, 600)
    ]
    assert "Continue after `step-599`. Do not repeat completed steps." in text


async def test_a_large_checkpoint_counts_the_steps_of_the_plan(app: App) -> None:
    texts: list[str] = []

    @app.task(retry=Retry(max_attempts=2, base=0.0))
    async def job(ctx: Context) -> None:
        if ctx.resumption is not None:
            texts.extend((ctx.resumption.text(), ctx.resumption.notice()))
        await ctx.plan(["load", "pages", "send"])
        await ctx.step("load", int)
        with ctx.scope("pages"):
            for number in range(600):
                await ctx.step(f"page-{number}", int, number)
        if ctx.attempt == 1:
            raise ValueError("not today")

    handle = await job.enqueue()
    await work_off(app)
    await bounded(handle.result())
    text, notice = texts
    assert "Plan: 2 of 3 steps are done." in text
    assert "Continue from step 3 of 3: `send`. Do not repeat completed steps." in text
    assert "Restored: 2 of 3 steps. Next: step 3 of 3." in notice
