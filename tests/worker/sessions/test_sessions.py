"""Sessions: a conversation with an agent over tasks, workers and failures."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, ClassVar

import pytest
from perdure import (
    Agent,
    AgentState,
    App,
    Context,
    Ephemeral,
    InvalidArguments,
    PayloadTooLarge,
    PlanStep,
    Retry,
    Settings,
    State,
    TaskCancelled,
    TaskFailed,
)
from perdure.context import Commitment
from perdure.deadletter.replay import Replay, replay
from perdure.queues.errors import ConfigurationError, SessionError, SessionFailed, SessionNotFound
from perdure.queues.sessions.record import SessionAddress, SessionCorrection, SessionMessage, parse_turn_id
from perdure.queues.sessions.removal import forget_idle_sessions, forget_task
from perdure.queues.sessions.turns import SessionTurnEnd, check_session, due_sessions, end_turn, store_correction
from perdure.worker.agents.journal.history import CannotCorrect, state_at
from perdure.worker.agents.journal.snapshot import encode_snapshot
from perdure.worker.errors import BadSnapshot, StateMismatch
from perdure.worker.session import Session, TurnHandle
from pydantic import Field

from tests.support.runs import address_of, current_run
from tests.support.workers import letter, redis_command, running_worker, wait_until, work_off

pytestmark = [pytest.mark.integration, pytest.mark.app("sessions", check_state=True, lease=30.0)]


class Notes(AgentState):
    """Messages of a user, over all turns."""

    user: str
    said: list[str] = Field(default_factory=list)
    token: Annotated[str, Ephemeral] = "none"


class Assistant(Agent[Notes]):
    """Remembers each message; 'fail' fails until `broken` is False."""

    broken: ClassVar[bool] = True
    running: ClassVar[list[str]] = []

    async def plan(self, ctx: Context, state: Notes) -> list[PlanStep]:
        return [PlanStep(key="listen", title="listen")]

    async def act(self, ctx: Context, state: Notes, step: PlanStep) -> int:
        assert ctx.headers["session"] not in self.running, "two turns at once"
        self.running.append(ctx.headers["session"])
        await asyncio.sleep(0)
        self.running.remove(ctx.headers["session"])
        if state.goal.startswith("fail") and type(self).broken:
            raise ValueError("it is broken")
        if state.goal.startswith("promise"):
            due = datetime.now(UTC) + timedelta(seconds=float(state.goal.split()[1]))
            state.commitments.append(Commitment(what="call\n# back", to="ada", due=due))
        if state.goal.startswith("lose"):
            await current_run(ctx).gateway.command("HSET", state.goal.split()[1], "turn", 0)
        state.said.append(state.goal)
        return len(state.said)

    async def finish(self, ctx: Context, state: Notes) -> str:
        return f"{state.user} ({state.token}) said {len(state.said)} things in {len(state.messages)} messages"


@pytest.fixture
def app(app: App) -> App:
    Assistant.broken = True
    app.agent(Assistant, retry=Retry(max_attempts=1))
    return app


async def replay_turn(app: App, turn: TurnHandle) -> None:
    handle = await app.producer.find(turn.task_id)
    assert handle is not None
    assert await replay(app.producer.gateway, await letter(app, handle), Replay())


async def contents(session: Session[Any]) -> list[tuple[int, str, str, str]]:
    return [(one.turn, one.role, one.content, one.status) async for one in session.history()]


async def test_the_state_carries_over_from_turn_to_turn_and_turns_run_in_order(app: App) -> None:
    session = app.session(Assistant, "user-42", user="ada", token="t1")
    turns = [await session.send(f"message {number}") for number in range(5)]
    assert [turn.number for turn in turns] == [1, 2, 3, 4, 5]
    assert [one[3] for one in await contents(session)] == ["running", *["waiting"] * 4]
    async with running_worker(app):
        answers = [await turn.result(30) for turn in turns]
    assert answers == [f"ada (t1) said {n} things in {2 * n - 1} messages" for n in range(1, 6)]
    state = await session.state()
    assert (state.said, state.user, state.token) == ([f"message {n}" for n in range(5)], "ada", "none")
    assert [one.role for one in state.messages] == ["user", "assistant"] * 5
    assert (state.goal, state.plan, state.results) == ("", [], {})
    history = await contents(session)
    assert [one[2] for one in history[0::2]] == [f"message {n}" for n in range(5)]
    assert [one[2] for one in history[1::2]] == answers
    assert (await session.record()).status == "idle"


async def test_an_idle_session_has_no_task_and_is_continued_by_another_worker(app: App) -> None:
    session = app.session(Assistant, "user-42", user="ada")
    first = await session.send("one")
    await work_off(app)
    assert await first.result(5) == "ada (none) said 1 things in 1 messages"
    partition = app.producer.namespace.partition("sessions")
    assert await redis_command(app, "XLEN", partition.ready) == 0
    assert await redis_command(app, "PTTL", partition.record(first.task_id)) > 0
    again = app.session(app.agents["assistant"], "user-42", user="another", token="t2")
    second = await again.send("two")
    await work_off(app)
    assert await second.result(5) == "ada (t2) said 2 things in 3 messages"  # the first user stays, the token does not


@pytest.mark.parametrize("lost", ["before the run", "before its end"])
async def test_a_turn_whose_claim_redis_has_lost_waits_until_it_is_claimed_again(app: App, lost: str) -> None:
    """A sender repeats the write of the task after a failover, and the replica does not have the claim before it."""
    session = app.session(Assistant, "user-42", user="ada")
    key = address_of(app, "assistant", session).session
    turn = await session.send("message" if lost == "before the run" else f"lose {key}")
    if lost == "before the run":
        await redis_command(app, "HSET", key, "turn", 0)
    handle = await app.producer.find(turn.task_id)
    assert handle is not None

    async def waits() -> bool:
        return await handle.status() is State.SCHEDULED

    async with running_worker(app):
        await wait_until(waits, "the task waits for the claim")
        await redis_command(app, "HSET", key, "turn", 1)
        assert (await turn.result(30)).startswith("ada (none) said 1 things")
    assert (await session.record()).status == "idle"
    assert len((await session.state()).said) == 1


async def test_a_turn_has_the_message_of_the_session_if_redis_lost_the_one_of_its_task(app: App) -> None:
    """A failover loses a message between the write of it and that of its task; the next one gets its number."""
    session = app.session(Assistant, "user-42", user="ada")
    key = address_of(app, "assistant", session).session
    await session.send("first")
    await work_off(app)
    before = [part for pair in (await raw_fields(app, key)).items() for part in pair]
    lost = await session.send("lost")
    await redis_command(app, "DEL", key)
    await redis_command(app, "HSET", key, *before)
    turn = await session.send("kept")
    assert turn.task_id == lost.task_id
    await work_off(app)
    await turn.result(5)
    state = await session.state()
    assert state.said == ["first", "kept"]
    assert [one.content for one in state.messages if one.role == "user"] == ["first", "kept"]


async def raw_fields(app: App, key: str) -> dict[bytes, bytes]:
    fields = await redis_command(app, "HGETALL", key)
    return fields if isinstance(fields, dict) else dict(zip(fields[::2], fields[1::2], strict=True))


async def test_sessions_are_apart_by_id_and_inputs_are_checked(app: App) -> None:
    one, other = app.session(Assistant, "a", user="ada"), app.session(Assistant, "b", user="bob")
    turns = [await one.send("x"), await other.send("y"), await one.send("z")]
    await work_off(app)
    assert [(await turn.result(5))[:5] for turn in turns] == ["ada (", "bob (", "ada ("]
    with pytest.raises(InvalidArguments, match="user"):
        await app.session(Assistant, "c").send("x")
    with pytest.raises(InvalidArguments, match=r"the session has an unknown input 'usr'; known are: .*user"):
        app.session(Assistant, "c", usr="ada")
    with pytest.raises(ValueError, match="1 to 256 printable characters"):
        app.session(Assistant, "a\nb")
    with pytest.raises(SessionNotFound, match="'d' of agent 'assistant'"):
        await app.session(Assistant, "d", user="x").state()


async def test_an_agent_that_is_not_registered_once_is_refused(app: App) -> None:
    class Other(Assistant):
        pass

    with pytest.raises(ConfigurationError, match="is not registered"):
        app.session(Other, "a")
    app.agent(Assistant, name="second")
    with pytest.raises(ConfigurationError, match="is registered as assistant, second"):
        app.session(Assistant, "a")


async def test_a_message_that_is_sent_again_under_its_id_is_stored_once(app: App) -> None:
    session = app.session(Assistant, "a", user="ada")
    first = await session.send("x", message_id="m1")
    again = await session.send("x", message_id="m1")
    assert (first.number, first.task_id) == (again.number, again.task_id)
    await work_off(app)
    assert (await session.send("x", message_id="m1")).number == 1
    assert (await session.state()).said == ["x"]


async def test_a_failed_turn_stops_the_session_until_it_is_replayed(app: App) -> None:
    session = app.session(Assistant, "a", user="ada")
    failed, waiting = await session.send("fail"), await session.send("next")
    async with running_worker(app):
        with pytest.raises(TaskFailed, match="it is broken"):
            await failed.result(30)
        with pytest.raises(SessionFailed, match="stopped at turn 1"):
            await waiting.result(30)
        with pytest.raises(SessionFailed, match=f"perdure dlq replay {failed.task_id}"):
            await session.send("more")
        assert [one[3] for one in await contents(session)] == ["attempts_exhausted", "waiting"]
        Assistant.broken = False
        await replay_turn(app, failed)
        assert await failed.result(30) == "ada (none) said 1 things in 1 messages"
        note = await failed.notice()
        assert note.startswith("(This work failed at ")
        assert await waiting.result(30) == "ada (none) said 2 things in 3 messages"


async def test_the_state_is_corrected_in_a_turn_that_stopped(app: App) -> None:
    session = app.session(Assistant, "a", user="ada")
    with pytest.raises(SessionNotFound):
        await session.correct({"user": "bob"})
    async with running_worker(app):
        turn = await session.send("fail")
        with pytest.raises(TaskFailed):
            await turn.result(30)
        assert (await session.correct({"user": "bob"}, by="carl")).task_id == turn.task_id
        Assistant.broken = False
        await replay_turn(app, turn)
        assert await turn.result(30) == "bob (none) said 1 things in 2 messages"
        with pytest.raises(SessionError, match="no turn of session 'a' of agent 'assistant' is running"):
            await session.correct({}, confirm=True)
    assert (await session.state()).user == "bob"
    assert "The state was corrected by `carl`" in (await session.state()).messages[1].content


async def test_the_state_of_an_idle_session_is_corrected(app: App) -> None:
    session = app.session(Assistant, "a", user="ada")
    async with running_worker(app):
        await (await session.send("one")).result(30)
        sent = await session.correct({"user": "bob"}, by="carl", message_id="c1")
        assert (await session.correct({"user": "bob"}, by="carl", message_id="c1")) == sent
        await session.correct({"said.0": "first"})
        assert [(await session.state()).user, (await session.state()).said] == ["bob", ["first"]]
        for changes, error in (({"user": 1}, StateMismatch), ({"name": "x"}, CannotCorrect), ({}, ValueError)):
            with pytest.raises(error):
                await session.correct(changes)
        turn = await session.send("two")
        assert turn.task_id == sent.task_id
        assert await turn.result(30) == "bob (none) said 2 things in 5 messages"
    state = await session.state()
    assert state.said == ["first", "two"]
    corrections = [one.content for one in state.messages if "was corrected" in one.content]
    assert ["by `carl`" in one for one in corrections] == [True, False]
    handle = await app.producer.find(turn.task_id)
    assert handle is not None
    events = [one.data async for one in handle.events(follow=False) if one.type == "corrected"]
    assert [(one.get("by", ""), one["paths"]) for one in events] == [("carl", ["user"]), ("", ["said.0"])]
    assert (await session.record()).corrections is None


async def test_a_correction_waits_for_the_turn_that_stores_a_state(app: App) -> None:
    """A turn that fails or is cancelled stores none; its correction is not lost with its inbox."""
    session = app.session(Assistant, "a", user="ada")
    async with running_worker(app):
        await (await session.send("one")).result(30)
        await session.correct({"user": "bob"})
        with pytest.raises(TaskFailed):
            await (await session.send("fail")).result(30)
        assert (await session.correct({"said.0": "first"})).state is State.DEAD
        assert (await session.state()).said == ["first"]
        turn = await session.send("two", skip_failed=True)
        assert await turn.result(30) == "bob (none) said 2 things in 5 messages"
    assert (await session.state()).said == ["first", "two"]


async def test_a_correction_of_a_turn_that_no_longer_fits_is_refused(app: App) -> None:
    """The state may have changed between the check of a correction and the turn, such as by a deploy."""
    session = app.session(Assistant, "a", user="ada")
    async with running_worker(app):
        await (await session.send("one")).result(30)
    record = await session.record()
    correction = SessionCorrection("c1", "carl", {"user": 1})
    assert await store_correction(app.producer.gateway, record, correction) == "stored"
    assert (await session.state()).user == "ada"
    async with running_worker(app):
        turn = await session.send("two")
        assert await turn.result(30) == "ada (none) said 2 things in 3 messages"
    handle = await app.producer.find(turn.task_id)
    assert handle is not None
    refused = [one.data async for one in handle.events(follow=False) if one.type == "correction_refused"]
    assert [(one["by"], one["wanted"]) for one in refused] == [("carl", {"user": 1})]


async def test_corrections_at_the_start_of_a_turn_are_applied_once(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each read of an idle session is followed by the claim of a turn, so the correction goes to its task instead."""
    session = app.session(Assistant, "a", user="ada")
    async with running_worker(app):
        await (await session.send("one")).result(30)
    turns: list[TurnHandle] = []

    async def store(*args: Any, **options: Any) -> Any:
        if not turns:
            turns.append(await session.send("two"))
        return await store_correction(*args, **options)

    monkeypatch.setattr("perdure.worker.session.store_correction", store)
    sent = await session.correct({"user": "bob"})
    assert (sent.task_id, sent.state) == (turns[0].task_id, State.QUEUED)
    async with running_worker(app):
        assert await turns[0].result(30) == "bob (none) said 2 things in 4 messages"


