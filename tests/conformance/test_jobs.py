"""Jobs over many tasks: each task that a filter means is handled, whatever happens to the runner."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import orjson
import pytest
from perdure.deadletter.letters import Filter, list_letters
from perdure.deadletter.policy import Reason
from perdure.queues import Gateway, Namespace, Partition, Producer, State
from perdure.queues.argument_conditions import ArgumentCondition
from perdure.queues.delivery.checkpoint import Entry, Kind, write_entries
from perdure.queues.delivery.paused_tasks import await_resume
from perdure.queues.delivery.settlement import Counters
from perdure.queues.errors import JobError, WrongType
from perdure.queues.handle import TaskScope, cancel_within
from perdure.queues.jobs import JOB_TTL_MS, Act, JobCounts, JobFailure, JobPlan, JobStore, StoredJob
from perdure.queues.records import read_tasks
from perdure.queues.runtime import RUNTIME
from perdure.queues.task_filter import TaskFilter
from perdure.queues.transport.scripts import queue_script
from perdure.worker import job_runner
from perdure.worker.job_runner import JobResult, JobRunner
from pydantic import SecretStr

from tests.conformance.test_bury_and_replay import bury_as
from tests.support.consumers import ids, needs_one_server, read, read_one, worker
from tests.support.lossy_proxy import lossy_gateway

pytestmark = pytest.mark.integration

RETENTION = 60.0


class Killed(BaseException):
    """The end of a runner's process."""


@pytest.fixture
def store(gateway: Gateway, namespace: Namespace) -> JobStore:
    return JobStore(gateway, namespace)


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_runner, "PAGE", 2)


async def create(
    store: JobStore,
    wanted: TaskFilter | Filter | None = None,
    act: Act = "cancel",
    *,
    name: str = "job",
    runner: str | None = None,
    rate: float | None = None,
    **options: Any,
) -> StoredJob:
    chosen = TaskFilter() if wanted is None else wanted

    def plan(now: int) -> JobPlan:
        return JobPlan(None, chosen.at_most(now).form(), options)

    return await store.create(name, act, plan, runner=runner, rate=rate, by="ada", why="cleaning up")


async def enqueue(producer: Producer, count: int, **options: Any) -> list[str]:
    return [(await producer.enqueue("t", {"n": n}, queue="default", **options)).id for n in range(count)]


async def states(producer: Producer, partition: Partition, task_ids: Sequence[str]) -> list[str]:
    found = await read_tasks(producer.gateway, partition, task_ids)
    return [str(record.state) for record in found if record is not None]


async def bury_all(gateway: Gateway, partition: Partition, reasons: Sequence[Reason]) -> None:
    """Turn the queued tasks into dead letters."""
    deliveries = await read(await worker(gateway, partition), len(reasons))
    for delivery, task_id, reason in zip(deliveries, ids(deliveries), reasons, strict=True):
        await bury_as(gateway, delivery, task_id, reason=reason)


async def run(runner: JobRunner, name: str = "job") -> list[JobResult]:
    return [outcome async for outcome in runner.run(name)]


async def let_pass(gateway: Gateway, store: JobStore) -> None:
    """Let the lease of the runner have passed."""
    read = await store.read("job")
    assert await store.write(read, {"until": read.now - 1})


async def test_a_job_cancels_what_its_filter_means_and_ends(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer, store: JobStore
) -> None:
    old = await enqueue(producer, 5, tags=["night"])
    others = await enqueue(producer, 2)
    delayed = await enqueue(producer, 1, tags=["night"], delay=600)
    await create(store, TaskFilter(tags=("night",)))
    await asyncio.sleep(0.002)  # the job is of an earlier millisecond
    late = await enqueue(producer, 1, tags=["night"])
    runner = JobRunner(producer, "w")
    outcomes = await run(runner)
    assert {one.task_id for one in outcomes if one.kind == "done"} == {*old, *delayed}
    assert {*await states(producer, partition, [*old, *delayed])} == {"cancelled"}
    assert {*await states(producer, partition, [*others, *late])} == {"queued"}
    assert runner.job is not None
    assert (runner.job.state, runner.job.runner) == ("done", None)
    assert runner.job.counts == JobCounts(read=8, done=6)
    assert runner.job.total == 8
    assert await store.open_names() == ([], None)
    assert 0 < await gateway.command("PTTL", namespace.job("job")) <= JOB_TTL_MS
    assert await gateway.command("PTTL", namespace.jobs) > 0
    assert await run(JobRunner(producer, "w")) == [], "it has ended"


