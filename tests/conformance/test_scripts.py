"""Lua scripts: each documents its arguments and what it does atomically, and is sent again to a server without it."""

from __future__ import annotations

import asyncio
import hashlib
import re
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import perdure
import pytest
import redis
from perdure.deadletter.letters import Filter, list_letters
from perdure.deadletter.replay import Replay, purge, replay
from perdure.queues import (
    Address,
    Gateway,
    Namespace,
    Producer,
    Refused,
    State,
    SupervisorInfo,
    TaskHandle,
    WorkerInfo,
    find_task,
    list_workers,
    set_partitions,
)
from perdure.queues.admission import Admission
from perdure.queues.budgets.store import BudgetStore
from perdure.queues.delivery.checkpoint import Position, close_exported, edit_checkpoint, load_history, read_mark
from perdure.queues.delivery.due_set import promote_due, wake_version
from perdure.queues.delivery.lost_tasks import put_back_lost
from perdure.queues.delivery.paused_tasks import await_resume, wake_paused
from perdure.queues.delivery.quarantine_store import clear_quarantined, quarantine, report_crash, take_quarantined
from perdure.queues.delivery.settlement import Counters, await_limit, await_version, park, raise_count, release, succeed
from perdure.queues.depth import read_depths
from perdure.queues.derived_tasks import (
    Successor,
    TaskPast,
    confirm_successor,
    enqueue_successor,
    read_task_input,
    store_copy,
    store_fork,
)
from perdure.queues.ended_tasks import Outcome, store_ended
from perdure.queues.envelope import DEFAULT_PAYLOAD_LIMIT, BudgetUse, Envelope, EnvelopeTemplate, LimitUse
from perdure.queues.event_log import read_events
from perdure.queues.handle import cancel_task
from perdure.queues.inbox import read_inbox
from perdure.queues.inspection.timeline import page_tasks, trim_timeline
from perdure.queues.inspection.views import list_queues
from perdure.queues.joins import (
    JoinPlace,
    OnFailure,
    PlannedChild,
    add_children,
    close_join,
    deliver_notices,
    life_of,
    watch_task,
)
from perdure.queues.junk import set_aside
from perdure.queues.keys import DATA_FORMAT, GROUP
from perdure.queues.limits.control import LimitControl
from perdure.queues.limits.definition import Limit
from perdure.queues.limits.kept import renew_kept
from perdure.queues.limits.parked import wake_for_limit
from perdure.queues.limits.store import LimitStore, Released, ReleaseRequest, TakeRequest
from perdure.queues.partitions.assignment import join_group
from perdure.queues.partitions.resharding import PartitionStatus, partition_status, retire_generation
from perdure.queues.pauses import PauseRule, PauseStore, load_pauses
from perdure.queues.presence import DrainAnswer, announce, drain_worker
from perdure.queues.schedules.call import ScheduledCall
from perdure.queues.schedules.definition import Every, Rules
from perdure.queues.schedules.firing import ScheduleFirer
from perdure.queues.schedules.store import ScheduleDefinition, ScheduleStore
from perdure.queues.sessions.record import SessionAddress, SessionCorrection, read_session
from perdure.queues.sessions.removal import forget_session
from perdure.queues.sessions.turns import (
    SessionTurnEnd,
    begin_turn,
    check_session,
    end_turn,
    send_to_session,
    store_correction,
)
from perdure.queues.shared_config import set_config
from perdure.queues.store.entries import EntryChange
from perdure.queues.supervisors import count_crash, resume_supervisor, supervise
from perdure.queues.task_filter import TaskFilter
from perdure.queues.transport.large_results import scan_fields
from perdure.queues.transport.pipelining import Argument
from perdure.queues.transport.scripts import Script, load_script, loaded_scripts, queue_script
from perdure.queues.unique import write_marker
from perdure.queues.values import read_task_values, update_value
from perdure.queues.waits import answer_wait, claim_token, forget_ended_waits
from perdure.worker.agents.identity import Identity, set_identity

from tests import conformance
from tests.conftest import ON_SERVERS
from tests.support.consumers import claim_one, consumers, make_due, needs_server, read_one, worker
from tests.support.delivery_calls import SETTLING, WRITING
from tests.support.key_values import namespace_entries
from tests.support.limited_tasks import enqueue as enqueue_limited
from tests.support.servers import RedisServer, find_program
from tests.support.servers.every_node import on_every_node