async def test_a_failed_turn_is_passed_over_and_its_replay_is_refused(app: App) -> None:
    session = app.session(Assistant, "a", user="ada")
    failed, waiting = await session.send("fail"), await session.send("next")
    async with running_worker(app):
        with pytest.raises(TaskFailed):
            await failed.result(30)
        last = await session.send("last", skip_failed=True)
        assert await waiting.result(30) == "ada (none) said 1 things in 1 messages"
        assert await last.result(30) == "ada (none) said 2 things in 3 messages"
        with pytest.raises(TaskFailed, match="attempts_exhausted"):
            await failed.result(30)
        Assistant.broken = False
        await replay_turn(app, failed)
        handle = await app.producer.find(failed.task_id)
        assert handle is not None
        with pytest.raises(TaskFailed, match="turn 1 of its session has ended or was passed over; nothing was run"):
            await handle.result(30)
    assert (await session.state()).said == ["next", "last"]
    assert (await session.record()).status == "idle"
    assert [(one[1], one[3]) for one in await contents(session)][:2] == [
        ("user", "attempts_exhausted"),
        ("user", "answered"),
    ]


async def test_a_cancelled_turn_is_passed_over(app: App) -> None:
    session = app.session(Assistant, "a", user="ada")
    cancelled, waiting = await session.send("one"), await session.send("two")
    handle = await app.producer.find(cancelled.task_id)
    assert handle is not None
    assert await handle.cancel() is State.CANCELLED
    record = await session.record()
    assert (record.ended, record.turn, record.status) == (1, 2, "running"), "the cancellation has ended the turn"
    async with running_worker(app):
        assert await waiting.result(30) == "ada (none) said 1 things in 1 messages"
    with pytest.raises(TaskCancelled):
        await cancelled.result(5)