async def test_conditions_on_arguments_do_not_see_secrets(
    partition: Partition, producer: Producer, store: JobStore
) -> None:
    await producer.enqueue("t", {"tenant": "acme", "pin": "1"}, queue="default", task_id="open")
    await producer.enqueue("t", {"tenant": "other", "pin": "1"}, queue="default", task_id="other")
    await producer.enqueue("t", {"tenant": "acme", "pin": SecretStr("1")}, queue="default", task_id="hidden")
    await producer.enqueue("t", {"tenant": ["acme"]}, queue="default", task_id="listed")
    for condition, expected in (("pin=1", ["open", "other"]), ("pin=**********", []), ("tenant=acme", ["hidden"])):
        wanted = TaskFilter(where=(ArgumentCondition.parse(condition),))
        name = condition.replace("=", "-").replace("*", "x")
        await create(store, wanted, name=name)
        outcomes = await run(JobRunner(producer, "w"), name)
        assert sorted(one.task_id for one in outcomes) == expected, condition
    assert await states(producer, partition, ["listed"]) == ["queued"]


async def test_one_process_at_a_time_runs_a_job(producer: Producer, store: JobStore, gateway: Gateway) -> None:
    await enqueue(producer, 1)
    await create(store, runner="first")
    assert await store.take("job", "second") is None
    assert (await store.open_names())[0] == []
    assert await store.note("job", "second", {"position": "x"}) is None
    assert await store.note("job", "first", {"position": "x"}) is not None
    await let_pass(gateway, store)
    assert (await store.open_names())[0] == ["job"]
    taken = await asyncio.gather(*(store.take("job", f"other-{number}") for number in range(5)))
    [holder] = [job.text("runner") for job in taken if job is not None]
    assert await store.note("job", "first", {"position": "y"}) is None, "its lease has passed to another one"
    assert (await store.read("job")).position == "x"
    await store.release("job", "first", problem="late")
    assert (await store.read("job")).text("problem") == ""
    await store.release("job", holder, problem="no rights", again=5)
    read = await store.read("job")
    assert (read.runner, read.text("problem")) == (None, "no rights")
    await store.abort("job")


@pytest.mark.parametrize("dies_at", range(5))
async def test_another_process_continues_after_a_death_at_any_page(
    gateway: Gateway,
    partition: Partition,
    producer: Producer,
    store: JobStore,
    monkeypatch: pytest.MonkeyPatch,
    dies_at: int,
) -> None:
    tasks = await enqueue(producer, 5)
    await create(store)
    acts = 0

    async def dying(*args: Any, **options: Any) -> bytes:
        nonlocal acts
        acts += 1
        number = acts
        answer = await cancel_within(*args, **options)
        if number == dies_at + 1:
            raise Killed
        return answer

    async def dead(*args: Any, **options: Any) -> None:
        """A process that is gone stores nothing."""

    with monkeypatch.context() as patched:
        patched.setattr(job_runner, "cancel_within", dying)
        patched.setattr(JobRunner, "_release", dead)
        with pytest.raises(Killed):
            await run(JobRunner(producer, "first"))
    assert await run(JobRunner(producer, "second")) == [], "the lease of the first one lasts"
    await let_pass(gateway, store)
    second = JobRunner(producer, "second")
    await run(second)
    assert await states(producer, partition, tasks) == ["cancelled"] * 5
    assert second.job is not None
    assert second.job.state == "done"
    assert 5 - job_runner.PAGE <= second.job.counts.done <= 5