FOLDER = Path(perdure.__file__).parent
SCRIPTS = sorted(FOLDER.glob("*/lua/*.lua"))
PRELUDES = {
    *("bounded", "fence", "inbox", "joins", "on_end", "payload", "retention", "seen", "upload", "values", "waits"),
    *("depth", "limits", "limited", "store", "tag", "turns", "streams", "wake", "watched"),
}


def header(path: Path) -> str:
    lines = []
    for line in path.read_text("utf-8").splitlines():
        if not line.startswith("--"):
            break
        lines.append(line.removeprefix("-- ").removeprefix("--"))
    return "\n".join(lines)


@pytest.mark.parametrize("path", [path for path in SCRIPTS if path.stem not in PRELUDES], ids=lambda path: path.stem)
def test_a_script_documents_its_arguments_and_reply(path: Path) -> None:
    text = header(path)
    first = re.sub(r"^include: [\w, ]+\n", "", text)
    assert re.match(r"[A-Z][^\n]*\.\n|[A-Z].*\n[^A-Z].*\.\n", first), f"{path.name}: no sentence of what it does"
    for word in ("KEYS  ", "ARGV  ", "returns  "):
        assert re.search(rf"^{word}\S", text, re.MULTILINE), f"{path.name}: {word.strip()} is missing"


def test_the_table_names_a_test_file_for_each_script() -> None:
    """tests/conformance/__init__.py has the table; the rows name files that exist."""
    rows = re.findall(r"^\| `((?:\w+/)?test_\w+)` \| ([\w, ]+) \|$", conformance.__doc__ or "", re.MULTILINE)
    named = [script for _, scripts in rows for script in scripts.split(", ")]
    assert sorted(named) == sorted({path.stem for path in SCRIPTS} - PRELUDES)
    assert [name for name, _ in rows if not (Path(__file__).parent / f"{name}.py").is_file()] == []


READ_ONLY = {
    *(
        "count_limited",
        "due",
        "hash_page",
        "load_history",
        "look_kept",
        "look_limited",
        "partition_status",
        "queue_depth",
    ),
    *("read_inbox", "read_log", "read_values"),
}


def test_each_script_that_writes_has_a_test_of_late_bytes() -> None:
    """Scripts of dead letters are held back by any name, since they are in another folder."""
    tests = "".join(path.read_text("utf-8") for path in Path(__file__).parent.glob("late/*.py"))
    written = {path.stem for path in SCRIPTS if path.parts[-3] == "queues"} - PRELUDES - READ_ONLY
    assert [name for name in sorted(written) if f'"{name}"' not in tests] == []


WRITES = re.compile(
    r"'(?:GETSET|H(?:SET|SETNX|DEL|INCRBY)|X(?:ADD|DEL|ACK|CLAIM|TRIM|GROUP)|Z(?:ADD|REM)|DEL|PEXPIRE|PERSIST)'"
)


@pytest.mark.parametrize("path", [path for path in SCRIPTS if path.stem not in PRELUDES], ids=lambda path: path.stem)
def test_a_script_of_several_writes_documents_what_is_atomic(path: Path) -> None:
    body = path.read_text("utf-8")
    if len(WRITES.findall(body)) > 1:
        assert re.search(r"[Aa]tomic|in one act|all of|never in no place", header(path)), path.name


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_takes_the_time_from_redis_and_uses_no_random_numbers(path: Path) -> None:
    source = load_script(path).source
    assert "os.time" not in source
    assert "math.random" not in source
    assert "KEYS *" not in source


def test_a_script_is_named_by_its_content() -> None:
    for path in SCRIPTS:
        script = load_script(path)
        assert script.name == path.stem
        assert script.sha == hashlib.sha1(script.source.encode()).hexdigest()


def test_an_include_puts_the_prelude_in_front() -> None:
    prelude = (FOLDER / "queues" / "lua" / "fence.lua").read_text("utf-8")
    assert queue_script("park").source.startswith(prelude)
    assert load_script(FOLDER / "deadletter" / "lua" / "bury.lua").source.startswith(prelude)
    assert not queue_script("enqueue").source.startswith(prelude)


def test_a_script_may_do_its_frequent_act_before_the_functions_of_its_preludes() -> None:
    before, _, after = (FOLDER / "queues" / "lua" / "finish.lua").read_text("utf-8").partition("-- preludes\n")
    source = queue_script("finish").source
    assert source.startswith(before)
    assert source.endswith(after)
    assert "local function owned" in source.removeprefix(before).removesuffix(after)
    assert "return 1" in before