async def make_due(app: App, address: SessionAddress) -> None:
    """Let the time at which a worker looks at the session pass."""
    await redis_command(app, "ZADD", address.partition.due, "XX", 1, address.digest)


async def test_the_task_of_a_turn_is_stored_by_a_worker_if_the_sender_died(app: App) -> None:
    session = app.session(Assistant, "a", user="ada")
    turn = await session.send("one")
    partition = app.producer.namespace.partition("sessions")
    for key in (partition.record(turn.task_id), partition.ready):  # as if the sender had died before it stored the task
        await redis_command(app, "DEL", key)
    assert await due_sessions(app.producer.gateway, app.producer.namespace) == []
    address = address_of(app, "assistant", session)
    await make_due(app, address)
    assert await due_sessions(app.producer.gateway, app.producer.namespace) == [address]
    await check_session(app.producer.gateway, address)
    await check_session(app.producer.gateway, address)
    assert await redis_command(app, "XLEN", partition.ready) == 1
    await work_off(app)
    assert await turn.result(5) == "ada (none) said 1 things in 1 messages"


async def test_a_later_message_stores_the_lost_task_of_the_turn_before_it(app: App) -> None:
    session = app.session(Assistant, "a", user="ada")
    first = await session.send("one")
    partition = app.producer.namespace.partition("sessions")
    for key in (partition.record(first.task_id), partition.ready):
        await redis_command(app, "DEL", key)
    second = await session.send("two")
    await work_off(app)
    assert [await first.result(5), await second.result(5)] == [
        "ada (none) said 1 things in 1 messages",
        "ada (none) said 2 things in 3 messages",
    ]