async def test_a_runner_that_is_cut_off_gives_its_job_up_at_once(
    producer: Producer, store: JobStore, partition: Partition
) -> None:
    tasks = await enqueue(producer, 5)
    await create(store)
    running = JobRunner(producer, "first").run("job")
    await anext(running)
    await running.aclose()
    read = await store.read("job")
    assert (read.runner, read.counts.done) == (None, 2)
    second = JobRunner(producer, "second")
    await run(second)
    assert second.job is not None
    assert (second.job.state, second.job.counts.done) == ("done", 5)
    assert await states(producer, partition, tasks) == ["cancelled"] * 5


async def test_a_stale_runner_changes_no_job(gateway: Gateway, producer: Producer, store: JobStore) -> None:
    await enqueue(producer, 5)
    await create(store)
    stale = JobRunner(producer, "stale")
    running = stale.run("job")
    await anext(running)
    await let_pass(gateway, store)
    await run(JobRunner(producer, "other"))
    ended = await store.read("job")
    assert ended.state == "done"
    assert [one.kind async for one in running if one.kind == "done"] == ["done"], "of the page in hand"
    assert (await store.read("job")).fields == ended.fields


async def test_a_task_that_cannot_be_handled_ends_no_job(
    gateway: Gateway, partition: Partition, producer: Producer, store: JobStore
) -> None:
    first, bad, last = await enqueue(producer, 3)
    await gateway.command("SET", partition.steps(bad), "foreign", "PX", 60_000)
    await gateway.command("SET", partition.control(bad), "foreign", "PX", 60_000)
    gateway.repairs = False
    await create(store)
    runner = JobRunner(producer, "w")
    outcomes = {one.task_id: one for one in await run(runner)}
    assert {name: one.kind for name, one in outcomes.items()} == {first: "done", bad: "failed", last: "done"}
    assert runner.job is not None
    assert (runner.job.state, runner.job.counts.failed) == ("done", 1)
    [failure] = runner.job.counts.errors
    assert (failure.task_id, failure.queue) == (bad, "default")
    assert WrongType.__name__ in failure.reason or "type" in failure.reason
    await gateway.command("DEL", partition.steps(bad), partition.control(bad), partition.record(bad))


async def test_an_aborted_job_stops_after_the_page_in_hand(
    producer: Producer, store: JobStore, partition: Partition
) -> None:
    tasks = await enqueue(producer, 6)
    await create(store)
    runner = JobRunner(producer, "w")
    outcomes: list[JobResult] = []
    async for outcome in runner.run("job"):
        if not outcomes:
            await store.abort("job", by="bob")
        outcomes.append(outcome)
    assert len(outcomes) == 2
    assert runner.job is not None
    assert (runner.job.state, runner.job.text("aborted_by")) == ("aborted", "bob")
    assert sorted(await states(producer, partition, tasks)) == ["cancelled"] * 2 + ["queued"] * 4
    with pytest.raises(JobError, match="there is a job 'job' already, which is aborted"):
        await create(store)
    await store.remove("job")
    assert not (await store.read("job")).exists
    assert await store.read_all() == []
    await create(store)  # the name is free again
    with pytest.raises(JobError, match="end it with 'perdure job abort job'"):
        await store.remove("job")
    await run(runner := JobRunner(producer, "w"))
    with pytest.raises(JobError, match="it has ended, and is done"):
        await store.abort("job")
    assert runner.job is not None
    assert runner.job.counts.done == 4


@pytest.mark.parametrize("script", ["write_compared", "cancel"])
async def test_a_lost_reply_changes_nothing(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer, script: str
) -> None:
    needs_one_server(gateway, "the line that loses replies stands before one server")
    tasks = await enqueue(producer, 3)
    async with lossy_gateway(gateway) as (lossy, line), Producer(namespace=namespace.name, gateway=lossy) as other:
        line.lose(queue_script(script).sha.encode())
        await create(JobStore(lossy, namespace))
        line.lose(queue_script(script).sha.encode())
        runner = JobRunner(other, "w")
        await run(runner)
        assert runner.job is not None
        counts = runner.job.counts
    assert (counts.done + counts.skipped, counts.failed) == (3, 0)
    assert await states(producer, partition, tasks) == ["cancelled"] * 3