def test_importing_the_packages_loads_every_script() -> None:
    assert {script.name for script in loaded_scripts()} >= {path.stem for path in SCRIPTS} - PRELUDES


async def test_the_server_computes_the_same_script_names(gateway: Gateway) -> None:
    for path in SCRIPTS:
        script = load_script(path)
        assert await gateway.command("SCRIPT", "LOAD", script.source) == script.sha.encode()


async def test_all_scripts_are_loaded_in_one_call(gateway: Gateway) -> None:
    await on_every_node(gateway, "SCRIPT", "FLUSH")
    await gateway.load_scripts()
    shas = [script.sha for script in loaded_scripts()]
    for known in await on_every_node(gateway, "SCRIPT", "EXISTS", *shas):
        assert known == [1] * len(shas)


class Forgetful(Gateway):
    """A gateway to a server that loses every script before each call of one."""

    def __init__(self, gateway: Gateway) -> None:
        super().__init__(gateway.address)
        self.called: set[str] = set()

    async def run(self, script: Script, keys: Sequence[str], args: Sequence[Argument], derived: Any = None) -> Any:
        await on_every_node(self, "SCRIPT", "FLUSH")
        self.called.add(script.name)
        return await super().run(script, keys, args, derived)

    async def run_once(self, script: Script, keys: Sequence[str], args: Sequence[Argument]) -> Any:
        await on_every_node(self, "SCRIPT", "FLUSH")
        self.called.add(script.name)
        return await super().run_once(script, keys, args)


async def known(producer: Producer, task_id: str) -> TaskHandle[Any]:
    found = await producer.find(task_id)
    assert found is not None
    return found


async def fire(gateway: Gateway, namespace: Namespace) -> None:
    """Fire a schedule, and cancel its task."""
    message = EnvelopeTemplate("t").message(b"{}")
    call = ScheduledCall.of(message, "t", "default")
    store = ScheduleStore(gateway, namespace)
    read = await store.add(ScheduleDefinition("hourly", Every(3600), Rules(), call))
    assert await store.write(read, {"last": read.now - 3_600_000}, look=0)
    [fired] = (await ScheduleFirer(gateway, namespace, retention=60.0).fire_due()).fired
    partition = namespace.partition("default")
    assert await cancel_task(gateway, partition, fired.run.task_id, retention=60.0) is State.CANCELLED
    await store.remove("hourly")


async def store_entries(gateway: Gateway, namespace: Namespace) -> None:
    """Call every script of the key-value store."""
    notes = namespace_entries(gateway, namespace)
    await notes.write([EntryChange("put", "a", data=b"1")])
    (found,) = await notes.read(["a"])
    assert found is not None
    assert [entry async for entry in notes.scan()] == [found]
    await notes.write([EntryChange("prefix", "")])