async def test_the_task_of_a_turn_that_is_stored_again_after_it_expired_runs_nothing(app: App) -> None:
    session = app.session(Assistant, "a", user="ada")
    turn = await session.send("one")
    partition = app.producer.namespace.partition("sessions")
    stored = (await redis_command(app, "XRANGE", partition.ready, "-", "+"))[0][1]
    await work_off(app)
    assert await redis_command(app, "DEL", partition.record(turn.task_id), partition.steps(turn.task_id)) == 2
    await redis_command(app, "XADD", partition.ready, "*", *stored)
    entry = (await redis_command(app, "XRANGE", partition.ready, "-", "+"))[0][0]
    await redis_command(app, "HSET", partition.record(turn.task_id), "state", "queued", "entry", entry)
    await work_off(app)
    handle = await app.producer.find(turn.task_id)
    assert handle is not None
    with pytest.raises(TaskFailed, match="turn 1 of its session has ended"):
        await handle.result(5)
    assert (await session.state()).said == ["one"]
    assert (await session.record()).status == "idle"


async def test_a_late_end_of_a_turn_changes_nothing(app: App) -> None:
    session = app.session(Assistant, "a", user="ada")
    turns = [await session.send("one"), await session.send("two")]
    await work_off(app)
    before, first = await session.record(), parse_turn_id(turns[0].task_id)
    assert first is not None
    late = SessionTurnEnd("answered", b'"late"', encode_snapshot({"said": ["late"]}, 1, "assistant"))
    assert await end_turn(app.producer.gateway, address_of(app, "assistant", session), first, late)
    assert await session.record() == before
    assert await turns[0].result(5) == "ada (none) said 1 things in 1 messages"


