"""Copies of sealed messages and answers, put back by a writer without the key: none is used twice."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest
from perdure import App, Context, Retry, Settings, State, TaskHandle, Worker
from perdure.deadletter.replay import Replay, replay
from perdure.queues import AnswerRefused, ApproverNeeded, ConfigurationError
from perdure.queues.security.approvers import ApproverKey

from tests.support.stored_data import FIRST, with_keys
from tests.support.workers import bounded, history, letter, redis_command, work_off

pytestmark = pytest.mark.integration


@pytest.fixture
def app(settings: Settings) -> App:
    app = App("paid", settings=with_keys(settings, FIRST, required=True))

    @app.task
    async def pay(ctx: Context, read_later: bool = False) -> list[Any]:
        """Take one message of ada for each payment."""
        found: list[Any] = []
        for amount in (7, 700):
            sender = "ada" if amount == 7 or not read_later else "grace"
            found += [[amount, one.content, one.sender] for one in await ctx.inbox(wait=3600, limit=1, sender=sender)]
        return found

    return app


async def stored_messages(app: App, handle: TaskHandle[Any]) -> dict[int, bytes]:
    """Return the stored messages of an inbox by their numbers."""
    fields = await redis_command(app, "HGETALL", handle.partition.inbox(handle.id))
    found = dict(zip(fields[::2], fields[1::2], strict=True))
    return {int(name[2:]): data for name, data in found.items() if name.startswith(b"m:")}


async def plant(app: App, handle: TaskHandle[Any], number: int, data: bytes, digest: str = "ab" * 12) -> None:
    """Put a message into the inbox as the scripts do, and wake the task."""
    at = handle.partition
    sent = int(await redis_command(app, "HINCRBY", at.inbox(handle.id), "sent", 1))
    fields = (f"m:{number}", data, f"n:{sent}", f"{number} {digest}", f"id:{digest}", number, "last", number)
    await redis_command(app, "HSET", at.inbox(handle.id), *fields)
    await redis_command(app, "ZADD", at.due, 1, handle.id)


async def paid_seven(app: App, handle: TaskHandle[Any]) -> tuple[int, bytes]:
    """Let the task use a "yes" of ada; return its number and what a writer without the key has seen of it."""
    await work_off(app)
    sent = await handle.send("yes", sender="ada")
    seen = (await stored_messages(app, handle))[sent.number]
    await work_off(app)
    assert await stored_messages(app, handle) == {}
    assert await handle.status() is State.WAITING
    return sent.number, seen


@pytest.mark.parametrize("place", ["a new number", "its own number", "its own number, last"])
async def test_a_copy_of_a_message_is_not_used_again(app: App, place: str) -> None:
    async with app:
        handle: TaskHandle[Any] = await app.tasks["pay"].enqueue()
        number, seen = await paid_seven(app, handle)
        new = number + 1 if place == "a new number" else number
        await plant(app, handle, new, seen)
        if place == "its own number, last":
            await handle.send("not hers", sender="grace")
        await work_off(app)
        assert await handle.status() is State.WAITING
        await handle.send("also 700", sender="ada")
        await work_off(app)
        assert await bounded(handle.result()) == [[7, "yes", "ada"], [700, "also 700", "ada"]]
        assert new in await stored_messages(app, handle)
        if place == "a new number":
            problems = [one.problem or "" for one in await handle.pending_messages()]
            assert "changed in Redis" in problems[0]


async def test_a_message_that_was_left_is_used_once_later(app: App) -> None:
    """A call that takes another sender's message leaves the one before it, which no copy replaces."""
    async with app:
        handle: TaskHandle[Any] = await app.tasks["pay"].enqueue(read_later=True)
        await work_off(app)
        left = await handle.send("for later", sender="grace")
        number, seen = (await handle.send("yes", sender="ada")).number, b""
        seen = (await stored_messages(app, handle))[number]
        assert number > left.number
        await redis_command(app, "HSET", handle.partition.inbox(handle.id), "m:1", seen)
        await work_off(app)
        assert await bounded(handle.result()) == [[7, "yes", "ada"], [700, "for later", "grace"]]