async def live(gateway: Gateway, namespace: Namespace) -> None:
    """Call every script once; the heartbeat, which has a client of its own, is in test_leases.py."""
    partition = namespace.partition("default")
    async with Producer(namespace=namespace.name, gateway=gateway) as producer:
        assert await read_depths(gateway, [partition]) == [0]
        a = await worker(gateway, partition)
        for act in ("succeed", "reschedule", "park", "release", "bury", "bury_unreadable"):
            await producer.enqueue("t", task_id=act, queue="default")
            if act != "park":  # it would be due at once
                await producer.send_message(act, "hello")
            taken = await read_one(a)
            for write in WRITING.values():
                await write(gateway, taken, act)
            assert (await load_history(gateway, taken, act)).entries
            assert await read_events(gateway, partition, act)
            await SETTLING[act](gateway, taken, act)
            assert await find_task(gateway, namespace, act) == partition
            assert len([message async for message in read_inbox(gateway, partition, act)]) == (act != "park")
        assert (await answer_wait(gateway, partition, "park", "approval", "yes")).early
        assert await claim_token(gateway, partition, "park", "approval", "order", timeout_ms=None) is None
        assert (await update_value(gateway, partition, "park", "speed", 2)).task_id == "park"
        assert [value.value for value in await read_task_values(gateway, partition, "park")] == [2]
        await limit(gateway, namespace)
        await store_entries(gateway, namespace)
        await fire(gateway, namespace)
        unique = namespace.unique("0" * 32)
        assert (await write_marker(gateway, unique, b"x", b"", 60_000)).taken
        await gateway.command("ZADD", partition.waiting, 1, "gone")
        assert await forget_ended_waits(gateway, partition) == 1
        await SETTLING["cancelled"](gateway, await claim_one(a), "release")
        later = await producer.enqueue("t", task_id="later", delay=60, queue="default")
        await make_due(gateway, partition, "later")
        assert (await promote_due(gateway, partition))[0] == 1
        assert await later.cancel() is State.CANCELLED
        again: TaskHandle[Any] = await producer.enqueue_fresh(
            EnvelopeTemplate("t").message(b"{}", task_id="later"), queue="default"
        )
        assert await again.cancel() is State.CANCELLED
        origin = await read_task_input(gateway, partition, "later")
        copied: dict[str, Any] = {
            "at": "later 0-0",
            "arguments": b"{}",
            "event": b"{}",
            "fields": {"d:a": b"1"},
        }
        assert await store_fork(gateway, namespace, origin, "forked", **copied) == partition
        forked = await producer.find("forked")
        assert forked is not None
        assert await forked.cancel() is State.CANCELLED
        past = TaskPast(1, 1, None, [("s:a", b"1")], (), [("1-0", {"type": b"started", "n": b"1"})])
        moved: dict[str, Any] = {"envelope": Envelope(id="moved", task="t").encode(), "arguments": b"{}", "past": past}
        assert await store_copy(gateway, namespace, "default", "moved", **moved, source="import 1") == partition
        mark = await read_mark(gateway, partition, "moved")
        assert not await close_exported(gateway, partition, "moved", mark[1:] + mark[:1], event=b"{}", retention=60)
        assert await close_exported(gateway, partition, "moved", mark, event=b"{}", retention=60)
        moved |= {"envelope": Envelope(id="ended", task="t").encode(), "outcome": Outcome(State.SUCCEEDED, {}, {})}
        assert await store_ended(gateway, namespace, "default", "ended", **moved, retention=60) == partition
        following = Successor(Envelope(id="next", task="t"), "default", b"{}", ("#received", b"{}"), "later token")
        assert await enqueue_successor(gateway, namespace, following) == partition
        await confirm_successor(gateway, namespace, "next token")
        await gateway.command("ZADD", partition.due, 1, b"\xff")
        assert await set_aside(gateway, partition, partition.due, "zset", [b"\xff"]) == 1
        assert await put_back_lost(gateway, partition, 0.0) == 0
        await gateway.command("ZADD", partition.closed, 1, "x")
        assert await gateway.set_keys_aside([partition.closed])
        assert [field async for field in scan_fields(gateway, partition.steps("none"), "*")] == []
        assert await (await known(producer, "next")).cancel() is State.CANCELLED
        large = await producer.enqueue("t", {"text": "x" * DEFAULT_PAYLOAD_LIMIT}, queue="default")
        assert await large.cancel() is State.CANCELLED
        dropped, kept = [one async for one in list_letters(gateway, [partition], Filter())]
        assert await replay(gateway, kept, Replay())
        assert await purge(gateway, dropped)
        await release(gateway, (await raise_count(gateway, await read_one(a))).delivery, None, data=None)
        await gateway.command("XGROUP", "CREATECONSUMER", partition.ready, GROUP, "gone")
        assert await a.remove_idle_consumers(partition, -1.0, present=["a"]) == 1
        await producer.enqueue("t", task_id="suspect", queue="default")
        await quarantine(gateway, await read_one(a), "suspect")
        suspect = await take_quarantined(gateway, partition, "a")
        assert suspect.delivery is not None
        await clear_quarantined(gateway, suspect.delivery, "suspect")
        assert suspect.delivery.entry in [one.entry for one in await a.recover_own(partition)]
        found = await report_crash(gateway, namespace, ["default"], "a", exit_status="SIGKILL", steps={})
        assert found.deliveries == 1
        await supervise(gateway, namespace, SupervisorInfo(id="s", name="s", window=60.0), ttl=15)
        assert (await count_crash(gateway, namespace, "s", "a", why="", threshold=0, window=60)).paused
        assert await resume_supervisor(gateway, namespace, "s")
        await producer.enqueue("t", task_id="newer", queue="default")
        position = Position(State.SCHEDULED, 0, 0)
        edited: dict[str, Any] = {"event": ("archived", b"{}"), "fields": {"s:#state": b"{}"}, "wakes": "compaction"}
        assert await edit_checkpoint(gateway, partition, "newer", position, **edited) is None
        await await_version(gateway, await read_one(a), "newer", DATA_FORMAT, limit=60)
        assert await wake_version(gateway, partition) == 1
        await producer.enqueue("t", task_id="paused", queue="default")
        rule, stored = await PauseStore(gateway, namespace).add(PauseRule(task="t"))
        assert stored
        await await_resume(gateway, await read_one(a), "paused", rule.number, Counters())
        assert await PauseStore(gateway, namespace).remove(rule) == rule
        assert await wake_paused(gateway, partition, await load_pauses(gateway, namespace)) == (1, 1)
        assert await (await known(producer, "paused")).cancel() is State.CANCELLED
        await producer.enqueue("t", task_id="parked", queue="default")
        keeps: dict[str, Any] = {"delay": 600, "waits": "limit openai", "keeps": 'n [["openai","-",1]]'}
        await park(gateway, await read_one(a), "parked", Counters(), conditions=[("limit", "openai")], **keeps)
        assert await wake_for_limit(gateway, partition, "parked")
        assert await renew_kept(gateway, partition, 30.0) == (10.0, Released([], [], []))
        keys = [partition.record("newer"), partition.log("newer")]
        given: list[Argument] = [b"{}", "0-1", b""]
        assert await gateway.run(queue_script("dismiss"), keys, given) in (b"missing", b"changed")
        assert await (await known(producer, "newer")).cancel() is State.CANCELLED
        await converse(gateway, namespace)
        await raise_children(gateway, namespace, producer)
        await a.leave()
        assert "a" not in await consumers(gateway, partition.ready)
    assert await trim_timeline(gateway, partition) == 0
    assert (await page_tasks(gateway, namespace, TaskFilter(), limit=1)).tasks
    route = await set_partitions(gateway, namespace, "default", 2)
    assert await partition_status(gateway, partition) is PartitionStatus.DRAINED
    assert not await retire_generation(gateway, namespace, "default", route, route.previous[0])
    assert await set_config(gateway, namespace, "lease", 30)
    assert await LimitControl(gateway, namespace, "openai").hold(1) > 0
    assert await set_identity(gateway, namespace, "agent", Identity(role="a clerk")) == 1
    file: list[Argument] = ["a.md", "0", "id", 10, 60_000, "team", "{}"]
    assert (await gateway.run(queue_script("put_file"), [namespace.workspace("team"), namespace.workspaces], file))[1]
    assert await join_group(gateway, namespace, "default", "a", ttl=60) == {"a"}
    info = WorkerInfo("b", "x", "h", 7, "0.1", ("default",), concurrency=8, in_flight=3, started=0)
    await announce(gateway, namespace, info, ttl=60)
    assert [one.id for one in await list_workers(gateway, namespace)] == ["b"]
    assert await drain_worker(gateway, namespace, "b") is DrainAnswer.ASKED


