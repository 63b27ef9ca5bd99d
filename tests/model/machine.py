"""The state machine: every act on the queues in any order, after each of which all of Redis is compared with the model.

Time passes by changing what it is measured from: the idle time of a delivery, the score of a scheduled task, a key's
time to live. So no act waits, and the order of the acts alone decides the result.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, ClassVar, Literal

import orjson
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from perdure.deadletter.burial import bury, unreadable_id
from perdure.deadletter.letters import DeadLetter, Filter, list_letters
from perdure.deadletter.policy import Reason
from perdure.deadletter.replay import Replay, purge, replay, trim_letters
from perdure.queues import EntriesLost, Gateway, LeaseLost, Namespace, State, TaskHandle, TaskNotFound, read_record
from perdure.queues.delivery.checkpoint import Entry, Kind, close_exported, load_history, read_mark, write_entries
from perdure.queues.delivery.consumer import Consumer
from perdure.queues.delivery.due_set import promote_due, wake_version
from perdure.queues.delivery.heartbeat import renewal
from perdure.queues.delivery.leases import NOT_STARTED, Delivery, Leases, RunStatus
from perdure.queues.delivery.lost_tasks import put_back_lost
from perdure.queues.delivery.paused_tasks import await_resume, wake_paused
from perdure.queues.delivery.quarantine_store import (
    CRASH_WINDOW_MS,
    clear_quarantined,
    quarantine,
    report_crash,
    take_quarantined,
)
from perdure.queues.delivery.settlement import (
    Counters,
    WakeCondition,
    await_version,
    cancelled,
    park,
    raise_count,
    release,
    reschedule,
    succeed,
)
from perdure.queues.depth import read_depths
from perdure.queues.enqueueing import BatchEnqueuer
from perdure.queues.envelope import Envelope, TaskMessage
from perdure.queues.handle import Replacement, cancel_task
from perdure.queues.inspection.timeline import trim_timeline
from perdure.queues.junk import set_aside
from perdure.queues.keys import DATA_FORMAT, GROUP, KEY_FORMAT, RELEASED, RESERVED, SUSPECTS, is_reserved
from perdure.queues.limits.parked import wake_for_limit
from perdure.queues.partitions.assignment import join_group
from perdure.queues.partitions.resharding import close_partition
from perdure.queues.partitions.resharding import partition_status as standing_of
from perdure.queues.partitions.route import SINGLE, registered_retention
from perdure.queues.pauses import PauseRule, Pauses
from perdure.queues.shared_config import set_config
from perdure.queues.transport.large_values import LargeValue
from perdure.queues.transport.pipelining import Argument
from perdure.queues.transport.scripts import pairs, queue_script

from tests.model.ground import Ground
from tests.model.later import Id, Moment, text_of
from tests.model.ledger import HOUR, LEASE, NO_CHANGES, Handed, Ledger, LedgerCopy, Past
from tests.model.picture import Copy, put_back, take_copy, take_picture
from tests.model.promises import broken_promises
from tests.model.shelf import Stream
from tests.support.consumers import Held, worker
from tests.support.delivery_calls import EVIDENCE

__all__ = ["Queues"]

TASKS = ("t0", "t1", "t2", "t3")
WORKERS = ("a", "b", "c")
MINUTE = 60_000
FOREIGN = (b"\xff", b"", b"\x00", b"a b", b"x" * 5000)
"""Items that no part of Perdure writes."""

CHORES = (
    "trim",
    "watch",
    "leave",
    "leave",
    "forget",
    "close",
    "close",
    "close",
    "config",
    "retire",
    "retire",
    "reroute",
    "share",
)

MISTAKES = ("due", "message", "acknowledge", "both", "consumer", "skip", "ids")
"""What another program does: removes a due time or a message, acknowledges a message, and so on."""

GARBAGE: tuple[dict[bytes, bytes], ...] = (
    {b"junk": b"1"},
    {b"env": b"\xff", b"args": b"{}"},
    {b"env": b"7", b"again": b"x"},
)

OLD_LETTER = (
    (b"id", b"t3"),
    (b"task", b"t"),
    (b"reason", b"timeout"),
    (b"evidence", orjson.dumps(EVIDENCE.fields())),
    (b"attempts", b"1"),
    (b"crashes", b"0"),
    (b"worker", b"z"),
    (b"env", Envelope(id="t3", task="t").encode()),
    (b"args", b"{}"),
    (b"at", b"1"),
)

PASTS = (
    Past(0, 1, None, {}, {}, []),
    Past(1, 0, None, {"d:s": b"0", "s:#state": b"{}"}, {}, [("*", {"type": b"forked", "n": b"1", "data": b"{}"})]),
    Past(
        2,
        4,
        2,
        {"d:s": b"0", "s:#state": b"{}", "c:#step:old": b"{}"},
        {"m:7": b"5 message", "n:1": b"7 d7", "id:d7": b"7", "sent": b"1", "last": b"7"},
        [
            ("1-1", {"type": b"started", "n": b"1", "data": b"{}", "e": b"1"}),
            ("2-0", {"type": b"attempt_failed"}),
        ],
    ),
)

UPLOAD_TTL = 600_000

Written = tuple[str, str, bytes, bytes]
"""An entry: kind, step, value, log data."""

tasks = st.sampled_from(TASKS)
workers = st.sampled_from(WORKERS)
MINE, LOST, AGAIN, HANDED, OUTDONE, ANY = "mine", "lost", "taken again", "handed on", "outdone", "any"
STATUSES = [NOT_STARTED, RunStatus(2.0), RunStatus(2.0, "s", 1.0)]

standings = st.sampled_from([MINE, MINE, MINE, LOST, AGAIN, HANDED, OUTDONE, ANY])
numbers = st.integers(0, 3)
aheads = st.sampled_from([0, 0, 0, 1])
"""By how many entries a run is ahead of the record: Redis has lost them."""

followings = st.sampled_from([0, 0, 1, 2])
"""By how many places a clean-up task follows its task in the list of tasks; 0 for none."""

few = st.sampled_from([0, 0, 1, 2])
"""Number of chunks of the arguments of a task."""

depths = st.sampled_from([None, None, None, 0, 1, 2, 3])
"""Numbers of waiting tasks from which on no task is stored."""

rarely = st.sampled_from([False, False, False, True])
which = st.integers(0, 60)
delays = st.sampled_from([0, MINUTE, HOUR])
lifetimes = st.sampled_from([HOUR, 2 * HOUR])
changes = st.sampled_from(
    [
        NO_CHANGES,
        NO_CHANGES,
        {"d:s": b"", "i:s": b"", "s:u:1": b""},
        {"s:#forgotten": b"1", "d:s": b"", "head:1": b"head of an attempt", "head:2": b"head of another"},
    ]
)
"""Fields of the checkpoint for the next attempt."""
KEEPS = 'nonce [["openai","-",1]]'
"""The token of limits that a parked task keeps, as its record names it."""

NOTE_KEPT = queue_script("note_kept")

WAITS = ("approval", "approval#2", "page/approval", "approval#3")
OF_WAITS = ("wait", "answered")
ITEMS = ("out 10000 1 1 s", "out 10000 key ab", "out 10000 key cd", "tokens 10000 0 1 page 3/")
"""Places of items."""

MARKS = ("out 1 s", "tokens 0 page 3/")
NAMES = ("speed", "page.2", "status")
VALUES = {"v:speed": b"5 1", "values": b"speed", "changed": b"5"}
entries = st.lists(
    st.tuples(
        st.sampled_from(
            [
                *("done", "done", "intent", "saved", "mark", "event", "event", "drop", "taken", "taken", "moved"),
                *("chunk", "part", "progress", "base", "excuse", "wait", "wait", "answered", "value"),
                *("emitted", "emitted", "emits", "cut"),
            ]
        ),
        st.sampled_from(["s", "u:1"]),
        numbers,
    ),
    min_size=1,
    max_size=3,
)


@dataclass
class Sent:
    """Entries of one run: the number of the last entry before it, and those that it has stored."""

    before: int
    entries: list[Written] = field(default_factory=list)

    @property
    def last(self) -> int:
        return self.before + len(self.entries)


class Queues(RuleBasedStateMachine):
    """One partition with a few tasks and workers, and clients that cancel, replay and purge."""

    ground: ClassVar[Ground]

    def __init__(self) -> None:
        super().__init__()
        self.namespace = Namespace(f"m{uuid.uuid4().hex[:12]}")
        self.partition = self.namespace.partition("default")
        self.ledger = Ledger(self.namespace, self.partition)
        self.names = {name: name for name in WORKERS}  # replaced after a crash
        self.crew: dict[str, Consumer] = {}
        self.tables: dict[str, Leases[Any]] = {}
        self.deliveries: list[tuple[Delivery, str]] = []  # all deliveries so far, stale ones too
        self.written: set[object] = set()  # fences under which something was recorded
        self.runs: dict[object, Sent] = {}  # by fence, also of a delivery that Redis has lost
        self.copy: tuple[Copy, LedgerCopy] | None = None
        self.marks: list[tuple[str, tuple[bytes, ...]]] = []  # all exports so far, late ones too
        self.letters: list[DeadLetter] = []  # all letters so far, stale ones too
        self.ground.listen(self.namespace)
        self.number = 0
        self.sound = False  # whether Redis agreed with the model at the last comparison

    def teardown(self) -> None:
        """Check that the partition can be closed at the end of every run."""
        try:
            if self.sound:
                self.close(2)
                self.retire(long_ago=False)
        finally:
            self.ground.empty(self.namespace)

    # -- helpers of all rules

    @invariant()
    def is_as_expected(self) -> None:
        """Compare all keys and published messages with the model, and check the invariants."""
        self.sound = False
        picture = self.ground.run(take_picture(self.ground.gateway, self.namespace))
        agree(self.ledger.held.compare(picture), [])
        agree(self.ground.heard(), self.ledger.news)
        self.ledger.news.clear()
        agree(list(broken_promises(self.ledger, TASKS)), [])
        if self.ledger.held.exists(self.partition.closed):
            agree(int(self.ground.run(standing_of(self.ground.gateway, self.partition))), self.ledger.drained())
        for delayed in (False, True):
            depths = self.ground.run(read_depths(self.ground.gateway, [self.partition], delayed=delayed))
            agree(depths, [self.ledger.depth(delayed=delayed)])
        self.sound = True

    def same(self, answer: object, expected: object) -> None:
        agree(answer, expected)
        self.is_as_expected()

    def pick(self, which: int, standing: str) -> tuple[Delivery, str]:
        """Pick a delivery to act on: one that owns its message, one that has just lost it, or any former one."""
        owning = [one for one in self.deliveries if self.ledger.owned(one[0])]
        if not owning:
            owning = self.obtain()
        pool = self.deliveries if standing == ANY else owning
        picked = pool[-1 - which % len(pool)]
        if self.ledger.owned(picked[0]) and standing != ANY:
            if which % 2:
                self.write(*picked, [("intent", "u:1", b"0", b"{}"), ("done", "s", b"%d" % which, b"{}")])
            if standing != MINE and self.ledger.owned(picked[0]):  # a write after a loss may release it
                self.take_away(picked[0], standing)
        return picked

    def take_away(self, delivery: Delivery, standing: str) -> None:
        """Let another worker, or the same one, take the message: its lease passed, or it was released.

        It settles the message if the standing is OUTDONE.
        """
        if standing in (LOST, AGAIN):
            self.age(sorted(self.held_by_workers()).index(delivery.entry), LEASE)
            self.is_as_expected()
        else:
            self.give_back(delivery, None)
        if standing == AGAIN:  # its run failed outside the handler
            self.end(delivery)
        others = [name for name in WORKERS if (self.names[name] == delivery.worker) == (standing == AGAIN)]
        self.claim((others or WORKERS)[0], 4, heard=True)
        self.is_as_expected()
        newer, task = self.deliveries[-1]
        if standing == OUTDONE and task in TASKS and self.ledger.owned(newer):
            self.put_off(newer, task, MINUTE, (1, 1, 1))

    def obtain(self) -> list[tuple[Delivery, str]]:
        """Return deliveries of a new task, or of the present messages."""
        for task in TASKS:
            self.expire(task)
            self.come_due(task)
        self.promote()
        self.is_as_expected()
        self.enqueue([TASKS[0]], 0, headers=False)
        self.read("a", 4, heard=True)
        self.is_as_expected()
        for entry in range(len(self.held_by_workers())):
            self.age(entry, LEASE)
        self.is_as_expected()
        self.claim("b", 4, heard=True)
        self.is_as_expected()
        return [one for one in self.deliveries if self.ledger.owned(one[0])] or self.deliveries

    def held_by_workers(self) -> list[bytes]:
        return [one for one, pending in self.ledger.pending.items() if pending.owner != RELEASED]

    def messages(self, some: list[str], headers: bool) -> list[TaskMessage]:
        found = []
        for task in some:
            self.number += 1
            reported = {"from": "here"} if headers else {}
            cleans_up = headers and self.number % 2 == 0
            envelope = Envelope(id=task, task="t", headers=reported, on_end=cleans_up).encode()
            names = None if headers else ("t", "")
            found.append(TaskMessage(task, envelope, orjson.dumps({"n": self.number}), None, True, names=names))
        return found

    def cleanup(self, task: str, following: int) -> TaskMessage | None:
        """Return the clean-up task of a task: one of the others, which may be stored already; None for 0."""
        if not following:
            return None
        other = TASKS[(TASKS.index(task) + following) % len(TASKS)]
        return TaskMessage(other, Envelope(id=other, task="t").encode(), b'{"n":0}', None, True)

    def join(self, name: str) -> Consumer:
        """Return the consumer of the worker, which joins the stream at its first use."""
        name = self.names[name]
        if name not in self.crew:
            self.tables[name] = Leases()
            made = worker(self.ground.gateway, self.partition, name=name, lease=LEASE / 1000, leases=self.tables[name])
            self.crew[name] = self.ground.run(made)
            self.ledger.join(name)
            self.ledger.held.put_new(self.namespace.queues, "default", b"1")
            self.ledger.held.put_new(self.namespace.deployment, "format", str(KEY_FORMAT).encode())
        return self.crew[name]

    def begin(self, name: str, deliveries: list[Delivery], expected: list[Handed], *, heard: bool = True) -> None:
        """Add deliveries that reached a worker, or whose reply was lost."""
        reported = [(one.entry, one.count, dict(one.fields)) for one in deliveries]
        agree(reported, expected)
        for one in deliveries if heard else []:
            self.hold(one, _task_of(one))

    def hold(self, delivery: Delivery, task: str) -> None:
        self.deliveries.append((delivery, task))
        self.runs[delivery.fence] = Sent(self.last_entry(task))
        self.tables[delivery.worker].hold(Held(delivery, task))

    def end(self, delivery: Delivery) -> None:
        """Remove a delivery that the worker no longer holds: settled, or lost."""
        for held in self.tables[delivery.worker].holders():
            if held.delivery.entry == delivery.entry:
                self.tables[delivery.worker].drop(held)

    # -- enqueuing

    @initialize(old=st.booleans(), some=st.lists(tasks, unique=True, max_size=3))
    def start(self, old: bool, some: list[str]) -> None:
        """Start a run, with or without dead letters of three days ago and an hour ago whose records have expired."""
        now = self.ground.command("TIME")
        self.ledger.held.now = int(now[0]) * 1000 + int(now[1]) // 1000
        for age in (72 * HOUR, HOUR) if old else ():
            entry = b"%d-0" % (self.ledger.held.now - age)
            self.ground.command("XADD", self.partition.dead, entry, *(part for pair in OLD_LETTER for part in pair))
            self.ledger.held.add(self.partition.dead, OLD_LETTER).known = entry
        self.look_for_letters()
        if some:
            self.enqueue(some, 0, headers=False)

    @rule(some=st.lists(tasks, unique=True, min_size=1, max_size=3), delay=delays, headers=st.booleans(), limit=depths)
    def enqueue(self, some: list[str], delay: int, headers: bool, limit: int | None = None) -> None:
        """Enqueue tasks. limit: number of waiting tasks from which on none is stored."""
        messages = self.messages(some, headers)
        sending: Any = BatchEnqueuer(self.ground.gateway, None, delay / 1000)  # type: ignore[arg-type]  # unused
        stored = [(one.id, one.envelope, one.arguments) for one in messages]
        for _ in range(2):  # the reply may be lost
            expected = self.ledger.schedule(delay, stored, limit) if delay else self.ledger.enqueue(stored, limit)
            self.same(self.ground.run(sending._send(self.partition, messages, limit)), expected)

    def message(self, task: str, chunks: int, missing: bool) -> tuple[bytes, bytes, str | None]:
        """Return envelope and arguments of a task, and the upload of these if they have chunks; one may be missing."""
        (message,) = self.messages([task], False)
        if not chunks:
            return message.envelope, message.arguments, None
        digest = f"{self.number:x}"
        upload = self.partition.upload(task, digest)
        for number in range(chunks - missing):
            for _ in range(2):
                field, chunk = f"args:{digest}:{number}", b"chunk %d" % number
                given: list[Argument] = [UPLOAD_TTL, field, chunk]
                self.ground.run(self.ground.gateway.run(queue_script("upload_chunk"), [upload], given))
                self.ledger.upload_chunk(upload, field, chunk)
        self.is_as_expected()
        return message.envelope, LargeValue(digest, 9, chunks).encode(), upload

    def store(self, script: str, keys: list[str], args: Sequence[Argument], expected: object) -> None:
        self.same(self.ground.run(self.ground.gateway.run(queue_script(script), keys, args)), expected)

    @rule(task=tasks, delay=delays, chunks=few, missing=rarely, claimed=rarely, ended=rarely, limit=depths)
    def enqueue_one(
        self,
        task: str,
        delay: int,
        chunks: int,
        missing: bool,
        claimed: bool = False,
        ended: bool = False,
        limit: int | None = None,
    ) -> None:
        """Store a task with large arguments or without, under a claim or without. ended: the claim has ended."""
        at = self.partition
        envelope, args, upload = self.message(task, chunks, missing)
        keys = [at.ready, at.closed, at.timeline, at.record(task), at.due, at.nudge, *([upload] if upload else [])]
        until: int | str = 1 if ended else 2**53 if claimed else ""
        for _ in range(2):
            expected = self.ledger.enqueue_one(delay, task, envelope, args, upload, ended=ended, limit=limit)
            most = [] if limit is None else [limit]
            self.store("enqueue_one", keys, [task, envelope, args, delay, until, "", "", "", "", *most], expected)

    @rule(task=tasks, planned=few, epoch=few, delay=delays, claimed=rarely, ended=rarely)
    def fire_schedule(
        self, task: str, planned: int, epoch: int, delay: int, claimed: bool = False, ended: bool = False
    ) -> None:
        """Fire a planned time of a schedule, under a claim of a unique key or without. ended: that has ended."""
        at = self.partition
        envelope, args, _ = self.message(task, 0, False)
        keys = [at.due, at.nudge, at.closed, at.timeline, at.record(task), at.fired("hourly")]
        until: int | str = 1 if ended else 2**53 if claimed else ""
        given: dict[str, Any] = {"planned": planned, "epoch": epoch, "delay": delay, "ended": ended}
        for _ in range(2):
            expected = self.ledger.fire_schedule(task, envelope, args, **given)
            arguments: list[Argument] = [task, envelope, args, planned, delay, HOUR, until, "", epoch]
            self.store("fire_schedule", keys, arguments, expected)

    @rule(task=tasks, chunks=few, missing=rarely, late=rarely)
    def reset(self, task: str, chunks: int, missing: bool, late: bool) -> None:
        """Replace an ended task. late: the caller has read the record before it was replaced once already."""
        at = self.partition
        known = self.ledger.known(task)
        for number in range(1 + late):
            envelope, args, upload = self.message(task, chunks, missing)
            keys = [at.ready, at.closed, at.record(task), at.steps(task), at.log(task), at.dead]
            keys += [at.inbox(task), at.timeline, *([upload] if upload else [])]
            if number:
                self.cancel(task, HOUR)
            token = f"token {self.number}"
            for _ in range(2):
                expected = self.ledger.reset(task, envelope, args, token, known, upload)
                self.store("reset_task", keys, [envelope, args, token, task, *known], expected)

    @rule(
        task=tasks,
        source=st.sampled_from(["one token", "other token"]),
        values=st.sampled_from([{}, VALUES]),
        chunks=few,
        missing=rarely,
    )
    def hand(self, task: str, source: str, values: dict[str, bytes], chunks: int, missing: bool) -> None:
        at = self.partition
        envelope, args, upload = self.message(task, chunks, missing)
        keys = [at.ready, at.closed, at.record(task), at.steps(task), at.timeline, at.inbox(task)]
        keys += [upload] if upload else []
        given = (envelope, args, source, "s:#received", b"{}")
        for _ in range(2):
            expected = self.ledger.hand(task, *given, values, upload)
            self.store("enqueue_successor", keys, [*given, task, *flat_of(values)], expected)

    @rule(task=tasks, chunks=few, missing=rarely)
    def enqueue_child(self, task: str, chunks: int, missing: bool) -> None:
        at = self.partition
        envelope, args, upload = self.message(task, chunks, missing)
        keys = [at.ready, at.closed, at.record(task), at.timeline, *([upload] if upload else [])]
        watchers = b"[%d]" % self.number
        for _ in range(2):
            expected = self.ledger.enqueue_child(task, envelope, args, watchers, upload)
            self.store("enqueue_child", keys, [envelope, args, task, watchers], expected)

    @rule(task=tasks, stale=rarely)
    def watch_task(self, task: str, stale: bool) -> None:
        """Add a watcher. stale: another one was added since the caller has read them."""
        self.number += 1
        record = self.partition.record(task)
        known = b"stale" if stale else self.ledger.held.get(record, "watchers") or b""
        for _ in range(2):
            watchers = b"[%d]" % self.number
            expected = self.ledger.watch(task, known, watchers)
            self.store("watch", [record], [known, watchers], expected)

    @rule(task=tasks, stale=rarely, shortest=st.sampled_from([1000, 90 * MINUTE]))
    def notice_sent(self, task: str, stale: bool, shortest: int) -> None:
        """Confirm a notice. stale: the task has ended again since it was read."""
        at, end = self.partition, self.ledger.end_of(task)
        end = (b"1", *end[1:]) if stale else end
        given: list[Argument] = [task, *end, shortest, registered_retention(shortest / 1000)]
        for _ in range(2):
            expected = self.ledger.notice_sent(task, end, shortest)
            self.store("notice_sent", [at.record(task), at.outbox, at.retentions], given, int(expected))

    @rule(task=tasks, source=st.sampled_from(["one token", "other token"]))
    def confirm_successor(self, task: str, source: str) -> None:
        record = self.partition.record(task)
        known = self.ledger.held.exists(record)
        for _ in range(2):
            answer = self.ground.run(self.ground.gateway.run(queue_script("confirm_successor"), [record], [source]))
            if known:
                self.ledger.held.put(record, {"continued": source})
            self.same(bool(answer), known)

    @rule(
        task=tasks,
        source=st.sampled_from(["one 1-0", "import 1"]),
        past=st.sampled_from(PASTS),
        chunks=few,
        lost=st.sampled_from(["", "", "", "", "chunk", "fields", "events"]),
    )
    def store_copy(self, task: str, source: str, past: Past, chunks: int, lost: str) -> None:
        """Store a fork or an imported task. lost: what its uploads have lost when it is stored."""
        at = self.partition
        envelope, args, upload = self.message(task, chunks, lost == "chunk")
        parts = self.upload_past(task, past, lost)
        keys = [at.ready, at.closed, at.record(task), at.timeline, at.steps(task), at.log(task), at.inbox(task)]
        keys += [*parts, at.due, at.nudge, *([upload] if upload else [])]
        given: list[Argument] = [envelope, args, source, task, past.events, past.entries, past.format or ""]
        given += [len(past.fields), len(past.log), len(past.inbox), "", b"head of a copy"]
        for _ in range(2):
            expected = self.ledger.store_copy(task, envelope, args, source, past, parts, upload)
            self.store("enqueue_copy", keys, given, expected)

    def upload_past(self, task: str, past: Past, lost: str) -> tuple[str, str, str]:
        """Upload steps, log and inbox, each event alone; return the keys."""
        steps, log, inbox = (self.partition.upload(task, f"{self.number:x}.{name}") for name in ("s", "l", "i"))
        for key, fields in ((steps, past.fields), (inbox, past.inbox)):
            for name, value in list(fields.items())[lost == "fields" :]:
                self.ground.run(self.ground.gateway.run(queue_script("upload_chunk"), [key], [UPLOAD_TTL, name, value]))
                self.ledger.upload_chunk(key, name, value)
        for before, (entry, fields) in enumerate(past.log):
            if before and lost == "events":
                self.ground.command("DEL", log)
                self.ledger.held.delete(log)
            given = [UPLOAD_TTL, before, entry, len(fields), *flat_of(fields)]
            for _ in range(2):
                self.store("upload_events", [log], given, self.ledger.upload_events(log, before, [(entry, fields)]))
        self.is_as_expected()
        return steps, log, inbox

    @rule(task=tasks)
    def begin_export(self, task: str) -> None:
        """Read what an export compares when it ends the task, which may move before that."""
        mark = self.ground.run(read_mark(self.ground.gateway, self.partition, task))
        agree(mark, self.ledger.mark(task))
        self.marks.append((task, mark))

    @rule(which=which, how=st.sampled_from(["parked", "dead", "as it is", "late"]), kept=lifetimes)
    def close_exported(self, which: int, how: str, kept: int) -> None:
        """End an exported task. how: where it is at the export; `late` if it may have moved since."""
        if how in ("parked", "dead"):
            delivery, task = self.pick(which, MINE)
            if task in TASKS and self.ledger.owned(delivery):
                if how == "parked":
                    self.park(which, MINE, HOUR, (1, 0, 0), ["message"], came=False)
                else:
                    self.bury(which, MINE, raw=False, counters=(1, 0), kept=HOUR)
                self.is_as_expected()
        if how != "late":
            self.begin_export(TASKS[which % len(TASKS)])
        if not self.marks:
            return
        task, mark = self.marks[-1 - (which % len(self.marks) if how == "late" else 0)]
        if self.has_raw_letter(task):  # an export cannot read such a task
            return
        for _ in range(2):
            expected = self.ledger.close_exported(task, mark, b"{}", kept)
            act = close_exported(self.ground.gateway, self.partition, task, mark, event=b"{}", retention=kept / 1000)
            self.same(self.ground.run(act), expected)

    def has_raw_letter(self, task: str) -> bool:
        entry = self.ledger.held.get(self.partition.record(task), "dead")
        fields = self.ledger.held.stream(self.partition.dead).find(entry) if entry else None
        return fields is not None and b"env" not in dict(fields)

    @rule(task=tasks)
    def expire_uploads(self, task: str) -> None:
        """Let the TTL of uploads pass whose tasks were not stored."""
        held = self.ledger.held
        for key in [key for key in (*held.hashes, *held.streams) if key.startswith(self.partition.upload(task, ""))]:
            self.ground.command("DEL", key)
            held.delete(key)

    @rule(
        task=tasks,
        behind=st.sampled_from([0, 0, 0, 1]),
        wakes=st.sampled_from(["message", "compaction"]),
        replayed=rarely,
    )
    def edit_checkpoint(self, task: str, behind: int, wakes: str, replayed: bool = False) -> None:
        """Edit a checkpoint twice: a reply may be lost.

        behind: what was read is older than that by one event. replayed: it is from another replay of the task.
        """
        at, held = self.partition, self.ledger.held
        events, entries = (int(held.get(at.record(task), name) or 0) for name in ("events", "entries"))
        events = max(0, events - behind)
        mark = [held.get(at.record(task), name) or b"" for name in ("settled", "replays", "entry")]
        mark[1] = b"9" if replayed else mark[1]
        keys = [at.record(task), at.steps(task), at.log(task), at.due, at.nudge, at.ready]
        given: list[Argument] = [
            GROUP,
            RESERVED,
            task,
            events,
            entries,
            *mark,
            "archived",
            b"{}",
            wakes,
            b"head of an edit",
        ]
        given += [1, "s:#blob", "s:#state", b"{}"]
        for _ in range(2):
            expected = 0 if replayed else self.ledger.edit(task, events, entries, wakes, {"s:#state": b"{}"}, "s:#blob")
            self.same(self.ground.run(self.ground.gateway.run(queue_script("edit_checkpoint"), keys, given)), expected)

    @rule(task=tasks, stale=rarely)
    def forget_task(self, task: str, stale: bool) -> None:
        """Delete a task. stale: the caller has read another successor than it has now."""
        at = self.partition
        successor = b"other" if stale else self.ledger.held.get(at.record(task), "handed_to") or b""
        keys = [at.ready, at.record(task), at.steps(task), at.log(task), at.inbox(task), at.control(task)]
        keys += [at.due, at.dead, at.timeline]
        for _ in range(2):
            expected = self.ledger.forget_task(task, successor)
            given: list[Argument] = [GROUP, RESERVED, task, successor, self.namespace.worker_channel("")]
            self.store("forget_task", keys, given, expected)

    @rule(task=tasks)
    def dismiss(self, task: str) -> None:
        for _ in range(2):
            expected = self.ledger.dismiss(task, b"{}")
            record, log = self.partition.record(task), self.partition.log(task)
            first = self.ground.command("XRANGE", log, "-", "+", "COUNT", 1)
            known = [first[0][0] if first else "0-1", self.ledger.held.get(record, "replays") or b""]
            self.store("dismiss", [record, log], [b"{}", *known], expected)

    def post_garbage(self, fields: dict[bytes, bytes]) -> None:
        flat = [part for pair in fields.items() for part in pair]
        self.ground.command("XADD", self.partition.ready, "*", *flat)
        self.ledger.held.add(self.partition.ready, tuple(fields.items()))

    @rule(fields=st.sampled_from(GARBAGE), name=workers)
    def bury_garbage(self, fields: dict[bytes, bytes], name: str) -> None:
        self.read(name, 4, heard=True)
        self.is_as_expected()
        self.post_garbage(fields)
        self.is_as_expected()
        self.read(name, 4, heard=True)
        self.is_as_expected()
        self.bury(0, ANY, raw=True, counters=(0, 0), kept=HOUR)

    # -- reading and claiming

    @rule(name=workers, most=st.integers(1, 4), heard=st.sampled_from([True, True, True, False]))
    def read(self, name: str, most: int, heard: bool) -> None:
        taken = self.ground.run(self.join(name).read(most, block=None))
        expected, why = self.ledger.read(self.names[name], most)
        self.begin(name, taken.deliveries, expected, heard=heard)
        reported = (taken.claimable, taken.due, taken.route_changed, taken.quarantined)
        heard_of = [one in why for one in (b"released", b"due", b"route", b"suspect")]
        agree(reported, tuple(heard_of))

    @rule(name=workers, most=st.integers(1, 4), heard=st.sampled_from([True, True, True, False]))
    def claim(self, name: str, most: int, heard: bool) -> None:
        _, claimed = self.ground.run(self.join(name).claim(self.partition, "0-0", most))
        self.begin(name, claimed, self.ledger.claim(self.names[name], LEASE, most, self.holding(name)), heard=heard)

    @rule(name=workers)
    def claim_all(self, name: str) -> None:
        """Claim page by page, to the end of the cursor."""
        consumer, cursor, claimed = self.join(name), "0-0", list[Delivery]()
        while True:
            cursor, some = self.ground.run(consumer.claim(self.partition, cursor, 1))
            claimed += some
            if cursor == "0-0":
                break
        self.begin(name, claimed, self.ledger.claim(self.names[name], LEASE, 100, self.holding(name)))

    @rule(name=workers)
    def adopt(self, name: str) -> None:
        adopted = self.ground.run(self.join(name).recover_own(self.partition))
        self.begin(name, adopted, self.ledger.adopt(self.names[name], self.holding(name)))

    def holding(self, name: str) -> set[bytes]:
        """Return the entries in the worker's table."""
        return {held.delivery.entry for held in self.tables[self.names[name]].holders()}

    @rule(which=which, standing=standings)
    def raise_count(self, which: int, standing: str) -> None:
        delivery, task = self.pick(which, standing)
        answers = []
        for _ in range(2):
            answers.append(self.ledger.raise_count(delivery))
            self.same(self.ground.run(_raised(self.ground.gateway, delivery)), answers[-1])
        if all(answers):
            raised = replace(delivery, count=delivery.count + 1, claimed=True)
            self.end(delivery)
            self.hold(raised, task)

    @rule(some=st.lists(which, min_size=1, max_size=3), standing=standings, status=st.sampled_from(STATUSES))
    def beat(self, some: list[int], standing: str, status: RunStatus) -> None:
        picked = [self.pick(one, standing) for one in some]
        for position in range(len(self.held_by_workers())):
            self.age(position, LEASE // 2)
        self.is_as_expected()
        beating = picked[0][0].worker
        picked = [one for one in picked if one[0].worker == beating]
        held = [(delivery, task, status) for delivery, task in picked]
        call = renewal(self.partition, LEASE / 1000, beating, held)
        for _ in range(2):
            answer = self.ground.run(self.ground.gateway.run(queue_script("renew_leases"), *call))
            self.same(tuple(answer[1:]), self.ledger.beat(beating, picked, status))

    # -- during the run

    @rule(which=which, standing=standings, some=entries, off=st.sampled_from([0, 0, 0, 1, 2, -1, -2]))
    def record(self, which: int, standing: str, some: list[tuple[str, str, int]], off: int) -> None:
        delivery, task = self.pick(which, standing)
        if task not in TASKS:
            return
        if any(kind == "taken" for kind, *_ in some):
            self.send(task, which)
        some = [one for one in some for _ in range(1 + (one[0] == "base"))]  # each deletes what precedes the former one
        inbox = self.partition.inbox(task)
        used = int(self.ledger.held.get(inbox, "used") or 0)
        listed = [(self.ledger.held.get(inbox, f"n:{used + n}") or b"1").partition(b" ")[0] for _, _, n in some]
        named = [
            (
                kind,
                {"taken": number.decode(), "chunk": f"ab:{n % 2}", "value": NAMES[n % 3]}.get(
                    kind, _place(kind, step, n)
                ),
                n,
            )
            for (kind, step, n), number in zip(some, listed, strict=True)
        ]
        values = [b"ab %d" % (n % 3) if kind == "drop" and n % 2 else b"%d" % n for kind, _, n in named]
        values = [
            b"" if kind in ("chunk", "emits") and n % 3 == 2 else value
            for (kind, _, n), value in zip(named, values, strict=True)
        ]
        values = [
            b"%x" % (160 + n % 6) if kind == "answered" and n % 2 else b"" if kind == "answered" else value
            for (kind, _, n), value in zip(named, values, strict=True)
        ]
        excused = int(self.ledger.held.get(self.partition.record(task), "excused") or 0)
        values = [
            b"%d %d" % (excused + n, CRASH_WINDOW_MS) if kind == "excuse" else value
            for (kind, _, n), value in zip(named, values, strict=True)
        ]
        written = [
            (kind, step, value, _log_data(kind, task, n)) for (kind, step, n), value in zip(named, values, strict=True)
        ]
        self.write(delivery, task, written, off)

    def last_entry(self, task: str) -> int:
        return int(self.ledger.held.get(self.partition.record(task), "entries") or 0)

    def write(self, delivery: Delivery, task: str, written: Sequence[Written], off: int = 0) -> None:
        """Write entries. off: how many of them are stored already, or, if negative, how many before them are lost.

        If Redis has lost entries before them, the run sends those again that it has written itself; if others are lost
        too, it releases the task, and the next run continues after the last stored one.
        """
        if task not in TASKS:
            return
        sent = self.runs[delivery.fence]
        answer = self.send_entries(delivery, task, max(1, sent.last + 1 - off), written)
        if answer < 0 and off >= 0:
            first = -answer
            if first > sent.before:
                self.send_entries(delivery, task, first, [*sent.entries[first - sent.before - 1 :], *written])
            else:
                self.give_back(delivery, task)

    def send_entries(self, delivery: Delivery, task: str, first: int, written: Sequence[Written]) -> int:
        """Write entries with numbers from `first` on. Return the answer: it is negative if earlier ones are missing."""
        answer = 0
        for _ in range(2):
            head = b"head %d" % (first + len(written))
            expected = self.ledger.record(delivery, task, first, written, head)
            given = [Entry(Kind(kind), step, value, data) for kind, step, value, data in written]
            act = write_entries(self.ground.gateway, delivery, task, given, first=first, head=head)
            try:
                answer = 1 + self.ground.run(act).cancel
                self.written.add(delivery.fence)
            except LeaseLost:
                answer = 0
            except EntriesLost as lost:
                answer = -1 - lost.last
            self.same(answer, expected)
        sent = self.runs[delivery.fence]
        if answer > 0:
            sent.entries += written[max(0, sent.last + 1 - first) :]
        return answer

    # -- settling a delivery

    @rule(
        which=which,
        standing=standings,
        success=st.booleans(),
        counters=st.tuples(numbers, numbers),
        ttl=lifetimes,
        ahead=aheads,
        following=followings,
    )
    def finish(
        self,
        which: int,
        standing: str,
        success: bool,
        counters: tuple[int, int],
        ttl: int,
        ahead: int,
        following: int,
    ) -> None:
        delivery, task = self.pick(which, standing)
        if task not in TASKS:
            return
        cleanup = self.cleanup(task, following)
        written = delivery.fence in self.written
        state, result, act = ("succeeded", b"[1]", None) if success else ("cancelled", b"null", cancelled)
        last = self.last_entry(task) + ahead if success else 0
        for _ in range(2):
            expected = self.ledger.finish(
                delivery, task, state, result, counters, 1500, ttl, written or delivery.has_history or bool(cleanup),
                last, cleanup,
            )  # fmt: skip
            counts = Counters(*counters)
            rest: dict[str, Any] = {"ran": 1.5, "ttl": ttl / 1000, "written": written, "cleanup": cleanup}
            if act is None:
                ended = succeed(self.ground.gateway, delivery, task, result, counts, **rest, entries=last)
            else:
                ended = act(self.ground.gateway, delivery, task, counts, **rest)
            self.same(self.ground.accepted(ended), expected)
        self.end(delivery)

    @rule(
        which=which,
        standing=standings,
        delay=delays,
        counters=st.tuples(numbers, numbers, numbers),
        ahead=aheads,
        changed=changes,
    )
    def retry(
        self,
        which: int,
        standing: str,
        delay: int,
        counters: tuple[int, int, int],
        ahead: int,
        changed: Mapping[str, bytes],
    ) -> None:
        delivery, task = self.pick(which, standing)
        if task in TASKS:
            self.put_off(delivery, task, delay, counters, ahead, changed)

    @rule(
        which=which,
        standing=standings,
        delay=delays,
        counters=st.tuples(numbers, numbers, numbers),
        waits=st.lists(st.sampled_from(["message", "time", "answer", "limit"]), max_size=3),
        came=st.booleans(),
        ahead=aheads,
        keeps=st.booleans(),
    )
    def park(
        self,
        which: int,
        standing: str,
        delay: int,
        counters: tuple[int, int, int],
        waits: Sequence[str],
        came: bool,
        ahead: int = 0,
        keeps: bool = False,
    ) -> None:
        """Park a task that waits for messages, answers, a limit, or its time; messages may come before and after it."""
        delivery, task = self.pick(which, standing)
        if task not in TASKS:
            return
        seen = int(self.ledger.held.get(self.partition.inbox(task), "last") or 0)
        values = {"message": str(seen), "answer": WAITS[which % 4], "limit": "openai", "time": ""}
        conditions: list[WakeCondition] = [(kind, values[kind]) for kind in waits]
        last = self.last_entry(task) + ahead
        if came:
            self.send(task, which + 1)
        for _ in range(2):
            kept = KEEPS if keeps else ""
            expected = self.ledger.park(delivery, task, delay, counters, "message", conditions, last, kept)
            given: Any = {"delay": delay / 1000, "waits": "message", "conditions": conditions, "entries": last}
            given |= {"keeps": kept, "renewed_in": 60.0}
            act = park(self.ground.gateway, delivery, task, Counters(*counters), **given)
            self.same(self.ground.accepted(act), expected)
        self.end(delivery)
        self.send(task, which)

    @rule(
        which=which,
        standing=standings,
        needed=numbers,
        limit=lifetimes,
        long_ago=st.booleans(),
        name=st.sampled_from([None, "report"]),
    )
    def await_version(
        self, which: int, standing: str, needed: int, limit: int, long_ago: bool, name: str | None
    ) -> None:
        """Park a task until a newer worker comes; it may have waited for one before. name: it needs newer code."""
        delivery, task = self.pick(which, standing)
        if task not in TASKS:
            return
        record = self.partition.record(task)
        if long_ago and self.ledger.held.get(record, "newer_since") is not None:
            self.ground.command("HSET", record, "newer_since", 1)
            self.ledger.held.put(record, {"newer_since": 1})
        counters = None if name is None else Counters(1, 2, 3)
        given: Any = {"limit": limit / 1000, "task": name, "counters": counters}
        for _ in range(2):
            expected = self.ledger.await_version(delivery, task, needed, limit, name, counters)
            act = await_version(self.ground.gateway, delivery, task, needed, **given)
            self.same(self.ground.accepted(act), expected)
        self.end(delivery)

    @rule(task=tasks)
    def wake_for_limit(self, task: str) -> None:
        for _ in range(2):
            expected = self.ledger.wake_for_limit(task)
            self.same(self.ground.run(wake_for_limit(self.ground.gateway, self.partition, task)), expected)

    @rule(task=tasks, renewed=st.booleans(), same=st.booleans())
    def note_kept(self, task: str, renewed: bool, same: bool) -> None:
        """Note what has become of the token of a parked task, as it was looked at, or as it was before."""
        text = KEEPS if same else "former []"
        for _ in range(2):
            expected = self.ledger.note_kept(task, text, renewed=renewed)
            args: list[Argument] = [3_600_000, task, text, "1" if renewed else ""]
            self.same(self.ground.run(self.ground.gateway.run(NOTE_KEPT, [self.partition.kept], args)), expected)

    @rule(tasks=st.sampled_from([{}, {"report": 1}, {"report": 3}]))
    def wake_version(self, tasks: dict[str, int]) -> None:
        for _ in range(2):
            expected = self.ledger.wake_version(DATA_FORMAT, tasks)
            self.same(self.ground.run(wake_version(self.ground.gateway, self.partition, tasks)), expected)

    @rule(which=which, standing=standings, number=numbers)
    def await_resume(self, which: int, standing: str, number: int) -> None:
        """Park a task that a pause of an operator holds."""
        delivery, task = self.pick(which, standing)
        if task not in TASKS:
            return
        for _ in range(2):
            expected = self.ledger.await_resume(delivery, task, number, HOUR, 2 * HOUR, (1, 2, 3))
            act = await_resume(self.ground.gateway, delivery, task, number, Counters(1, 2, 3))
            self.same(self.ground.accepted(act), expected)
        self.end(delivery)

    @rule(rules=st.lists(numbers, unique=True, max_size=2), revision=numbers)
    def wake_paused(self, rules: list[int], revision: int) -> None:
        """Wake what no pause holds any more. The caller knows the pauses up to a revision."""
        known = sorted(number for number in rules if number <= revision)
        pauses = Pauses([PauseRule(task="report", number=number) for number in known], revision)
        for _ in range(2):
            expected = self.ledger.wake_paused(revision, known)
            self.same(tuple(self.ground.run(wake_paused(self.ground.gateway, self.partition, pauses))), expected)

    @rule(which=which, delay=st.sampled_from([MINUTE, HOUR]))
    def sleep(self, which: int, delay: int) -> None:
        """Park a task that sleeps, which no message wakes: neither one before the call nor one after it."""
        self.park(which, MINE, delay, (1, 0, 0), ["time"], came=True)

    @rule(task=tasks, which=which)
    def send(self, task: str, which: int) -> None:
        """Send a message for any number, for one after the last or before it, or ask for a number."""
        digest, message, limit = f"d{which % 7}", b"%d" % which, 1000 if which % 3 else 30
        at, run = self.partition, self.ground.gateway.run
        keys = [at.record(task), at.inbox(task), at.due, at.nudge, at.ready]
        last = int(self.ledger.held.get(at.inbox(task), "last") or 0)
        message, number = [(message, None), (message, last + 1), (message, last), (b"", None)][which % 4]
        given: list[Argument] = [task, digest, message, "" if number is None else number, 3, limit]
        for _ in range(2):
            answer = self.ground.run(run(queue_script("send_message"), keys, given))
            expected = self.ledger.send(task, digest, message, number, (3, limit), answer)
            self.same(answer, expected)
        self.answer(task, which)
        found = self.ground.run(run(queue_script("read_inbox"), [at.inbox(task)], ["", 3, 9, 1000, 1000]))
        self.same(found, self.ledger.read_inbox(task, 3))

    @rule(task=tasks, which=which)
    def answer(self, task: str, which: int) -> None:
        """Answer an open wait, one that is not open, or the first of a name; by a head that is current or not."""
        at, held = self.partition, self.ledger.held
        wait = ("", *WAITS)[which % 5]
        stored = held.get(at.inbox(task), f"w:{wait}") or b"1 0 1"
        head = b"1 0 1" if which % 7 == 0 else b" ".join(stored.split(b" ")[:3])
        digest, value, limits = b"%x" % (160 + which % 6), b"%d" % which, (2, 1000 if which % 3 else 60)
        keys = [at.record(task), at.inbox(task), at.due, at.nudge]
        given: list[Argument] = [task, "approval", wait, head, f"answer:{wait}", digest, value, *limits]
        for _ in range(2):
            answer = self.ground.run(self.ground.gateway.run(queue_script("answer"), keys, given))
            self.same(answer, self.ledger.answer(task, "approval", wait, head, digest, value, limits))

    @rule(task=tasks, which=which, number=st.sampled_from([None, None, 7, 99_999_999_999_990]))
    def update(self, task: str, which: int, number: int | None) -> None:
        """Set a value from outside, or one of the task that this one continues."""
        at, name = self.partition, NAMES[which % 3]
        digest, value, most = b"%024x" % (which % 9), b"%d" % which, 2 if which % 4 else 64
        keys, run = [at.record(task), at.inbox(task)], self.ground.gateway.run
        given: list[Argument] = [name, value, digest, most, "" if number is None else number]
        for _ in range(2):
            answer = self.ground.run(run(queue_script("update_value"), keys, given))
            self.same(answer, self.ledger.update(task, name, value, digest, most, number, answer))
        for after, only in ((0, ""), (7, ""), (0, name)):
            found = self.ground.run(run(queue_script("read_values"), [at.inbox(task)], [after, only, 1000]))
            self.same(found, self.ledger.read_values(task, after, only))

    @rule(task=tasks)
    def forget_waits(self, task: str) -> None:
        keys = [self.partition.waiting, self.partition.record(task), self.partition.inbox(task)]
        for _ in range(2):
            expected = self.ledger.forget_waits(task)
            self.same(self.ground.run(self.ground.gateway.run(queue_script("forget_waits"), keys, [task])), expected)

    def put_off(
        self,
        delivery: Delivery,
        task: str,
        delay: int,
        counters: tuple[int, int, int],
        ahead: int = 0,
        changed: Mapping[str, bytes] = NO_CHANGES,
    ) -> None:
        data: dict[str, object] = {"error": "ValueError"}
        last = self.last_entry(task) + ahead
        event = "returned" if counters[2] else "attempt_failed"
        for _ in range(2):
            encoded = orjson.dumps(data)
            expected = self.ledger.retry(delivery, task, delay, counters, event, encoded, last, changed)
            act = reschedule(
                self.ground.gateway,
                delivery,
                task,
                Counters(*counters),
                delay=delay / 1000,
                event=event,
                data=data,
                entries=last,
                changes=list(chain.from_iterable(changed.items())),
            )
            self.same(self.ground.accepted(act), expected)
        self.end(delivery)

    @rule(which=which, standing=standings, began=st.booleans(), ahead=aheads)
    def release(self, which: int, standing: str, began: bool, ahead: int) -> None:
        delivery, task = self.pick(which, standing)
        self.give_back(delivery, task if began and task in TASKS else None, ahead)

    def give_back(self, delivery: Delivery, known: str | None, ahead: int = 0) -> None:
        data: dict[str, object] | None = {"why": "shutdown"} if known else None
        last = self.last_entry(known) + ahead if known else 0
        for _ in range(2):
            expected = self.ledger.release(delivery, known, None if data is None else orjson.dumps(data), last)
            act = release(self.ground.gateway, delivery, known, data=data, entries=last)
            self.same(self.ground.accepted(act), expected)
        self.end(delivery)

    @rule(
        which=which,
        standing=standings,
        raw=st.booleans(),
        counters=st.tuples(numbers, numbers),
        kept=lifetimes,
        ahead=aheads,
        changed=changes,
        following=followings,
    )
    def bury(
        self,
        which: int,
        standing: str,
        raw: bool,
        counters: tuple[int, int],
        kept: int,
        ahead: int = 0,
        changed: Mapping[str, bytes] = NO_CHANGES,
        following: int = 0,
    ) -> None:
        delivery, task = self.pick(which, standing)
        raw = raw or task not in TASKS
        cleanup = None if raw else self.cleanup(task, following)
        reason = Reason.UNREADABLE if raw else Reason.TIMEOUT
        last = 0 if raw else self.last_entry(task) + ahead
        for _ in range(2):
            expected = self.ledger.bury(
                delivery,
                task,
                "t",
                reason,
                orjson.dumps(EVIDENCE.fields()),
                counters,
                kept,
                raw,
                last,
                changed,
                cleanup,
            )
            act = bury(
                self.ground.gateway,
                delivery,
                task,
                task="t",
                reason=reason,
                evidence=EVIDENCE,
                counters=Counters(*counters),
                retention=kept / 1000,
                entries=last,
                changes=list(chain.from_iterable(changed.items())),
                cleanup=cleanup,
            )
            self.same(self.ground.accepted(act), expected)
        if not self.ledger.owned(delivery):  # else its cancellation was requested
            self.end(delivery)
        self.look_for_letters()

    # -- suspects

    @rule(name=workers, stepping=st.sets(tasks))
    def crash(self, name: str, stepping: set[str]) -> None:
        """End a worker's process, which its supervisor reports. The name is never used again."""
        dead = self.names[name]
        doing = dict.fromkeys(stepping, "s")
        expected = self.ledger.crash(dead, "SIGKILL", doing)
        act = report_crash(self.ground.gateway, self.namespace, ["default"], dead, exit_status="SIGKILL", steps=doing)
        agree(self.ground.run(act).deliveries, expected)
        left = self.namespace.worker(dead)
        self.ledger.held.hashes[left] = {"left": b"1"}
        self.ledger.held.expire(HOUR, left)
        self.names[name] = f"{name}{len(self.crew)}"

    @rule(which=which, standing=standings)
    def set_aside(self, which: int, standing: str) -> None:
        delivery, task = self.pick(which, standing)
        if task in TASKS:
            self.put_aside(delivery, task)

    def put_aside(self, delivery: Delivery, task: str) -> None:
        for _ in range(2):
            expected = self.ledger.set_aside(delivery, task)
            self.same(self.ground.accepted(quarantine(self.ground.gateway, delivery, task)), expected)
        self.end(delivery)

    @rule(name=workers, heard=st.booleans(), which=which)
    def take_suspect(self, name: str, heard: bool, which: int) -> None:
        self.join(name)
        if not any(held.owner == SUSPECTS for held in self.ledger.pending.values()):
            delivery, task = self.pick(which, MINE)
            if task in TASKS:
                self.put_aside(delivery, task)
        taken = self.ground.run(take_quarantined(self.ground.gateway, self.partition, self.names[name]))
        expected, more = self.ledger.take_suspect(self.names[name])
        self.begin(name, [taken.delivery] if taken.delivery else [], expected, heard=heard)
        agree(taken.more, more)

    @rule(which=which, standing=standings)
    def acquit(self, which: int, standing: str) -> None:
        delivery, task = self.pick(which, standing)
        if task in TASKS:
            for _ in range(2):
                expected = self.ledger.acquit(delivery, task)
                self.same(self.ground.accepted(clear_quarantined(self.ground.gateway, delivery, task)), expected)

    # -- calls of clients

    @rule(which=which, put_off=st.booleans(), kept=lifetimes)
    def cancel_what_began(self, which: int, put_off: bool, kept: int) -> None:
        delivery, task = self.pick(which, MINE)
        if task in TASKS and put_off:
            self.put_off(delivery, task, MINUTE, (1, 0, 0))
        elif task in TASKS:
            self.give_back(delivery, task)
        self.cancel(task, kept)

    @rule(task=tasks, kept=lifetimes)
    def cancel(self, task: str, kept: int) -> None:
        for _ in range(2):
            expected = self.ledger.cancel(task, kept)
            gateway: Any = self.ground.gateway
            handle: TaskHandle[Any] = TaskHandle(task, self.partition, gateway, None, retention=kept / 1000)  # type: ignore[arg-type]
            try:
                answer = str(self.ground.run(handle.cancel()))
            except TaskNotFound:
                answer = "missing"
            self.same(answer, expected)

    @rule(task=tasks, by=tasks, kept=lifetimes, unstarted=st.booleans())
    def replace_task(self, task: str, by: str, kept: int, unstarted: bool) -> None:
        """Cancel a task that another one of its unique key replaces."""
        for _ in range(2):
            expected = self.ledger.cancel(task, kept, by, unstarted=unstarted)
            how: dict[str, Any] = {"retention": kept / 1000, "replacement": Replacement(by, unstarted=unstarted)}
            try:
                answer = str(self.ground.run(cancel_task(self.ground.gateway, self.partition, task, **how)))
            except TaskNotFound:
                answer = "missing"
            self.same(answer, expected)

    @rule(which=which, fresh=st.booleans(), edited=st.booleans(), late=st.booleans())
    def replay(self, which: int, fresh: bool, edited: bool, late: bool) -> None:
        letter = self.pick_letter(which, late)
        if letter is None:
            return
        args = b'{"edited":1}' if edited else None
        for _ in range(2):
            expected = self.ledger.replay(letter.entry.encode(), letter.id, fresh, args)
            done = self.ground.run(replay(self.ground.gateway, letter, Replay(fresh=fresh, args=args)))
            self.same(done, expected)

    @rule(which=which, late=st.booleans())
    def purge(self, which: int, late: bool) -> None:
        letter = self.pick_letter(which, late)
        if letter is None:
            return
        for _ in range(2):
            expected = self.ledger.discard(letter.entry.encode(), letter.id)
            self.same(self.ground.run(purge(self.ground.gateway, letter)), expected)

    def pick_letter(self, which: int, late: bool) -> DeadLetter | None:
        """Pick a present letter, or any former one; None if there was never a letter and there is no message to
        bury, in a closed and empty partition. late: its record has expired meanwhile.
        """
        if not self.held_letters():
            self.bury(which, MINE, raw=False, counters=(1, 1), kept=HOUR)
        there = self.held_letters()
        pool = [one for one in self.letters if one.entry in there and which % 4] or self.letters
        if not pool:
            return None
        letter = pool[-1 - which % len(pool)]
        if late:
            self.expire(letter.id)
            self.is_as_expected()
        return letter

    def held_letters(self) -> set[str]:
        return {text_of(entry).decode() for entry, _ in self.ledger.held.stream(self.partition.dead).entries}

    def look_for_letters(self) -> None:
        found = self.ground.run(self._letters())
        kept = [text_of(entry).decode() for entry, _ in self.ledger.held.stream(self.partition.dead).entries]
        agree([one.entry for one in found], kept)
        known = {one.entry for one in self.letters}
        self.letters += [one for one in found if one.entry not in known]

    async def _letters(self) -> list[DeadLetter]:
        found = list_letters(self.ground.gateway, [self.partition], Filter(), oldest_first=True)
        return [one async for one in found]

    # -- time

    @precondition(lambda self: self.ledger.pending)
    @rule(which=which, passed=st.sampled_from([LEASE // 2, LEASE, 10 * LEASE]))
    def age(self, which: int, passed: int) -> None:
        """Age a delivery, as if its last heartbeat was long ago."""
        if held := sorted(self.held_by_workers()):
            entry = held[which % len(held)]
            pending = self.ledger.pending[entry]
            idle = ("IDLE", passed, "RETRYCOUNT", pending.count, "JUSTID")
            self.ground.command("XCLAIM", self.partition.ready, GROUP, pending.owner, 0, entry, *idle)
            pending.since = Moment(plus=-passed, loose=True)

    @precondition(lambda self: self.ledger.held.exists(self.partition.seen))
    @rule(passed=st.sampled_from([LEASE // 5, LEASE, -LEASE]))
    def pass_unattended(self, passed: int) -> None:
        """Let time pass in which no worker reaches Redis; a negative one is a clock that is set back.

        No sum of the times is within a minute of half a lease, from which on leases are restarted: else the time of the
        acts would decide.
        """
        seen = int(self.ground.command("GET", self.partition.seen))
        self.ground.command("SET", self.partition.seen, seen - passed, "KEEPTTL")
        self.ledger.held.strings[self.partition.seen] = b"%d" % (seen - passed)
        self.ledger.unattended += passed

    @rule(name=workers)
    def touch(self, name: str) -> None:
        consumer = self.join(name)
        self.ground.run(consumer.touch(self.partition))
        self.ledger.touch(LEASE)

    @rule(task=tasks)
    def come_due(self, task: str) -> None:
        self.ground.command("ZADD", self.partition.due, "XX", 1, task)
        if task in self.ledger.held.sets.get(self.partition.due, {}):
            self.ledger.held.set_score(self.partition.due, task, b"1")

    @rule(task=tasks)
    def expire(self, task: str) -> None:
        """Let the retention of an ended task pass."""
        parts = (*self.ledger.parts(task), *self.ledger.streams(task))
        if parts[0] in self.ledger.held.deadlines:
            self.ground.command("DEL", *parts)
            self.ledger.held.delete(*parts)

    @rule()
    def trim_timeline(self) -> None:
        expected = self.ledger.trim_timeline()
        agree(self.ground.run(trim_timeline(self.ground.gateway, self.partition)), expected)

    @rule(
        kind=st.sampled_from(["due", "timeline", "control", "dead"]),
        items=st.lists(st.sampled_from(FOREIGN), min_size=1, max_size=3, unique=True),
        task=tasks,
    )
    def move_to_junk(self, kind: str, items: list[bytes], task: str) -> None:
        """Another program writes items into a key; a worker moves them away, and does so again after a lost reply."""
        command, key = self.ground.gateway.command, self.partition.control(task)
        moved: dict[bytes, bytes] = {}
        if kind == "control":
            moved = dict.fromkeys(items, b"content")
            self.ground.run(command("HSET", key, *[part for pair in moved.items() for part in pair]))
        elif kind == "dead":
            key = self.partition.dead
            for item in items:
                moved[self.ground.run(command("XADD", key, "*", "id", item))] = b"id " + item
            self.ledger.held.streams.setdefault(key, Stream()).last = Id()
        else:
            key = getattr(self.partition, kind)
            moved = dict.fromkeys(items, b"")
            self.ground.run(command("ZADD", key, *[part for item in items for part in (1, item)]))
        shapes: dict[str, Literal["hash", "stream", "zset"]] = {"control": "hash", "dead": "stream"}
        shape = shapes.get(kind, "zset")
        expected = self.ledger.move_to_junk(key, moved)
        for answer in (expected, 0):
            junk = [*moved, b"never there"] if shape != "stream" else [*moved]
            agree(self.ground.run(set_aside(self.ground.gateway, self.partition, key, shape, junk)), answer)

    @rule()
    def promote(self) -> None:
        expected = self.ledger.promote(self.ledger.due())
        moved, wait = self.ground.run(promote_due(self.ground.gateway, self.partition))
        agree(moved, expected)
        agree((wait is None), (not self.ledger.held.sets.get(self.partition.due)))

    @rule(some=st.lists(tasks, min_size=1, max_size=3))
    def promote_late(self, some: list[str]) -> None:
        """Promote ids that another worker read as well, after some other act."""
        keys = [self.partition.due, self.partition.ready, *(self.partition.record(task) for task in some)]
        for _ in range(2):
            answer = self.ground.run(self.ground.gateway.run(queue_script("promote"), keys, some))
            self.same(answer, self.ledger.promote(some))

    def trim(self, age: int) -> None:
        expected = self.ledger.trim(self.ledger.held.now - age)
        agree(self.ground.run(trim_letters(self.ground.gateway, self.partition, age / 1000)), expected)

    # -- loss of data

    @precondition(lambda self: self.crew)
    @rule()
    def take_copy(self) -> None:
        """Remember what is stored: it is what a power cut or a failover will leave."""
        copy = self.ground.run(take_copy(self.ground.gateway, self.namespace))
        self.copy = copy, self.ledger.take_copy()

    @precondition(lambda self: self.copy)
    @rule(kept=st.booleans())
    def lose_tail(self, kept: bool) -> None:
        """Lose all that was stored since the copy. Workers and clients know of it all the same.

        kept: the runs still have the entries that they have written.
        """
        if self.copy is not None:
            copy, held = self.copy
            self.ground.run(put_back(self.ground.gateway, self.namespace, copy))
            self.ledger.put_back(held)
            self.copy = None
        for sent in [] if kept else self.runs.values():
            sent.before, sent.entries = sent.last, []

    # -- mistakes of other programs

    @rule(what=st.sampled_from(MISTAKES), which=which, name=workers)
    def mistake(self, what: str, which: int, name: str) -> None:
        """Let another program take tasks out of the queue, and put them back; twice: a reply may be lost."""
        at, ready = self.partition, self.ledger.ready
        if what == "due":
            for task in [task for task in TASKS if which % 3 == 0 or task == TASKS[which % 4]]:
                self.ground.command("ZREM", at.due, task)
                self.ledger.held.drop_score(at.due, task)
        elif what == "message" and (new := [one for one, _ in ready.entries if one.known not in ready.pending]):
            for one in new if which % 3 == 0 else [new[which % len(new)]]:
                self.ground.command("XDEL", at.ready, text_of(one))
                self.ledger.delete_message(text_of(one))
        elif what in ("acknowledge", "both") and ready.pending:
            entry = sorted(ready.pending)[which % len(ready.pending)]
            self.ground.command("XACK", at.ready, GROUP, entry)
            self.ledger.acknowledge(entry)
            if what == "both":
                self.ground.command("XDEL", at.ready, entry)
                self.ledger.delete_message(entry)
        elif what == "consumer" and ready.grouped:
            worker = (self.names[name], RELEASED, SUSPECTS)[which % 3]
            self.ground.command("XGROUP", "DELCONSUMER", at.ready, GROUP, worker)
            self.ledger.delete_consumer(worker)
        elif what == "skip" and ready.grouped and ready.entries:
            self.ground.command("XGROUP", "SETID", at.ready, GROUP, "$")
            self.ledger.skip_messages(self.last_id())
        elif what == "ids" and ready.grouped:
            self.ground.command("XADD", at.ready, f"{2**64 - 1}-{2**64 - 1 - which % 2}", "a", "b")
        for _ in range(2):
            found = self.ground.run(put_back_lost(self.ground.gateway, at, 0.0))
            if what == "ids" and ready.grouped:
                self.ledger.replace_stream(self.last_id())
            self.same(found, self.ledger.put_lost_back())

    def last_id(self) -> bytes:
        """Return the last id that the ready stream has given."""
        found: bytes = pairs(self.ground.command("XINFO", "STREAM", self.partition.ready))[b"last-generated-id"]
        return found

    # -- occasional chores

    @rule(what=st.sampled_from(CHORES), name=workers, other=workers, number=numbers)
    def chore(self, what: str, name: str, other: str, number: int) -> None:
        match what:
            case "trim":
                self.trim((MINUTE, 2 * HOUR, 100 * HOUR)[number % 3])
            case "watch":
                self.watch(name)
            case "leave":
                self.leave(name)
            case "forget":
                self.forget(name, {other} if number % 2 else set())
            case "close" if self.number > 3 and self.deliveries:
                self.close(2 + number % 2)
            case "retire":
                self.retire(long_ago=number > 1)
            case "config":
                self.set_config((None, 60, 60.5, 3600)[number])
            case "reroute":
                self.reroute((b"", b"1", b"2")[number % 3], b"%d" % (1 + number % 2))
            case "share":
                self.share(name, other if number % 2 else None)

    # -- workers that leave

    def watch(self, name: str) -> None:
        """Let a worker watch the due set."""
        self.ground.command("SET", self.partition.promote_lock, self.names[name])
        self.ledger.held.strings[self.partition.promote_lock] = self.names[name].encode()

    def leave(self, name: str) -> None:
        if self.names[name] in self.crew:
            for _ in range(2):
                self.ledger.leave(self.names[name])
                self.ground.run(self.crew[self.names[name]].leave())
                self.is_as_expected()

    def forget(self, name: str, present: set[str]) -> None:
        there = {self.names[one] for one in present}
        self.ground.run(self.join(name).remove_idle_consumers(self.partition, -1.0, there))
        self.ledger.forget(there)

    # -- closing partitions

    def close(self, count: int) -> None:
        route = SINGLE.changed(count)
        for _ in range(2):
            self.ledger.close(route.encode())
            self.ground.run(close_partition(self.ground.gateway, self.partition, route))
            self.is_as_expected()

    def retire(self, long_ago: bool) -> None:
        if long_ago and self.ledger.held.get(self.partition.closed, "empty") is not None:
            self.ground.command("HSET", self.partition.closed, "empty", 1)
            self.ledger.held.put(self.partition.closed, {"empty": 1})
        at = self.partition
        for _ in range(2):
            keys = [at.ready, at.nudge, at.dead, at.due, at.closed, at.retentions, at.timeline, at.outbox]
            keys += [at.joins, at.rings]
            given = [7 * 24 * HOUR]
            answer = self.ground.run(self.ground.gateway.run(queue_script("retire_partition"), keys, given))
            self.same(bool(answer), self.ledger.retire())

    def set_config(self, seconds: float | None) -> None:
        key, name = self.namespace.config, "dead_letter_ttl"
        text = None if seconds is None else f"{seconds:g}".encode()
        for _ in range(2):
            changed = self.ledger.held.get(key, name) != text
            if text is None:
                self.ledger.held.drop(key, name)
            else:
                self.ledger.held.put(key, {name: text})
            if changed:
                number = int(self.ledger.held.get(key, "change") or 0) + 1
                self.ledger.held.put(key, {"change": str(number).encode()})
            self.same(
                self.ground.run(set_config(self.ground.gateway, self.namespace, "dead_letter_ttl", seconds)), changed
            )

    def reroute(self, was: bytes, new: bytes) -> None:
        known = self.ledger.held.get(self.namespace.queues, "other") or b""
        done = known in (was, new)
        for _ in range(2):
            keys = [self.namespace.queues, self.namespace.deployment]
            answer = self.ground.run(
                self.ground.gateway.run(queue_script("set_route"), keys, ["other", was, new, KEY_FORMAT])
            )
            if done:
                if known != new:
                    self.ledger.held.put_new(self.namespace.deployment, "format", str(KEY_FORMAT).encode())
                known = new
                self.ledger.held.put(self.namespace.queues, {"other": new})
            self.same(bool(answer), done)

    def share(self, name: str, silent: str | None) -> None:
        """Let a worker share the queue; another one may have been silent for long."""
        key = self.namespace.sharing("default")
        sharers = self.ledger.held.sets.get(key, {})
        if silent in sharers:
            self.ground.command("ZADD", key, "XX", 1, silent)
            del sharers[silent]
        self.ledger.held.set_score(key, name, Moment())
        self.ledger.held.expire(HOUR, key)
        found = self.ground.run(join_group(self.ground.gateway, self.namespace, "default", name, 600.0))
        agree(found, set(self.ledger.held.sets[key]))

    # -- inspection, which changes nothing

    @rule(task=tasks)
    def look(self, task: str) -> None:
        gateway, held = self.ground.gateway, self.ledger.held
        record = self.ground.run(read_record(gateway, self.partition, task))
        state = self.ledger.state(task)
        agree((record is None), (state is None))
        if record is not None and state is not None:
            entry = held.get(self.partition.record(task), "entry")
            pending = self.ledger.pending.get(entry or b"")
            running = state == b"queued" and pending is not None and not is_reserved(pending.owner)
            parked = state == b"scheduled" and held.get(self.partition.record(task), "waits") is not None
            stored = State.WAITING if parked else State(state.decode())
            agree(record.state, (State.RUNNING if running else stored))
        for delivery, known in self.deliveries:
            if known == task and self.ledger.owned(delivery):
                history = self.ground.run(load_history(gateway, delivery, task))
                crashes = int(held.get(self.partition.record(task), "crashes") or 0)
                lost = delivery.count - 1 - int(held.get(self.partition.record(task), "returned") or 0)
                agree(history.entries, self.last_entry(task))
                agree((history.lost, history.counters.crashes), (lost, crashes + lost))
                excused = int(held.get(self.partition.record(task), "excused") or 0)
                marked = held.get(self.partition.record(task), "suspect") is not None
                agree(
                    (history.crashes_in_a_row, history.quarantined),
                    (history.counters.crashes - excused, marked),
                )
                steps = {
                    name: text_of(value)
                    for name, value in held.hashes.get(self.partition.steps(task), {}).items()
                    if not name.startswith("c:")  # read when they are asked for
                }
                shelves = (("d", history.done), ("i", history.intents), ("s", history.saved))
                agree({f"{kind}:{step}": value for kind, some in shelves for step, value in some.items()}, steps)

    @rule()
    def see_letters(self) -> None:
        self.look_for_letters()


def agree(found: object, expected: object) -> None:
    """Fail with both values where they differ."""
    assert found == expected, f"\nfound:    {found}\nexpected: {expected}"


def _place(kind: str, step: str, number: int) -> str:
    """Return what an entry of a kind has in place of the step key."""
    if kind in OF_WAITS:
        return WAITS[number % 4]
    return {"emitted": ITEMS[number % 4], "cut": MARKS[number % 2]}.get(kind, step)


def _log_data(kind: str, task: str, n: int) -> bytes:
    """Return the log data of an entry; a wait has its time, flags for early answers and for its loss, and the task."""
    match kind:
        case "wait":
            return b"%d %d %d %b" % ((0, 1, 99_999_999_999_999)[n % 3], n % 2, n % 5 == 0, task.encode())
        case "answered":
            return task.encode()
    return b'{"ms":%d}' % n


async def _raised(gateway: Gateway, delivery: Delivery) -> int:
    """Return 0 if the count of a delivery may not be raised, 1 if it was, 2 if it had been."""
    try:
        return 1 + (await raise_count(gateway, delivery)).before
    except LeaseLost:
        return 0


def flat_of(fields: Mapping[str, bytes]) -> list[Argument]:
    return [part for pair in fields.items() for part in pair]


def _task_of(delivery: Delivery) -> str:
    """Return the task of a delivery; for an unreadable message, the id under which it would be buried."""
    try:
        return str(orjson.loads(delivery.fields[b"env"])["id"])
    except (LookupError, TypeError, orjson.JSONDecodeError):
        return unreadable_id(delivery)