async def test_concurrent_senders_get_numbers_of_their_own(app: App) -> None:
    async with app:
        handle: TaskHandle[Any] = await app.tasks["pay"].options(delay=3600).enqueue()
        sent = await asyncio.gather(*(handle.send(number, sender="ada") for number in range(50)))
        assert len({one.number for one in sent}) == 50
        assert sorted(one.content for one in await handle.pending_messages()) == list(range(50))
        assert all(one.problem is None for one in await handle.pending_messages())


ADA, EVE = ApproverKey("ada", bytes(range(32))), ApproverKey("eve", bytes(range(1, 33)))


def with_approvers(settings: Settings, *keys: ApproverKey, groups: str = "") -> Settings:
    """Return the settings of workers that know the approvers of these keys."""
    lines = "\n".join([key.public_line for key in keys] + [groups])
    return settings.model_copy(update={"approvers": lines})


def asking(settings: Settings, who: str = "ada") -> App:
    """Return an app whose task asks two questions that look the same."""
    app = App("asked", settings=settings)

    @app.task(retry=Retry(max_attempts=1))
    async def approve(ctx: Context, fails: bool = False) -> list[Any]:
        found: list[Any] = []
        for _ in range(2):
            wait = await ctx.open_wait("approval", bool, who=who, why="Pay?")
            found += [[await wait, wait.by]]
            if fails:
                raise ValueError("after the first answer")
        return found

    return app


async def stored_answer(app: App, handle: TaskHandle[Any], wait: str) -> bytes:
    found: bytes = await redis_command(app, "HGET", handle.partition.inbox(handle.id), f"a:{wait}")
    return found


async def plant_answer(app: App, handle: TaskHandle[Any], wait: str, data: bytes) -> None:
    """Put an answer into the inbox as the script does, and wake the task."""
    at = handle.partition
    await redis_command(app, "HSET", at.inbox(handle.id), f"a:{wait}", data)
    await redis_command(app, "ZADD", at.due, 1, handle.id)


async def dropped(app: App, handle: TaskHandle[Any]) -> list[str]:
    """Return why answers were dropped."""
    return [event.data["why"] for event in await history(handle) if event.type == "answer_dropped"]


async def asked(app: App, **arguments: Any) -> TaskHandle[Any]:
    handle: TaskHandle[Any] = await app.tasks["approve"].enqueue(**arguments)
    await work_off(app)
    assert await handle.status() is State.WAITING
    return handle


async def test_a_copy_of_an_answer_answers_no_other_question(settings: Settings) -> None:
    app = asking(with_keys(settings, FIRST, required=True))
    async with app:
        handle = await asked(app)
        await handle.answer("approval", True, by="ada")
        seen = await stored_answer(app, handle, "approval")
        await work_off(app)
        await plant_answer(app, handle, "approval#2", seen)
        await work_off(app)
        assert await handle.status() is State.WAITING
        (why,) = await dropped(app, handle)
        assert "changed in Redis" in why
        await handle.answer("approval", False, by="grace")
        await work_off(app)
        assert await bounded(handle.result()) == [[True, "ada"], [False, "grace"]]


async def test_an_answer_is_not_one_to_the_same_question_of_a_fresh_run(settings: Settings) -> None:
    app = asking(with_keys(settings, FIRST, required=True))
    async with app:
        handle = await asked(app, fails=True)
        await handle.answer("approval", True, by="ada")
        seen = await stored_answer(app, handle, "approval")
        await work_off(app)
        dead = await letter(app, handle)
        assert await replay(app.producer.gateway, dead, Replay(fresh=True, args=b"{}"))
        await work_off(app)
        assert await handle.status() is State.WAITING
        await plant_answer(app, handle, "approval", seen)
        await work_off(app)
        assert await handle.status() is State.WAITING
        assert await dropped(app, handle) == ["it is an answer to something else than what is asked now"]