async def limit(gateway: Gateway, namespace: Namespace) -> None:
    """Call every script of limits and budgets."""
    budgets = BudgetStore(gateway, namespace)
    (standing,) = await budgets.charge([BudgetUse("t1", "", {"tokens": 1})], "a", {"tokens": 1})
    assert await budgets.wait("t1", namespace.partition("default"), "t1", standing.raises)
    assert await budgets.raise_("t1", {"tokens": 1})
    store, uses = LimitStore(gateway, namespace), [LimitUse("openai", "0" * 16)]
    await store.publish([Limit("openai", total=2, running=1, by="tenant", rate="5/m")], "app", starts=True)
    assert (await store.take([TakeRequest("a", uses)])).answers[0].granted
    assert await store.renew([("a", uses)]) == []
    assert (await store.release([ReleaseRequest("a", uses)])).hints == []
    assert await store.hold("openai", 5) > 0
    await store.publish([Limit("pool", total=1)], "app", starts=True)
    pool = [LimitUse("pool", "-")]
    (partition,) = await enqueue_limited(gateway, namespace, pool, "limited")
    assert (await list_queues(gateway, namespace, "default"))[0].limited == 1
    assert (await Admission(gateway, namespace, life=30.0).admit_due(partition)).number == 1
    delivery = await read_one(await worker(gateway, partition))
    await await_limit(gateway, delivery, "limited", Counters(), pool, retry=1.0)
    assert await wake_for_limit(gateway, partition, "limited") is False
    assert await cancel_task(gateway, partition, "limited", retention=60.0) is State.CANCELLED