async def test_a_scope_is_compared_with_the_task_at_the_moment_of_the_act(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    [held] = await enqueue(producer, 1)
    await read_one(await worker(gateway, partition))
    [free] = await enqueue(producer, 1)
    [scheduled] = await enqueue(producer, 1, delay=60)
    unstarted = frozenset((State.QUEUED, State.SCHEDULED, State.LIMITED))

    async def attempt(task_id: str, scope: TaskScope) -> bytes:
        return await cancel_within(gateway, partition, task_id, scope, retention=RETENTION)

    assert await attempt(held, TaskScope(unstarted)) == b"other"
    assert await attempt(held, TaskScope(frozenset(), unstarted=True)) == b"started"
    assert await attempt(free, TaskScope(frozenset((State.RUNNING, State.WAITING)))) == b"other"
    assert await attempt(scheduled, TaskScope(frozenset((State.WAITING,)))) == b"other"
    assert await attempt(scheduled, TaskScope(unstarted, until=1)) == b"other", "it was enqueued later"
    assert await states(producer, partition, [held, free, scheduled]) == ["running", "queued", "scheduled"]
    assert await attempt(scheduled, TaskScope(unstarted)) == b"cancelled"
    assert await attempt(free, TaskScope(unstarted, unstarted=True)) == b"cancelled"
    assert await attempt(held, TaskScope(frozenset((State.RUNNING,)))) == b"requested"
    assert await attempt("none", TaskScope(unstarted)) == b"missing"


async def test_a_purge_takes_tasks_that_a_pause_holds_unless_a_run_has_recorded_something(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    scope = TaskScope(frozenset((State.QUEUED, State.SCHEDULED, State.LIMITED)), unstarted=True)
    holder = await worker(gateway, partition)
    for task_id, attempts in (("new", 0), ("tried", 1), ("began", 0)):
        await producer.enqueue("t", task_id=task_id, queue="default")
        delivery = await read_one(holder)
        if task_id == "began":
            await write_entries(gateway, delivery, task_id, [Entry(Kind.DONE, "a", b"1")], first=1)
        await await_resume(gateway, delivery, task_id, 7, Counters(attempts=attempts))
        expected = b"cancelled" if task_id == "new" else b"started"
        assert await cancel_within(gateway, partition, task_id, scope, retention=RETENTION) == expected, task_id


async def test_jobs_replay_with_merged_arguments_and_purge(
    gateway: Gateway, partition: Partition, producer: Producer, store: JobStore
) -> None:
    tasks = [
        (await producer.enqueue("t", {"n": n, "deep": {"a": 1, "b": 2}, "old": 1}, queue="default")).id
        for n in range(5)
    ]
    await bury_all(gateway, partition, [*[Reason.ATTEMPTS_EXHAUSTED] * 4, Reason.TIMEOUT])
    wanted = Filter(Reason.ATTEMPTS_EXHAUSTED, where=(ArgumentCondition.parse("deep.a=1"),))
    await create(store, wanted, "dlq-replay", edit={"n": 7, "deep": {"a": 3}, "old": None})
    runner = JobRunner(producer, "w")
    outcomes = await run(runner)
    assert [(one.task_id, one.what) for one in outcomes] == [(task_id, "replayed") for task_id in tasks[:4]]
    assert runner.job is not None
    assert runner.job.counts == JobCounts(read=5, done=4)
    for task_id in tasks[:4]:
        stored = await gateway.command("HGET", partition.record(task_id), "args")
        assert orjson.loads(stored) == {"n": 7, "deep": {"a": 3, "b": 2}}
    await create(store, Filter(), "dlq-purge", name="purge")
    assert [one.what for one in await run(JobRunner(producer, "w"), "purge")] == ["purged"]
    assert [letter.id async for letter in list_letters(gateway, [partition], Filter())] == []


async def test_a_replay_continues_after_its_position_in_the_order_of_all_partitions(
    gateway: Gateway, partition: Partition, producer: Producer, store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = await enqueue(producer, 5)
    await bury_all(gateway, partition, [Reason.ATTEMPTS_EXHAUSTED] * 5)
    await create(store, Filter(), "dlq-replay")

    async def refused(*args: Any) -> bool:
        raise ValueError("no")

    monkeypatch.setattr(job_runner, "replay", refused)
    runner = JobRunner(producer, "first")
    running = runner.run("job")
    seen = [await anext(running) for _ in range(3)]  # one of the second page: the first one is stored
    await running.aclose()
    second = JobRunner(producer, "second")
    seen_again = await run(second)
    assert [one.task_id for one in seen] == tasks[:3]
    assert [one.task_id for one in seen_again] == tasks[2:]
    assert second.job is not None
    assert (second.job.counts.failed, second.job.counts.read) == (5, 5)
    assert second.job.counts.errors[0] == JobFailure(tasks[0], "default", "ValueError: no")


def test_a_filter_is_read_as_it_was_stored() -> None:
    where = (ArgumentCondition.parse("a.b=3"),)
    wanted = TaskFilter(frozenset((State.QUEUED,)), "t", 1, 2, "boom", "k", ("x",), "app", where)
    assert TaskFilter.parse(orjson.loads(orjson.dumps(wanted.form()))) == wanted
    letters = Filter(Reason.TIMEOUT, "t", 1, 2, "boom", "k", ("x",), "app", "text", "abcd", where)
    assert Filter.parse(orjson.loads(orjson.dumps(letters.form()))) == letters
    assert TaskFilter(until=5).at_most(3).until == TaskFilter().at_most(3).until == 3
    assert Filter(until=2).at_most(3).until == 2


async def test_a_job_of_a_later_version_is_left_to_others(
    gateway: Gateway, producer: Producer, store: JobStore
) -> None:
    await enqueue(producer, 1)
    await create(store)
    read = await store.read("job")
    assert await store.write(read, {"act": "resurrect"})
    with pytest.raises(JobError, match="a newer version may have stored it"):
        await run(JobRunner(producer, "w"))
    read = await store.read("job")
    assert (read.state, read.runner) == ("running", None)
    assert "unknown act 'resurrect'" in read.text("problem")
    assert read.summary()["problem"]
    await store.abort("job")


async def test_names_of_expired_jobs_leave_the_index(
    gateway: Gateway, namespace: Namespace, producer: Producer, store: JobStore
) -> None:
    await create(store, name="old")
    await store.abort("old")
    await gateway.command("ZADD", namespace.jobs, -1, "old")  # it ended in 1970
    await create(store, name="new")
    assert await gateway.command("ZRANGE", namespace.jobs, 0, -1) == [b"new"]
    await gateway.command("DEL", namespace.job("new"))
    assert await store.take("new", "w") is None
    assert await gateway.command("ZCARD", namespace.jobs) == 0


async def test_values_of_another_type_make_way(
    gateway: Gateway, namespace: Namespace, producer: Producer, store: JobStore
) -> None:
    gateway.repairs = True
    await gateway.command("SET", namespace.jobs, "foreign", "PX", 60_000)
    assert await store.read_all() == []
    await gateway.command("SET", namespace.job("job"), "foreign", "PX", 60_000)
    await create(store)
    assert (await store.read("job")).exists
    await store.abort("job")


def test_the_rate_paces_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(job_runner, "PAGE", 200)
    monkeypatch.setattr(RUNTIME, "monotonic", lambda: now)
    slow = job_runner._Pace(0.5)
    assert (slow.page, slow.batch) == (1, 1)
    assert [slow.seconds_until(1) for _ in range(3)] == [0.0, 2.0, 4.0]
    fast = job_runner._Pace(1000.0)
    assert (fast.page, fast.batch) == (200, 100)
    assert [fast.seconds_until(100) for _ in range(2)] == [0.0, pytest.approx(0.1)]
    free = job_runner._Pace(None)
    assert (free.page, free.batch, free.seconds_until(1)) == (200, 200, 0.0)