async def test_a_forgotten_session_leaves_nothing_and_a_new_one_starts_from_nothing(app: App) -> None:
    session = app.session(Assistant, "a", user="ada")
    await session.send("one")
    await work_off(app)
    running = await session.send("two")
    assert await session.forget()
    assert not await session.forget()
    with pytest.raises(SessionNotFound):
        await running.result(5)
    with pytest.raises(SessionNotFound):
        await contents(session)
    address = address_of(app, "assistant", session)
    for key in (*address.keys,):
        assert await redis_command(app, "EXISTS", key) == 0
    turn = await session.send("three")
    await work_off(app)
    assert await turn.result(5) == "ada (none) said 1 things in 1 messages"
    assert turn.number == 1


async def test_an_idle_session_is_deleted_after_its_retention_and_a_running_one_is_kept(app: App) -> None:
    idle, busy = app.session(Assistant, "idle", user="ada"), app.session(Assistant, "busy", user="ada")
    await idle.send("one")
    await work_off(app)
    await busy.send("one")
    gateway, namespace = app.producer.gateway, app.producer.namespace
    assert await forget_idle_sessions(gateway, namespace, 3600) == 0
    for one in (idle, busy):
        address = address_of(app, "assistant", one)
        await redis_command(app, "ZADD", address.partition.timeline, 1, address.digest)
        await redis_command(app, "HSET", address.session, "at", 1)
    assert await forget_idle_sessions(gateway, namespace, 3600) == 1
    assert (await busy.record()).status == "running"
    with pytest.raises(SessionNotFound):
        await idle.record()