async def raise_children(gateway: Gateway, namespace: Namespace, producer: Producer) -> None:
    """Call every script of joins."""
    family, small = namespace.partition("family"), namespace.partition("small")
    await producer.enqueue("t", task_id="parent", queue="family")
    parent, children = await read_one(await worker(gateway, family)), await worker(gateway, small)
    place, template = JoinPlace(family, "parent", "g"), EnvelopeTemplate("t")
    planned = [PlannedChild("small", template.message(b"{}", task_id=name)) for name in ("one", "two")]
    how: dict[str, Any] = {"on_failure": OnFailure.KEEP, "life": life_of(0, 0)}
    for first, child in enumerate(planned):  # in turn: a test tries each script on other keys first
        assert len(await add_children(gateway, parent, place, [child], first=first, **how)) == 1
    large = b'"%b"' % (b"x" * DEFAULT_PAYLOAD_LIMIT)
    await succeed(gateway, await read_one(children), "one", large, Counters(1), ran=0.1, ttl=60)
    assert (await deliver_notices(gateway, [(small, "one")])).done == 1
    handle = await known(producer, "two")
    watched = place._replace(group="h")
    assert await watch_task(gateway, parent, watched, handle.partition, "two", life=life_of(0, 0)) is None
    await SETTLING["succeed"](gateway, parent, "parent")
    for join in (place, watched):
        await close_join(gateway, join, retention=60)
    assert (await deliver_notices(gateway, [(small, "two")])).done == 1


async def converse(gateway: Gateway, namespace: Namespace) -> None:
    """Call every script of sessions."""
    turn = await send_to_session(gateway, namespace, "t", "s", "hello", queue="default")
    address = SessionAddress.of(namespace, "t", "s")
    assert (await begin_turn(gateway, address, turn, str(turn))).text == "hello"
    assert await end_turn(gateway, address, turn, SessionTurnEnd("answered", b"1"))
    record = await read_session(gateway, address)
    assert record is not None
    assert await store_correction(gateway, record, SessionCorrection("c1", "", {"goal": "x"})) == "stored"
    await check_session(gateway, address)
    assert await forget_session(gateway, address)
    assert await find_task(gateway, namespace, str(turn)) is None


async def test_each_script_runs_on_a_server_that_lost_it(gateway: Gateway, namespace: Namespace) -> None:
    needs_server(gateway, "one server is shared by two gateways")
    forgetful = Forgetful(gateway)
    await forgetful.open()
    try:
        await live(forgetful, namespace)
    finally:
        await forgetful.close()
    assert forgetful.called == {path.stem for path in SCRIPTS} - PRELUDES - {"renew_leases"}


@pytest.mark.parametrize("kind", ON_SERVERS)
async def test_each_script_runs_on_a_cluster(kind: str, namespace: Namespace) -> None:
    """A cluster refuses a script whose keys lie in several slots, and a key that is not declared."""
    program = find_program(kind)
    assert program is not None
    port = free_port()
    options = ("--save", "", "--port", str(port), "--bind", "127.0.0.1", "--cluster-enabled", "yes")
    server = RedisServer(program, options).start()
    gateway = Gateway(cluster(f"redis+cluster://127.0.0.1:{port}"))
    try:
        with redis.Redis.from_url(server.url) as client:
            client.execute_command("CLUSTER", "ADDSLOTS", *range(16_384))
            await until_the_cluster_stands(client)
        await gateway.open()
        with pytest.raises(Refused, match="slot"):
            await gateway.command("EVAL", "return 1", 2, "{a}:x", "{b}:x")
        await live(gateway, namespace)
    finally:
        await gateway.close()
        server.stop()


def cluster(url: str) -> Address:
    return Address.parse(url, data_dir=Path)


def free_port() -> int:
    """Return a port whose cluster bus port, 10,000 above, is valid too."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        if port < 55_000:
            return port


async def until_the_cluster_stands(client: redis.Redis) -> None:
    deadline = time.monotonic() + 20
    while "cluster_state:ok" not in str(client.execute_command("CLUSTER", "INFO")):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
