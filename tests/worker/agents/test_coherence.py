"""Coherence checks, stored findings, and the policies that follow."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

import anyio
import pytest
from perdure import Agent, AgentState, App, Coherence, Context, PlanStep, Retry, Snooze, State, TaskHandle
from perdure.queues.delivery.checkpoint import Entry
from perdure.worker.agents.coherence.checks import RecentCall, View, run_checks
from perdure.worker.agents.coherence.findings import FINDINGS, StoredFindings
from perdure.worker.durable.checkpoint_writer import CheckpointWriter
from perdure.worker.durable.run import Run

from tests.support.command_line import Answer, call
from tests.support.workers import bounded, history, letter, recorded_steps, running_worker, wait_until, work_off

pytestmark = pytest.mark.app(grace=0.2)

STATE: dict[str, Any] = {"goal": "g", "current": None}
ONCE = Retry(max_attempts=1)


def wrong(state: dict[str, Any] | None = None, coherence: Coherence | None = None, **view: Any) -> dict[str, str]:
    """Return the details of the findings, by check."""
    found = run_checks(View({**STATE, **(state or {})}, **{"goal": "g", **view}), coherence or Coherence())
    return {one.check: one.detail for one in found}


# the checks


def test_a_coherent_agent_has_no_findings() -> None:
    assert wrong() == {}
    calls = [RecentCall("search", f'{{"q":{number}}}') for number in range(20)]
    assert wrong({"current": "think"}, calls=calls, sentences=[RecentCall.said("I am done.")] * 4, idle=1799.0) == {}


def test_missing_progress_is_found() -> None:
    assert wrong({"current": "a"}, idle=1801.0) == {"progress": "no progress in step 'a' for more than 30 minutes"}
    assert "progress" in wrong(coherence=Coherence(stuck_minutes=0.5), idle=31.0)


def test_repeated_calls_are_found() -> None:
    same, other = RecentCall("search", '{"q":1}'), RecentCall("search", '{"q":2}')
    assert wrong(calls=[same] * 4) == {}
    reported = 'search({"q":1}) was called 5 times in the last 5 calls'
    assert wrong(calls=[same] * 5) == {"repetition": reported}
    assert "5 times in the last 9" in wrong(calls=[same, same, other, other] * 2 + [same])["repetition"]
    assert wrong(calls=[same] * 5 + [RecentCall("read", str(number)) for number in range(16)]) == {}
    assert wrong(calls=[same] * 2, coherence=Coherence(repeats=2, window=2)).keys() == {"repetition"}


def test_long_calls_are_compared_by_digest() -> None:
    large = {"text": "x" * 1_000_000, "a": 1}
    call = RecentCall.of("read", large)
    assert call == RecentCall.of("read", dict(reversed(large.items())))
    assert call != RecentCall.of("read", {**large, "text": "x" * 999_999 + "y"})
    assert len(repr(call)) < 300
    assert "was called 5 times" in wrong(calls=[call] * 5)["repetition"]
    assert len(wrong(calls=[call] * 5)["repetition"]) < 300


def test_calls_are_repeated_if_their_arguments_are_equal() -> None:
    calls = [RecentCall.of("search", {"q": "file", "n": 7}), RecentCall.of("search", {"n": 7, "q": "file"})] * 2
    assert "was called 4 times" in wrong(calls=calls, coherence=Coherence(repeats=4))["repetition"]
    assert wrong(calls=[*calls, RecentCall.of("search", {"q": "File", "n": 7})]) == {}
    assert wrong(calls=[RecentCall.of("search", {"q": "file", "page": number}) for number in range(20)]) == {}


def test_repeated_sentences_are_found() -> None:
    said = [RecentCall.said("Let me\nlook again")] * 5
    assert wrong(sentences=said) == {"repetition": "'Let me look again' was said 5 times in the last 5 messages"}
    assert wrong(sentences=[RecentCall.said(f"I read page {number}") for number in range(20)]) == {}


@pytest.mark.parametrize(
    ("check", "policy"),
    [("progress", "progress"), ("repetition", "repetition"), ("judge", "judged"), ("own", "custom")],
)
def test_a_check_can_be_off(check: str, policy: str) -> None:
    def own(view: View) -> str:
        return f"the goal is {view.goal}"

    view: dict[str, Any] = {"calls": [RecentCall("a", "{}")] * 9, "idle": 9999.0, "verdict": "it plods"}
    every = {"progress", "repetition", "judge", "own"}
    assert wrong(coherence=Coherence(checks=(own,)), **view).keys() == every
    off: dict[str, Any] = {policy: "off"}
    assert wrong(coherence=Coherence(checks=(own,), **off), **view).keys() == every - {check}


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"progress": "ignore"}, "progress must be one of off, warn, hand_off, bury, got 'ignore'"),
        ({"stuck_minutes": 0}, "stuck_minutes must be more than 0, got 0"),
        ({"repeats": 1}, r"repeats must be from 2 to window \(20\), got 1"),
        ({"repeats": 30}, r"repeats must be from 2 to window \(20\), got 30"),
    ],
)
def test_invalid_settings_raise(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Coherence(**settings)


def test_findings_of_another_version_are_ignored() -> None:
    for data in (b"", b"{", b'{"v":2,"findings":[]}', b'{"findings":7}', None):
        assert StoredFindings.decode(data) == StoredFindings()


# a running agent


class Looping(Agent[AgentState]):
    """An agent that calls one tool `times` times in its first step, and others in its second."""

    times: ClassVar[int] = 8
    coherence: ClassVar[Coherence] = Coherence()

    async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
        return [PlanStep(key="first", title="circle"), PlanStep(key="second", title="move on")]

    async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> Any:
        for number in range(self.times if step.key == "first" else 30):
            await ctx.tool("search", self.search, "same" if step.key == "first" else str(number))
            await asyncio.sleep(0)
        return 0

    def search(self, query: str) -> str:
        return query

    async def finish(self, ctx: Context, state: AgentState) -> str:
        return "finished"


def keeps_goal(view: View) -> str | None:
    return None if view.state["goal"] == view.goal else f"the goal is {view.state['goal']!r}"


def agent(app: App, kind: type[Agent[Any]], **coherence: Any) -> Any:
    fresh = type("Fresh", (kind,), {"coherence": Coherence(**coherence)})
    return app.agent(name="circling", retry=ONCE)(fresh)


async def incoherent(handle: TaskHandle[Any]) -> list[tuple[str, str]]:
    found = [event.data for event in await history(handle) if event.type == "incoherent"]
    return [(data["check"], data.get("policy", "warn")) for data in found]


async def command(app: App, *args: str) -> Answer:
    where = ("--redis-url", app.settings.redis_url, "--namespace", app.settings.namespace)
    return await anyio.to_thread.run_sync(lambda: call(*args, *where))


@pytest.mark.integration
async def test_a_finding_is_logged_once_and_removed_when_it_no_longer_holds(app: App) -> None:
    seen: list[str] = []

    class Shown(Looping):
        async def replan(self, ctx: Context, state: AgentState) -> None:
            if not seen:
                seen.append((await command(app, "task", "show", ctx.task_id)).out)

    handle = await agent(app, Shown).enqueue("search")
    await work_off(app)
    assert await bounded(handle.result()) == "finished"
    assert await incoherent(handle) == [("repetition", "warn")]
    assert "incoherent" in seen[0]
    assert 'repetition: search({"query":"same"}) was called 5 times in the last' in seen[0]
    assert f"s:{FINDINGS}" not in await recorded_steps(app, handle)
    assert (await command(app, "task", "show", handle.id, "--json")).json["incoherent"] == []


@pytest.mark.integration
async def test_checks_without_new_findings_write_nothing(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    put = CheckpointWriter.put

    async def noted(recorder: CheckpointWriter, *entries: Entry, **options: Any) -> None:
        written.extend(entry.kind for entry in entries if entry.step == FINDINGS)
        await put(recorder, *entries, **options)

    monkeypatch.setattr(CheckpointWriter, "put", noted)
    await agent(app, Looping, repetition="off").enqueue("search")
    await work_off(app)
    assert written == []
    await app.agent(name="held")(type("Held", (Looping,), {"times": 20})).enqueue("search")
    await work_off(app)
    assert written == ["saved", "drop"]


@pytest.mark.integration
async def test_a_replay_by_a_person_suspends_the_bury_policy(app: App) -> None:
    looping = agent(app, Looping, repetition="bury")
    handle = await looping.enqueue("search")
    await work_off(app)
    found = await letter(app, handle)
    assert found.reason == "incoherent"
    assert found.error == "perdure.worker.errors.Incoherent"
    assert "agent 'circling' failed its coherence checks: repetition: search(" in found.message
    assert await incoherent(handle) == [("repetition", "bury")]
    assert (await command(app, "dlq", "replay", handle.id)).code == 0
    await work_off(app)
    assert await bounded(handle.result()) == "finished"
    assert await incoherent(handle) == [("repetition", "bury")]


@pytest.mark.integration
async def test_calls_before_a_fresh_replay_do_not_count(app: App) -> None:
    class Circling(Looping):
        coherence: ClassVar[Coherence] = Coherence(repetition="bury")

    handle = await app.agent(name="circling", retry=ONCE)(Circling).enqueue("search")
    await work_off(app)
    assert (await letter(app, handle)).reason == "incoherent"
    Circling.times = 2  # as after a repair of the agent
    assert (await command(app, "dlq", "replay", handle.id, "--fresh")).code == 0
    await work_off(app)
    assert await bounded(handle.result()) == "finished"


@pytest.mark.integration
async def test_a_finding_that_a_person_saw_stays_known_in_later_runs(app: App) -> None:
    class Elsewhere(Looping):
        async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> Any:
            state.goal = "another"
            if step.key == "second":
                for number in range(100):  # so that the replay is far back in the log
                    await ctx.discover(f"fact {number}")
                if step.attempts == 1:
                    raise ValueError("not yet")

    kind = type("Fresh", (Elsewhere,), {"coherence": Coherence(checks=(keeps_goal,), custom="bury")})
    handle = await app.agent(name="circling", retry=Retry(base=0.0))(kind).enqueue("search")
    await work_off(app)
    assert (await letter(app, handle)).reason == "incoherent"
    assert (await command(app, "dlq", "replay", handle.id)).code == 0
    await work_off(app)
    assert await bounded(handle.result()) == "finished"
    assert await incoherent(handle) == [("keeps_goal", "bury")]


@pytest.mark.integration
async def test_hand_off_parks_the_task_until_a_message(app: App) -> None:
    handle = await agent(app, Looping, repetition="hand_off").enqueue("search")
    async with running_worker(app):
        await wait_until(lambda: has_state(handle, State.WAITING), "it is parked")
        await handle.send("go on", sender="ada")
        assert await bounded(handle.result()) == "finished"
    assert await incoherent(handle) == [("repetition", "hand_off")]
    assert [event.data["after"] for event in await history(handle) if event.type == "resumed"] == ["wait"]


async def has_state(handle: TaskHandle[Any], state: State) -> bool:
    return await handle.status() is state


@pytest.mark.integration
async def test_the_next_run_carries_out_the_policy_of_a_run_that_died(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    died: list[int] = []
    fail = Run.fail

    async def die_first(run: Run, error: Exception, *, grace: float | None = None) -> NoReturn:
        if not died:
            died.append(1)
            raise Snooze(0)
        await fail(run, error, grace=grace)

    monkeypatch.setattr(Run, "fail", die_first)

    class Elsewhere(Looping):
        async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> Any:
            state.goal = "another"
            return 0

    handle = await agent(app, Elsewhere, checks=(keeps_goal,), custom="bury").enqueue("search")
    await work_off(app)
    found = await letter(app, handle)
    assert found.reason == "incoherent"
    assert "keeps_goal: the goal is 'another'" in found.message
    assert await incoherent(handle) == [("keeps_goal", "bury")]
    assert died


@pytest.mark.integration
async def test_calls_of_earlier_runs_count(app: App) -> None:
    class Failing(Looping):
        async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> Any:
            if step.key == "second":
                return
            for _ in range(3 * step.attempts):  # those of the first attempt are in the checkpoint
                await ctx.tool("search", self.search, "same")
            if step.attempts == 1:
                raise ValueError("not yet")

    kind = type("Fresh", (Failing,), {"coherence": Coherence()})
    handle = await app.agent(name="circling", retry=Retry(base=0.0))(kind).enqueue("search")
    await work_off(app)
    assert await bounded(handle.result()) == "finished"
    assert await incoherent(handle) == [("repetition", "warn")]


@pytest.mark.integration
async def test_a_step_without_progress_is_cancelled(app: App) -> None:
    class Stuck(Looping):
        async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> Any:
            await ctx.step("hang", anyio.sleep_forever)

    handle = await agent(app, Stuck, progress="bury", stuck_minutes=0.002).enqueue("search")
    await work_off(app)
    found = await letter(app, handle)
    assert (found.reason, await incoherent(handle)) == ("incoherent", [("progress", "bury")])
    assert "no progress in step 'first' for more than 0.002 minutes" in found.message


@pytest.mark.integration
async def test_no_step_starts_after_a_policy_ends_the_run(app: App) -> None:
    """The handler does not yield to the event loop between two steps."""
    calls: list[str] = []

    class Tireless(Looping):
        async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> Any:
            while True:
                await ctx.tool("search", calls.append, "same")

    app.configure(grace=1000.0)
    handle = await agent(app, Tireless, repetition="bury").enqueue("search")
    await work_off(app)
    assert (await letter(app, handle)).reason == "incoherent"
    assert 5 <= len(calls) <= 10


@pytest.mark.integration
async def test_worker_health_lists_incoherent_runs(app: App) -> None:
    go_on = asyncio.Event()

    class Held(Looping):
        async def finish(self, ctx: Context, state: AgentState) -> str:
            await go_on.wait()
            return "finished"

        async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> Any:
            state.goal = "another"

    handle = await agent(app, Held, checks=(keeps_goal,)).enqueue("search")
    async with running_worker(app) as worker:
        await wait_until(lambda: is_confused(worker.health), "the report names it")
        report = worker.health()
        [found] = report.incoherent
        assert (found.id, found.task, found.checks) == (handle.id, "circling", ("keeps_goal",))
        assert (report.coherent, report.live) == (False, True)
        assert type(report).from_summary(report.summary()) == report
        go_on.set()
        assert await bounded(handle.result()) == "finished"
        await wait_until(lambda: is_coherent(worker.health), "a report without findings")


async def is_confused(report: Callable[[], Any]) -> bool:
    return not report().coherent


async def is_coherent(report: Callable[[], Any]) -> bool:
    return bool(report().coherent)
