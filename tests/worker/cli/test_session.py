"""`perdure session`: list, show, send, correct, export, forget."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest
import redis
from perdure import Agent, AgentState, App, Context, PlanStep, Retry, Settings
from perdure.queues import Namespace, Partition, generate_key
from perdure.queues.security.encryption import make_encryptor
from perdure.queues.sessions.record import SessionAddress

from tests.support.command_line import call
from tests.support.workers import running_worker, work_off

pytestmark = pytest.mark.integration


class Echo(Agent[AgentState]):
    """Answers with what it was sent; fails for 'bad'."""

    async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
        return []

    async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> None:
        raise AssertionError("the plan has no steps")

    async def finish(self, ctx: Context, state: AgentState) -> str:
        if state.goal == "bad":
            raise ValueError("bad message")
        return f"echo {state.goal} {len(state.messages)}"


def make_app(settings: Settings) -> App:
    app = App("test", settings=settings)
    app.agent(Echo, retry=Retry(max_attempts=1))
    return app


@pytest.fixture
def work(settings: Settings, environment: None) -> Callable[[], None]:
    """Function that runs all queued tasks."""

    async def run() -> None:
        async with make_app(settings) as app:
            await work_off(app)

    return lambda: anyio.run(run)


def test_a_session_from_its_first_message_until_it_is_forgotten(work: Callable[[], None]) -> None:
    unknown = call("session", "send", "echo", "ada", "one", "--no-wait")
    assert (unknown.code, unknown.out) == (2, "")
    assert "echo" in unknown.err
    assert call("session", "list").err.startswith("perdure: no sessions in namespace")
    work()  # publishes the catalog
    sent = call("session", "send", "echo", "ada", "one\x1b[2J", "--no-wait", "--id", "m1")
    assert sent.err == "perdure: no worker serves queue 'test' now; start one: perdure worker run APP --queues test\n"
    assert call("session", "send", "echo", "ada", "one", "--no-wait", "--id", "m1").ids == sent.ids
    shown = call("session", "show", "echo", "ada", "--json").json
    assert (shown["status"], shown["task"], shown["state"]) == ("running", sent.ids[0], None)
    work()
    second = call("session", "send", "echo", "ada", "-", "--no-wait", "--from", "bob", "--json", stdin=b"two\n").json
    assert second["turn"] == 2
    work()
    listed = call("session", "list")
    assert [word for word in ("agent", "id", "status", "turns", "echo", "ada", "idle") if word not in listed.out] == []
    assert max(map(len, listed.out.splitlines())) <= 80
    (one,) = call("session", "list", "--json", "--agent", "echo").json
    assert (one["turns"], one["status"], one["queue"]) == (2, "idle", "test")
    shown = call("session", "show", "echo", "ada").out
    assert "\x1b[2J" not in shown
    assert '"content": "echo two 3"' in shown
    record, *messages = call("session", "export", "echo", "ada").lines
    assert record["state"]["messages"][2]["content"] == "two"
    assert [(m["turn"], m["role"], m["sender"]) for m in messages] == [
        (1, "user", ""),
        (1, "assistant", ""),
        (2, "user", "bob"),
        (2, "assistant", ""),
    ]
    correct = ("session", "correct", "echo", "ada")
    assert "the state has no field 'context2'" in call(*correct, "--field", "context2=1").err
    assert call(*correct).code == 2
    corrected = call(*correct, "--field", "context.city=Paris", "--by", "eve")
    assert corrected.ids[0].endswith(".3")
    assert "the next turn reads it when it begins" in corrected.err
    shown = call("session", "show", "echo", "ada")
    assert shown.err == 'perdure: the next turn applies a correction by eve: {"context.city":"Paris"}\n'
    assert call("session", "send", "echo", "ada", "three", "--no-wait").ids == corrected.ids
    work()
    shown = call("session", "show", "echo", "ada", "--json").json
    assert (shown["state"]["context"], shown["corrections"]) == ({"city": "Paris"}, [])
    assert "add --yes" in call("session", "forget", "echo", "ada").err
    forgotten = call("session", "forget", "echo", "ada", "--yes")
    assert forgotten.ids == ["ada"]
    assert "'perdure memory forget --all --subject SUBJECT'" in forgotten.err
    assert "'perdure artifacts gc'" in forgotten.err
    assert call("task", "list", "--json").json == []
    assert call("session", "show", "echo", "ada").code == 1
    assert call("session", "list", "--json").json == []


def test_send_waits_for_the_answer_and_names_a_failed_turn(work: Callable[[], None], settings: Settings) -> None:
    stop = threading.Event()

    async def serve() -> None:
        async with make_app(settings) as app, running_worker(app):
            await anyio.to_thread.run_sync(stop.wait)

    server = threading.Thread(target=anyio.run, args=(serve,))
    server.start()
    try:
        send = ("session", "send", "echo", "ada", "--queue", "test", "--timeout", "30")
        assert call(*send, "one").out == "echo one 1\n"
        failed = call(*send, "bad")
        assert failed.code == 1
        assert "bad message" in failed.err
        stopped = call(*send, "two")
        assert (stopped.code, "stopped at turn 2" in stopped.err) == (1, True)
        assert "attempts_exhausted" in call("session", "list").out
        assert call(*send, "two", "--skip-failed", "--json").json["answer"] == "echo two 3"
        assert call(*send, "x", "--inputs", "[]").code == 2
        assert call("session", "send", "echo", "\n", "x").code == 2
    finally:
        stop.set()
        server.join(60)


def test_the_list_continues_after_its_cursor(work: Callable[[], None]) -> None:
    for name in ("a", "b", "c"):
        call("session", "send", "echo", name, "x", "--queue", "test", "--no-wait")
    work()
    first = call("session", "list", "--limit", "2", "--json")
    cursor = first.err.split("--cursor ")[1].strip()
    rest = call("session", "list", "--cursor", cursor, "--json")
    assert sorted(one["id"] for one in first.json + rest.json) == ["a", "b", "c"]
    assert "--cursor" not in rest.err
    assert call("session", "list", "--cursor", "x").code == 2


def test_mistakes_are_named_with_their_remedies(work: Callable[[], None], tmp_path: Path) -> None:
    call("session", "send", "echo", "eve", "one", "--queue", "test", "--no-wait")
    work()  # publishes the catalog
    unfit = call("session", "send", "echo", "eve", "two", "--inputs", '{"langage": "no"}', "--no-wait")
    assert (unfit.code, "langage" in unfit.err) == (2, True)
    file = tmp_path / "identity.json"
    file.write_text("{}")
    stored = call("identity", "set", "ecko", str(file))
    assert stored.out == "1\n"
    assert stored.err == "perdure: stored, but no worker has published an agent 'ecko'; did you mean 'echo'?\n"
    assert call("identity", "show", "echoo").err == (
        "perdure: agent 'echoo' has no identity stored; did you mean 'echo'?\n"
    )
    misspelt = call("session", "show", "ecko", "unknown")
    assert misspelt.err.endswith("; did you mean 'echo'?\n")
    assert "no sessions of agent 'ecko' in namespace" in call("session", "list", "--agent", "ecko").err
    unknown = call("session", "show", "echo", "unknown")
    assert (unknown.code, unknown.out) == (1, "")
    assert "no session 'unknown' of agent 'echo'" in unknown.err
    assert "'perdure session list' lists the sessions" in unknown.err
    inputs = call("session", "send", "echo", "ada", "one", "--inputs", "[]")
    assert (inputs.code, inputs.out) == (2, "")
    assert inputs.err == """perdure: --inputs: must be a JSON object, such as {"root": "src"}, got an array\n"""
    unanswered = call("session", "send", "echo", "ada", "one", "--queue", "test", "--timeout", "0")  # no worker runs
    assert (unanswered.code, unanswered.out) == (1, "")
    assert "turn 1 of the session did not end within " in unanswered.err
    assert "; 'perdure task why turn-" in unanswered.err


@pytest.mark.parametrize(
    ("stored", "problem"),
    [
        (b'{"v": 99}', "it has version 99; this version of Perdure reads up to 1"),
        (b"garbage", "it is not JSON"),
        (b"", "set PERDURE_ENCRYPTION_KEYS"),  # encrypted with another key
    ],
)
def test_a_state_that_cannot_be_read_does_not_hide_the_session(
    work: Callable[[], None], settings: Settings, stored: bytes, problem: str
) -> None:
    call("session", "send", "echo", "ada", "one", "--queue", "test", "--no-wait")
    work()
    address = SessionAddress.of(Namespace(settings.namespace), "echo", "ada")
    owner = Partition(settings.namespace, "~sessions", 0)
    stored = stored or make_encryptor(generate_key(), None).of(owner, address.digest).encrypt("state", b"{}")
    with redis.Redis.from_url(settings.redis_url) as client:
        client.hset(address.session, "state", stored)
    shown = call("session", "show", "echo", "ada", "--json")
    assert (shown.code, shown.json["turns"], shown.json["state"]) == (0, 1, None)
    assert shown.json["state_bytes"] == len(stored)
    assert problem in shown.json["problem"]
    assert problem in shown.err
    assert ("'perdure session forget echo ada' deletes the session" in shown.err) == (stored[:1] in b"{g")
    assert "status" in call("session", "show", "echo", "ada").out
    exported = call("session", "export", "echo", "ada")
    record, *messages = exported.lines
    assert (exported.code, record["state"], [one["content"] for one in messages]) == (1, None, ["one", "echo one 1"])
    assert problem in record["problem"]
    assert "was not exported" in exported.err