async def test_an_early_answer_is_used_once(settings: Settings) -> None:
    app = asking(with_keys(settings, FIRST, required=True))
    async with app:
        handle: TaskHandle[Any] = await app.tasks["approve"].enqueue()
        assert (await handle.answer("approval", True, by="ada")).early
        seen = await redis_command(app, "HGET", handle.partition.inbox(handle.id), "e:approval")
        await work_off(app)
        assert await handle.status() is State.WAITING
        await plant_answer(app, handle, "approval#2", seen)
        await work_off(app)
        assert await handle.status() is State.WAITING
        assert await dropped(app, handle) == ["it came before another wait of this name"]


@pytest.mark.parametrize("sealed", [True, False])
async def test_an_answer_needs_the_signature_of_an_approver(settings: Settings, sealed: bool) -> None:
    """One with the deployment's key, and without that of an approver, cannot answer."""
    settings = with_keys(settings, FIRST, required=True) if sealed else settings
    app, outside = asking(with_approvers(settings, ADA, EVE)), App("outside", settings=settings)
    async with app, outside:
        handle = await asked(app)
        with pytest.raises(ApproverNeeded, match=r"must sign it: set PERDURE_APPROVER_KEY_FILE to .* 'ada'"):
            await (await found(outside, handle)).answer("approval", True, by="ada")
        with pytest.raises(ApproverNeeded, match="approver 'eve' may not answer it: it needs the signature of 'ada'"):
            await handle.answer("approval", True, approver=EVE)
        await handle.answer("approval", True, by="someone else", approver=ADA)
        await work_off(app)
        await handle.answer("approval", False, approver=ADA)
        await work_off(app)
        assert await bounded(handle.result()) == [[True, "ada"], [False, "ada"]]
        assert [event.data["by"] for event in await history(handle) if event.type == "answered"] == ["ada", "ada"]


FORGED: dict[str, tuple[dict[str, Any], str]] = {
    "unsigned": ({"signature": ""}, "no approver has signed it: ada can answer"),
    "no base64": ({"signature": "?"}, "its signature is not one of approver 'ada'"),
    "another value": ({"value": False}, "its signature is not one of approver 'ada'"),
    "another name": ({"by": "eve"}, "approver 'eve' may not answer this question: ada can answer"),
    "an unknown name": ({"by": "mallory"}, "approver 'mallory' is not known here: ada can answer"),
    "another question": ({"question": "f" * 64}, "it is an answer to something else than what is asked now"),
    "an early one": ({"early": True}, "it came before the question, so no approver has signed it for that"),
}


@pytest.mark.parametrize("how", FORGED)
async def test_a_holder_of_the_deployments_key_changes_nothing_of_a_signed_answer(settings: Settings, how: str) -> None:
    changes, expected = FORGED[how]
    app = asking(with_approvers(with_keys(settings, FIRST, required=True), ADA, EVE))
    async with app:
        handle = await asked(app)
        await handle.answer("approval", True, approver=ADA)
        at, digest, data = (await stored_answer(app, handle, "approval")).split(b" ", 2)
        cipher = app.producer.gateway.encryptor.of(handle.partition, handle.id)
        fields = orjson.loads(cipher.decrypt("answer:approval", data)) | changes
        kind = "early:approval" if "early" in changes else "answer:approval"
        sealed = cipher.encrypt(kind, orjson.dumps(fields))
        await plant_answer(app, handle, "approval", b" ".join((at, digest, sealed)))
        await work_off(app)
        assert await handle.status() is State.WAITING
        (why,) = await dropped(app, handle)
        assert why.startswith(expected)