async def test_a_commitment_that_falls_due_starts_a_turn_if_the_agent_asks_for_it(app: App) -> None:
    class Caller(Assistant):
        wake_when_due = True

    app.agent(Caller)
    quiet, session = app.session(Assistant, "a", user="ada"), app.session(Caller, "a", user="ada")
    for one in (quiet, session):
        await one.send("promise 0.2")
    await work_off(app)

    async def due() -> list[SessionAddress]:
        return await due_sessions(app.producer.gateway, app.producer.namespace)

    await wait_until(due, "the commitment fell due")
    assert await due() == [address_of(app, "caller", session)]
    await check_session(app.producer.gateway, address_of(app, "assistant", quiet))
    await check_session(app.producer.gateway, address_of(app, "caller", session))
    await check_session(app.producer.gateway, address_of(app, "caller", session))
    await work_off(app)
    found = await contents(session)
    assert [one[:2] for one in found] == [(1, "user"), (1, "assistant"), (2, "system"), (2, "assistant")]
    assert found[2][2].startswith("A commitment fell due at 20")
    assert "\n" not in found[2][2]
    assert "call # back" in found[2][2]
    assert await redis_command(app, "ZCARD", address_of(app, "caller", session).partition.due) == 0
    assert (await quiet.record()).ended == 1


async def test_a_state_of_a_later_version_fails_the_turn_and_stays(app: App) -> None:
    session = app.session(Assistant, "a", user="ada")
    await session.send("one")
    await work_off(app)
    later = b'{"v":99,"n":1,"agent":"assistant","state":{}}'
    await redis_command(app, "HSET", address_of(app, "assistant", session).session, "state", later)
    turn = await session.send("two")
    await work_off(app)
    with pytest.raises(TaskFailed, match="it has version 99; this version of Perdure reads up to 1"):
        await turn.result(5)
    assert await redis_command(app, "HGET", address_of(app, "assistant", session).session, "state") == later
    with pytest.raises(BadSnapshot, match="it has version 99"):
        await session.state()


