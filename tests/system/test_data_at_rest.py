"""Data in Redis, with and without encryption keys: nothing can be read or moved, and nothing is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import orjson
import pytest
from perdure import (
    App,
    Context,
    PayloadTooLarge,
    Producer,
    Retry,
    Settings,
    State,
    TaskFailed,
    TaskHandle,
    current_step,
)
from perdure.deadletter.letters import DeadLetter
from perdure.deadletter.policy import Reason
from perdure.deadletter.replay import Replay, replay
from perdure.queues import DecryptionError, KeyMissing, NotEncrypted, TamperedData, make_encryptor

from tests.support.consumers import promote
from tests.support.processes import push_token, worker_processes
from tests.support.stored_data import FIRST, SECOND, everything, with_keys
from tests.support.workers import (
    bounded,
    history,
    letter,
    redis_command,
    running_worker,
    take_and_die,
    wait_until,
    work_off,
)

pytestmark = pytest.mark.integration

MARKER = "the-patient-is-Ada"


def build(settings: Settings) -> App:
    """An application whose tasks put the marker wherever a task can put something."""
    app = App("rest", settings=settings)

    @app.task(retry=Retry(max_attempts=2, base=0.0))
    async def treat(ctx: Context, patient: str, mended: bool = False) -> str:
        async def examine(name: str) -> dict[str, str]:
            await current_step().save({"so far": name})
            return {"found": name}

        async def fall_ill(name: str) -> None:
            raise ValueError(f"{name} is ill")

        found = await ctx.options(risky=True).step("examine", examine, patient)
        await ctx.add_message("user", patient)
        await ctx.decide(patient, reasoning=patient, alternatives=[patient])
        await ctx.options(reasoning=patient).tool("look_up", lambda name: [name], patient)
        with suppress(ValueError):
            await ctx.step("wait", fall_ill, patient)
        if not mended:
            raise ValueError(f"no cure for {found['found']}")
        return f"cured {found['found']}"

    @app.task
    async def echo(ctx: Context, value: str) -> str:
        return value

    return app


@asynccontextmanager
async def opened(settings: Settings) -> AsyncIterator[App]:
    async with build(settings) as app:
        yield app


async def whole_life(app: App) -> list[bytes]:
    """A task that is enqueued, taken by a worker that dies, fails, is buried, replayed with other arguments and
    succeeds; and one that is delayed. What Redis held at each stage.
    """
    seen = []
    handle = await app.tasks["treat"].enqueue(MARKER)
    delayed = await app.tasks["echo"].options(delay=3600).enqueue(MARKER)
    seen.append(await everything(app))
    await take_and_die(app)
    await work_off(app)
    seen.append(await everything(app))
    dead = await letter(app, handle)
    assert dead.reason is Reason.ATTEMPTS_EXHAUSTED
    assert dead.message == f"no cure for {MARKER}"
    assert MARKER in dead.traceback
    assert orjson.loads(dead.shown_arguments() or b"") == {"patient": MARKER}
    assert (await handle.record()).error == {
        "error": "ValueError",
        "message": dead.message,
        "traceback": dead.traceback,
    }
    reported = {event.type: event for event in await history(handle)}
    failed = [event.data["message"] for event in await history(handle) if event.type in ("attempt_failed", "buried")]
    assert failed == [f"no cure for {MARKER}"] * 2
    assert reported["step_failed"].data["message"] == f"{MARKER} is ill"
    assert None not in [reported[kind].number for kind in ("step_started", "message_added", "decided", "tool_called")]
    assert (reported["decided"].data["choice"], reported["tool_called"].data["result"]) == (MARKER, [MARKER])
    assert await replay(app.producer.gateway, dead, Replay(args=orjson.dumps({"patient": MARKER, "mended": True})))
    seen.append(await everything(app))
    await work_off(app)
    assert await bounded(handle.result()) == f"cured {MARKER}"
    seen.append(await everything(app))
    await delayed.cancel()
    return seen


async def test_a_whole_life_leaves_nothing_to_be_read(settings: Settings) -> None:
    async with opened(with_keys(settings, FIRST)) as app:
        stages = await whole_life(app)
    assert [MARKER.encode() in stage for stage in stages] == [False] * 4


async def test_without_keys_the_same_life_can_be_read(settings: Settings) -> None:
    async with opened(settings) as app:
        stages = await whole_life(app)
    assert [MARKER.encode() in stage for stage in stages] == [True] * 4


async def test_a_life_where_sealing_is_required(settings: Settings) -> None:
    async with opened(with_keys(settings, FIRST, required=True)) as app:
        assert not any(MARKER.encode() in stage for stage in await whole_life(app))


async def test_producers_by_name_seal_as_well(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERDURE_ENCRYPTION_KEYS", FIRST)
    async with (
        opened(with_keys(settings, FIRST, required=True)) as app,
        Producer(settings.redis_url, namespace=settings.namespace) as producer,
    ):
        handle = await producer.enqueue("echo", {"value": MARKER}, queue=app.name)
        many = await producer.enqueue_many("echo", [{"value": MARKER}] * 3, queue=app.name)
        streamed = [one async for one in producer.enqueue_stream("echo", [{"value": MARKER}], queue=app.name)]
        assert MARKER.encode() not in await everything(app)
        await work_off(app)
        for one in (handle, *many, *streamed):
            assert await bounded(one.result()) == MARKER


async def test_the_size_limit_is_that_of_the_data_itself(settings: Settings) -> None:
    limited = with_keys(settings, FIRST).model_copy(update={"payload_limit": 2000, "large_limit": 0})
    async with opened(limited) as app:
        envelope = {"v": 1, "id": "x" * 36, "task": "echo", "app": app.name}
        frame = len(orjson.dumps({"value": ""})) + len(orjson.dumps(envelope))
        handle = await app.tasks["echo"].enqueue("v" * (2000 - frame))
        with pytest.raises(PayloadTooLarge):
            await app.tasks["echo"].enqueue("v" * (2001 - frame))
        await work_off(app)
        assert len(await bounded(handle.result())) == 2000 - frame


# moved and changed


async def swap(app: App, first: TaskHandle[str], second: TaskHandle[str], field: str) -> None:
    """Exchange a field of two records."""
    records = [one.partition.record(one.id) for one in (first, second)]
    values = [await redis_command(app, "HGET", record, field) for record in records]
    for record, value in zip(records, reversed(values), strict=True):
        await redis_command(app, "HSET", record, field, value)


async def test_results_cannot_be_swapped(settings: Settings) -> None:
    async with opened(with_keys(settings, FIRST)) as app:
        first, second = [await app.tasks["echo"].enqueue(value) for value in ("a", "b")]
        await work_off(app)
        await swap(app, first, second, "result")
        with pytest.raises(TamperedData, match=f"could not decrypt the result of task {first.id}: it was changed"):
            await first.result()


async def test_arguments_cannot_be_swapped(settings: Settings) -> None:
    async with opened(with_keys(settings, FIRST)) as app:
        first, second = [await app.tasks["echo"].options(delay=3600).enqueue(value) for value in ("a", "b")]
        await swap(app, first, second, "args")
        await promote(app.producer.gateway, first.partition, first.id, second.id)
        await work_off(app)
        found = [await letter(app, one) for one in (first, second)]
        assert [one.reason for one in found] == [Reason.UNDECRYPTABLE] * 2
        assert f"could not decrypt the arguments of task {first.id}: it was changed in Redis" in found[0].message
        shown = found[0].shown_arguments()
        assert shown is not None
        assert b"could not decrypt" in shown


async def test_a_task_cannot_be_renamed(settings: Settings) -> None:
    async with opened(with_keys(settings, FIRST)) as app:
        handle = await app.tasks["echo"].options(delay=3600).enqueue("a")
        record = handle.partition.record(handle.id)
        envelope = await redis_command(app, "HGET", record, "env")
        await redis_command(app, "HSET", record, "env", envelope.replace(b'"echo"', b'"treat"'))
        await promote(app.producer.gateway, handle.partition, handle.id)
        await work_off(app)
        assert (await letter(app, handle)).reason is Reason.UNDECRYPTABLE


@pytest.mark.parametrize("there", ["another task", "another step"])
async def test_step_records_cannot_be_moved(settings: Settings, there: str) -> None:
    async with opened(with_keys(settings, FIRST)) as app:
        handles = [await app.tasks["treat"].enqueue(name) for name in ("Ada", "Bob")]
        await work_off(app)
        letters = [await letter(app, handle) for handle in handles]
        steps = [handle.partition.steps(handle.id) for handle in handles]
        record = await redis_command(app, "HGET", steps[1], "d:examine")
        place = (steps[0], "d:examine") if there == "another task" else (steps[1], "d:examine#2")
        await redis_command(app, "HSET", *place, record)
        chosen = 0 if there == "another task" else 1
        await replay(app.producer.gateway, letters[chosen], Replay())
        await work_off(app)
        found = await letter(app, handles[chosen])
        assert found.reason is Reason.UNDECRYPTABLE
        assert f"could not decrypt a step '{place[1][2:]}' of task {found.id}: it was changed" in found.message


async def test_errors_cannot_be_swapped(settings: Settings) -> None:
    async with opened(with_keys(settings, FIRST)) as app:
        handles = [await app.tasks["treat"].enqueue(name) for name in ("Ada", "Bob")]
        await work_off(app)
        await swap(app, handles[0], handles[1], "error")
        with pytest.raises(TaskFailed, match="TamperedData: could not decrypt the error of task"):
            await handles[0].result()


async def test_events_cannot_be_moved_and_one_that_was_hides_no_other(settings: Settings) -> None:
    async with opened(with_keys(settings, FIRST)) as app:
        handle = await app.tasks["treat"].enqueue(MARKER)
        await work_off(app)
        log = handle.partition.log(handle.id)
        found = {event.type: event for event in await history(handle)}
        ((_, fields),) = await redis_command(app, "XRANGE", log, found["decided"].id, found["decided"].id)
        number = b"%d" % (found["decided"].number or 0)
        moved = [b"99" if part == number else part for part in fields]
        await redis_command(app, "XADD", log, "*", *moved)
        (last, *_) = [event for event in (await history(handle))[::-1] if event.type == "decided"]
        assert (last.number, last.data) == (99, None)
        assert last.problem == f"could not decrypt the event of task {handle.id}: {CHANGED}"
        assert next(event.data for event in await history(handle) if event.type == "decided")["choice"] == MARKER


CHANGED = "it was changed in Redis, or moved there from another task, step or field"


# keys that are missing


def impatient(settings: Settings) -> Settings:
    return settings.model_copy(update={"unknown_task": Retry(max_attempts=3, base=0.0)})


async def test_a_worker_without_the_key_leaves_the_task_to_others(settings: Settings) -> None:
    patient = settings.model_copy(update={"unknown_task": Retry(max_attempts=100, base=0.05, factor=1.0)})
    async with opened(with_keys(settings, FIRST)) as sealing, opened(patient) as keyless:
        handle = await sealing.tasks["echo"].enqueue(MARKER)

        async def was_returned() -> bool:
            return any(event.type == "returned" for event in await history(handle))

        async with running_worker(keyless):
            await wait_until(was_returned, "it is returned")
        async with running_worker(sealing):
            assert await bounded(handle.result()) == MARKER
        (first, *_) = [event for event in await history(handle) if event.type == "returned"]
        assert ": encrypted with key" in first.data["message"]
        assert (await handle.record()).attempts == 1


async def test_an_undecryptable_task_becomes_a_dead_letter_and_resumes_when_replayed_with_the_key(
    settings: Settings,
) -> None:
    async with opened(with_keys(settings, FIRST)) as sealing, opened(impatient(with_keys(settings, SECOND))) as other:
        handle = await sealing.tasks["echo"].enqueue(MARKER)
        await work_off(other)
        dead: DeadLetter = await letter(other, handle)
        assert (dead.reason, dead.attempts) == (Reason.UNDECRYPTABLE, 0)
        assert "PERDURE_ENCRYPTION_KEYS" in dead.message
        assert MARKER.encode() not in await everything(sealing)
        assert await replay(sealing.producer.gateway, dead, Replay())
        await work_off(sealing)
        assert await bounded(handle.result()) == MARKER


async def test_a_checkpoint_that_cannot_be_opened_stops_the_task_before_its_handler(settings: Settings) -> None:
    async with opened(with_keys(settings, FIRST)) as old, opened(impatient(with_keys(settings, SECOND))) as new:
        handle = await old.tasks["treat"].enqueue(MARKER)
        await work_off(old)
        args = orjson.dumps({"patient": MARKER, "mended": True})
        assert await replay(new.producer.gateway, await letter(old, handle), Replay(args=args))
        await work_off(new)
        dead = await letter(new, handle)
        assert (dead.reason, dead.attempts) == (Reason.UNDECRYPTABLE, 0)
        assert f" of task {handle.id}: encrypted with key" in dead.message


async def test_a_caller_without_the_key_gets_an_error(settings: Settings) -> None:
    async with (
        opened(with_keys(settings, FIRST)) as app,
        Producer(settings.redis_url, namespace=settings.namespace) as keyless,
    ):
        done, failed = await app.tasks["echo"].enqueue(MARKER), await app.tasks["treat"].enqueue(MARKER)
        await work_off(app)
        found = await keyless.find(done.id)
        assert found is not None
        with pytest.raises(
            KeyMissing, match=rf"could not decrypt the result of task {done.id}: encrypted with key \w{{8}}"
        ):
            await found.result()
        shown = (await found.record()).summary()["args"]
        assert "the arguments of task" in shown
        found = await keyless.find(failed.id)
        assert found is not None
        with pytest.raises(TaskFailed, match=r"attempts_exhausted\): KeyMissing: could not decrypt the error of task"):
            await found.result()
        assert [event.type for event in await history(found)].count("attempt_failed") == 1
        assert await found.status() is State.DEAD


async def test_new_arguments_are_never_put_openly_in_the_place_of_sealed_ones(settings: Settings) -> None:
    async with opened(with_keys(settings, FIRST)) as app, opened(settings) as keyless:
        handle = await app.tasks["treat"].enqueue(MARKER)
        await work_off(app)
        dead = await letter(keyless, handle)
        with pytest.raises(KeyMissing):
            await replay(keyless.producer.gateway, dead, Replay(args=b'{"patient":"Bob"}'))
        assert await handle.status() is State.DEAD


# switching it on, and changing keys


async def test_what_was_stored_before_encryption_is_still_read(settings: Settings) -> None:
    async with opened(settings) as plain, opened(with_keys(settings, FIRST)) as sealing:
        handle = await plain.tasks["treat"].enqueue(MARKER)
        done = await plain.tasks["echo"].enqueue("before")
        await work_off(plain)
        waiting = await plain.tasks["echo"].enqueue("waiting")
        args = orjson.dumps({"patient": MARKER, "mended": True})
        assert await replay(plain.producer.gateway, await letter(plain, handle), Replay(args=args))
        await work_off(sealing)
        for one, result in ((handle, f"cured {MARKER}"), (done, "before"), (waiting, "waiting")):
            found = await sealing.producer.find(one.id)
            assert found is not None
            assert await bounded(found.result()) == result


async def test_what_is_not_sealed_is_refused_where_that_is_asked_for(settings: Settings) -> None:
    async with opened(settings) as plain, opened(with_keys(settings, FIRST, required=True)) as strict:
        done = await plain.tasks["echo"].enqueue("a")
        await work_off(plain)
        found = await strict.producer.find(done.id)
        assert found is not None
        with pytest.raises(NotEncrypted):
            await found.result()
        handle = await plain.tasks["echo"].enqueue("b")
        await work_off(strict)
        dead = await letter(strict, handle)
        assert dead.reason is Reason.UNDECRYPTABLE
        assert "it is not encrypted, and PERDURE_ENCRYPTION_REQUIRED is set" in dead.message


async def test_keys_are_changed_while_workers_of_both_sets_run(settings: Settings) -> None:
    """The steps of docs/how-to/security.md: all learn the new key, then it seals, then the old one is dropped."""
    patient = settings.model_copy(update={"unknown_task": Retry(max_attempts=1000, base=0.02, factor=1.0)})
    before, learnt = with_keys(patient, FIRST), with_keys(patient, FIRST, SECOND)
    since, after = with_keys(patient, SECOND, FIRST), with_keys(patient, SECOND)
    async with opened(before) as a, opened(learnt) as b, opened(since) as c, opened(after) as d:
        async with running_worker(a), running_worker(b):
            early = [await app.tasks["echo"].enqueue(f"{n}") for app in (a, b) for n in range(10)]
            assert [await bounded(one.result()) for one in early] == [f"{n % 10}" for n in range(20)]
        waiting = await a.tasks["treat"].enqueue(MARKER)
        async with running_worker(b), running_worker(c):
            mixed = [await app.tasks["echo"].enqueue(f"{n}") for app in (a, b, c) for n in range(10)]
            for n, one in enumerate(mixed):
                found = await c.producer.find(one.id)
                assert found is not None
                assert await bounded(found.result()) == f"{n % 10}"
            for one in early:
                found = await c.producer.find(one.id)
                assert found is not None
                assert int(await found.result()) < 10
            dead = await letter(b, waiting)
            args = orjson.dumps({"patient": MARKER, "mended": True})
            assert await replay(c.producer.gateway, dead, Replay(args=args, fresh=True))
            found = await c.producer.find(waiting.id)
            assert found is not None
            assert await bounded(found.result()) == f"cured {MARKER}"
        async with running_worker(
            d
        ):  # a worker of before would have returned what it cannot open, and one of since opens all
            late = [await c.tasks["echo"].enqueue(f"{n}") for n in range(10)]
            assert [await bounded(one.result()) for one in late] == [f"{n}" for n in range(10)]
        with pytest.raises(DecryptionError):
            handle = await d.producer.find(early[0].id)
            assert handle is not None
            await handle.result()
        assert MARKER.encode() not in await everything(a)


@pytest.mark.processes
async def test_the_checkpoint_of_a_killed_worker_is_continued_under_new_keys(
    settings: Settings, tmp_path: Path
) -> None:
    """The killed worker encrypted with the old key; the next one encrypts with the new key and decrypts both."""
    known = f"{SECOND},{FIRST}"
    sealer = make_encryptor(known, None)
    with worker_processes(settings, tmp_path) as workers:
        async with Producer(settings.redis_url, namespace=settings.namespace, encryptor=sealer) as producer:
            workers.environment["PERDURE_ENCRYPTION_KEYS"] = f"{FIRST},{SECOND}"
            killed = await workers.start().ready()
            handle = await producer.enqueue("gate", {"name": "g"}, queue="replica")
            await workers.line("saved", f"{handle.id}:second", pid=killed.pid)
            killed.kill()
            workers.environment["PERDURE_ENCRYPTION_KEYS"] = known
            workers.start()
            await workers.line("saved", f"{handle.id}:second", number=2)
            await push_token(producer, "g", MARKER)
            result = await bounded(handle.result())
            assert result["steps"] == ["first", f"{MARKER} after progress", "third"]
            assert len(workers.lines("begin", f"{handle.id}:first")) == 1
            stored = await producer.gateway.command("HVALS", handle.partition.steps(handle.id))
            ids = make_encryptor(known, None).key_ids
            assert {value[2:6].hex() for value in stored} == set(ids)
            assert not [value for value in stored if MARKER.encode() in value]


async def test_many_steps_at_once_are_recorded_once(settings: Settings) -> None:
    async with App("many", settings=with_keys(settings, FIRST)) as app:

        @app.task
        async def spread_out(ctx: Context) -> list[int]:
            def number(n: int) -> int:
                return n

            return list(
                await asyncio.gather(*(ctx.options(durability="async").step(f"n{n}", number, n) for n in range(20)))
            )

        handle = await spread_out.enqueue()
        await work_off(app)
        assert await bounded(handle.result()) == list(range(20))
        assert [event.type for event in await history(handle)].count("step_completed") == 20