async def test_a_signed_answer_is_for_one_opening_of_one_question_of_one_task(settings: Settings) -> None:
    """The attacker has the deployment's key, so the copies are encrypted for their places."""
    app = asking(with_approvers(with_keys(settings, FIRST, required=True), ADA))
    async with app:
        handle, other = await asked(app), await asked(app)
        await handle.answer("approval", True, approver=ADA)
        at, digest, data = (await stored_answer(app, handle, "approval")).split(b" ", 2)
        encryptor = app.producer.gateway.encryptor
        fields = orjson.loads(encryptor.of(handle.partition, handle.id).decrypt("answer:approval", data))
        await work_off(app)
        for task, wait in ((handle, "approval#2"), (other, "approval")):
            (open_now,) = await task.waits()
            copied = orjson.dumps(fields | {"question": open_now.digest})
            sealed = encryptor.of(task.partition, task.id).encrypt(f"answer:{wait}", copied)
            await plant_answer(app, task, wait, b" ".join((at, digest, sealed)))
        await work_off(app)
        for task in (handle, other):
            assert await task.status() is State.WAITING
            (why,) = await dropped(app, task)
            assert why.startswith("its signature is not one of approver 'ada'")


async def test_members_of_a_group_can_answer_and_an_unknown_name_leaves_it_to_all(settings: Settings) -> None:
    known = with_approvers(settings, ADA, EVE, groups="finance = eve")
    for who, allowed in (("finance", ["eve"]), ("the desk", ["ada", "eve"])):
        app = asking(known.model_copy(update={"namespace": f"{settings.namespace}{len(allowed)}"}), who)
        async with app:
            handle = await asked(app)
            assert (await handle.waits())[0].approvers == allowed
            await handle.answer("approval", True, approver=EVE)
            await work_off(app)
            assert await handle.status() is State.WAITING
            assert await dropped(app, handle) == []


async def test_a_task_cannot_answer_its_own_question(settings: Settings) -> None:
    """Nor can its steps and its tools, in threads too, or under another name."""
    app = App("own", settings=settings)
    refused: list[str] = []

    async def tool(task_id: str) -> None:
        handle = await app.producer.find(task_id)
        assert handle is not None
        for name in ("approval", "approval#1"):
            with pytest.raises(AnswerRefused, match="a task cannot answer its own question") as error:
                await handle.answer(name, True)
            refused.append(str(error.value))
        with pytest.raises(ValueError, match=f"from task {task_id} must be the task itself, got 'ada'"):
            await handle.answer("approval", True, by="ada")
        with pytest.raises(ValueError, match=f"from task {task_id} must be the task itself, got 'ada'"):
            await handle.send("yes", sender="ada")

    def in_a_thread(task_id: str) -> None:
        with app.sync() as producer, pytest.raises(AnswerRefused, match="a task cannot answer its own question"):
            producer.answer("order", True)
        refused.append("in a thread")

    @app.task
    async def alone(ctx: Context) -> None:
        wait = await ctx.open_wait("approval", bool, token="order")
        await ctx.step("tool", tool, ctx.task_id)
        await ctx.step("thread", in_a_thread, ctx.task_id)
        await wait.close()

    async with app:
        handle = await alone.enqueue()
        await work_off(app)
        await bounded(handle.result())
    assert len(refused) == 3


async def test_another_task_answers_under_its_own_id(settings: Settings) -> None:
    app = asking(settings)

    @app.task
    async def other(ctx: Context, task_id: str) -> None:
        handle = await app.producer.find(task_id)
        assert handle is not None
        await handle.answer("approval", True)

    async with app:
        handle = await asked(app)
        answering = await other.enqueue(handle.id)
        await work_off(app)
        await work_off(app)  # the answer may have come when the first worker ended
        await handle.answer("approval", False, by="ada")
        await work_off(app)
        assert await bounded(handle.result()) == [[True, answering.id], [False, "ada"]]


async def test_a_worker_has_no_private_key(settings: Settings, tmp_path: Path) -> None:
    key = tmp_path / "ada.key"
    key.write_text(ADA.private_line)
    key.chmod(0o600)
    app = asking(settings.model_copy(update={"approver_key_file": key}))
    with pytest.raises(ConfigurationError, match="approver_key_file must not be set for a worker"):
        Worker(app)


async def found(app: App, handle: TaskHandle[Any]) -> TaskHandle[Any]:
    """Return the handle of a task as another program finds it."""
    there = await app.producer.find(handle.id)
    assert there is not None
    return there