async def test_a_turn_that_continues_as_another_task_ends_with_its_result(app: App) -> None:
    class Router(Assistant):
        async def act(self, ctx: Context, state: Notes, step: PlanStep) -> int:
            if state.goal == "again" and not ctx.task_id.endswith(".h1"):
                await ctx.continue_as(app.agents["router"])
            if state.goal == "translate":
                await ctx.continue_as("translate", arguments={"text": "hello"})
            return await super().act(ctx, state, step)

    app.agent(Router)

    @app.task
    async def translate(ctx: Context, text: str) -> str:
        return text.upper()

    session = app.session(Router, "a", user="ada")
    again, other, last = [await session.send(text) for text in ("again", "translate", "one")]
    await work_off(app)
    assert await again.result(5) == "ada (none) said 1 things in 1 messages"
    address = address_of(app, "router", session)
    await make_due(app, address)  # the function is no agent of the session: a worker finds its result
    await check_session(app.producer.gateway, address)
    assert await other.result(5) == "HELLO"
    await work_off(app)
    assert await last.result(5) == "ada (none) said 2 things in 3 messages"


async def test_a_turn_that_continues_as_another_agent_keeps_the_state_of_the_session(app: App) -> None:
    class Expert(Assistant):
        async def finish(self, ctx: Context, state: Notes) -> str:
            return f"an expert says {state.goal}"

    class Router(Assistant):
        async def act(self, ctx: Context, state: Notes, step: PlanStep) -> int:
            if state.goal == "expert":
                await ctx.continue_as(app.agents["expert"], arguments={"goal": "yes", "user": "eve"})
            return await super().act(ctx, state, step)

    app.agent(Router)
    app.agent(Expert)
    session = app.session(Router, "a", user="ada")
    turns = [await session.send(text) for text in ("one", "expert", "two")]
    await work_off(app)
    assert [await turn.result(5) for turn in turns[1:]] == [
        "an expert says yes",
        "ada (none) said 2 things in 3 messages",
    ]
    assert (await session.state()).said == ["one", "two"]


async def test_a_state_of_another_agent_is_refused_and_stays(app: App) -> None:
    session = app.session(Assistant, "a", user="ada")
    await session.send("one")
    await work_off(app)
    other = encode_snapshot({"goal": "x", "user": "eve"}, 1, "helper")
    await redis_command(app, "HSET", address_of(app, "assistant", session).session, "state", other)
    problem = "it belongs to agent 'helper', not to 'assistant'"
    with pytest.raises(BadSnapshot, match=problem):
        await session.state()
    with pytest.raises(BadSnapshot, match=problem):
        await session.correct({"user": "bob"})
    turn = await session.send("two")
    await work_off(app)
    with pytest.raises(TaskFailed, match=problem):
        await turn.result(5)
    assert await redis_command(app, "HGET", address_of(app, "assistant", session).session, "state") == other


async def test_the_history_keeps_the_latest_turns_of_a_session(settings: Settings) -> None:
    changed = settings.model_copy(update={"session_turns": 20, "lease": 30.0})
    async with App("sessions", settings=changed) as app:
        app.agent(Assistant)
        session = app.session(Assistant, "a", user="ada")
        turns = [await session.send(f"m{number}") for number in range(120)]
        await work_off(app)
        kept = [one.turn for one in await session_messages(session) if one.role == "user"]
        assert kept == [*range(121 - len(kept), 121)]
        assert 20 <= len(kept) < 60, "Redis trims whole nodes"
        first = await turns[0].result(30)  # from its task
        assert first == "ada (none) said 1 things in 1 messages"
        handle = await app.producer.find(turns[0].task_id)
        assert handle is not None
        await forget_task(app.producer.gateway, handle.partition, handle.id)
        with pytest.raises(TaskFailed, match="no longer in the history"):
            await turns[0].result(30)
        assert len((await session.state()).said) == 120


async def session_messages(session: Session[Any]) -> list[SessionMessage]:
    return [one async for one in session.history()]


async def test_half_a_character_in_a_message_stops_no_session(app: App) -> None:
    session = app.session(Assistant, "a", user="ada")
    turns = [await session.send("half \ud83d"), await session.send("next")]
    await work_off(app)
    assert [await turn.result(30) for turn in turns] == [
        f"ada (none) said {n} things in {2 * n - 1} messages" for n in (1, 2)
    ]
    assert (await session.state()).said == ["half \ufffd", "next"]
    assert (await session_messages(session))[0].content == "half \ufffd"


class Talkative(Agent[AgentState]):
    """Answers at length."""

    async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
        return [PlanStep(key="listen", title="listen")]

    async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> list[str]:
        return [message.content[:2] for message in state.messages]

    async def finish(self, ctx: Context, state: AgentState) -> str:
        return " ".join(state.results["listen"]) + " " + "y" * 3_000


class Brief(Agent[AgentState]):
    """Answers with the last message in short, in the second attempt."""

    async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
        return [PlanStep(key="listen", title="listen")]

    async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> str:
        if ctx.attempt == 1:
            raise ConnectionError("cut off")
        return f"{state.messages[-1].content[0]} {len(state.messages)}"

    async def finish(self, ctx: Context, state: AgentState) -> str:
        return str(state.results["listen"])


async def test_old_messages_leave_a_session_before_its_state_is_too_large(settings: Settings) -> None:
    changed = settings.model_copy(update={"payload_limit": 20_000, "check_state": True, "lease": 30.0})
    async with App("sessions", settings=changed) as app:
        app.agent(Talkative)
        session = app.session(Talkative, "a")
        async with running_worker(app):
            for number in range(9):
                turn = await session.send(f"{number} " + "x" * 3_000)
                known = (await turn.result(30)).split()[:-1]
                assert (known[0], known[-1]) == ("0", str(number)), "the first instructions stay"
        kept = [message.content[:2] for message in (await session.state()).messages]
        assert (kept[0], kept[-2], len(kept) < 10) == ("0 ", "8 ", True)
        assert [one.turn for one in await session_messages(session) if one.role == "user"] == [*range(1, 10)]


async def test_a_message_counts_once_towards_its_limit(settings: Settings) -> None:
    """Though it is the goal of its turn, and a message of the state."""
    changed = settings.model_copy(update={"payload_limit": 20_000, "check_state": True, "lease": 30.0})
    async with App("sessions", settings=changed) as app:
        app.agent(Brief, retry=Retry(max_attempts=2, base=0.0))
        session = app.session(Brief, "a")
        turns = [await session.send(char * size) for char, size in (("a", 15_000), ("b", 3_000))]
        with pytest.raises(PayloadTooLarge, match="the message and the inputs"):
            await session.send("c" * 20_000)
        await work_off(app)
        assert [await turn.result(30) for turn in turns] == ["a 1", "b 3"]
        handle = await app.producer.find(turns[0].task_id)
        assert handle is not None
        past = await state_at(app.producer.gateway, handle.partition, handle.id)
        first = past.state["messages"][0]
        assert (past.state["goal"], first["content"], first["n"]) == ("a" * 15_000, "a" * 15_000, 1)


async def test_a_message_that_does_not_fit_beside_the_first_one_parks_its_turn(settings: Settings) -> None:
    changed = settings.model_copy(update={"payload_limit": 20_000, "check_state": True, "lease": 30.0})
    async with App("sessions", settings=changed) as app:
        app.agent(Talkative)
        session = app.session(Talkative, "a")
        first, turn = await session.send("y" * 8_000), await session.send("z" * 12_000)
        await work_off(app)
        assert (await first.result(30)).endswith("yyy")
        handle = await app.producer.find(turn.task_id)
        assert handle is not None
        async with running_worker(app):

            async def is_parked() -> bool:
                return (await handle.record()).waits == "compaction"

            await wait_until(is_parked, "the turn is parked")
