"""The model: the effect of each act on the content of Redis, and its answer.

It follows docs/reference/task-states.md and the headers of the scripts. Each method is one act; `held` is the content
of Redis afterwards, `news` the published messages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import NamedTuple

import orjson
from perdure.queues import Namespace, Partition
from perdure.queues.delivery.leases import RELEASED_IDLE_MS, Delivery, RunStatus
from perdure.queues.envelope import TaskMessage
from perdure.queues.junk import JUNK_TTL
from perdure.queues.keys import JUNK_ENTRIES, RELEASED, SUSPECTS, is_reserved
from perdure.queues.partitions.route import registered_retention

from tests.model.later import Id, Later, Moment, Stamped, Value, text_of
from tests.model.shelf import Fields, Pending, Shelf, Stream

_RUN = ("run", "began", "alive", "step", "step_at")
"""Fields of a record that a heartbeat stores."""

__all__ = ["Ledger", "LedgerCopy", "Past"]

Handed = tuple[bytes, int, dict[bytes, bytes]]
"""A delivery as a worker receives it: entry, count, fields."""

Hash = dict[str, Value | int | str]
"""Fields of a hash, as passed to an act."""

HOUR = 3_600_000

NO_CHANGES: Mapping[str, bytes] = {}

LEASE = 600_000
"""Milliseconds. However slowly a run goes, a lease passes only by `age`, and is restarted only by `pass_unattended`."""

_STAMP = len(b"1795713500295 ")
_USED_LENGTH = 499  # of 20 digests of 24 characters, with commas
"""Bytes of the time before a message."""

_UPLOAD = 600_000
"""Milliseconds for which an upload is kept after its last chunk."""

_COMPARED = ("state", "events", "entries", "settled", "replays", "dead", "waits", "at", "entry", "token")

KEPT = 4096
"""Most bytes that the junk keeps of an item, and of its content."""

VALID = 60_000
"""Milliseconds for which a registered retention may be used."""

LedgerCopy = tuple[Shelf, int]


class Past(NamedTuple):
    """Data of a copied task; see `TaskPast`."""

    events: int
    entries: int
    format: int | None
    fields: Mapping[str, bytes]
    inbox: Mapping[str, bytes]
    log: Sequence[tuple[str, Mapping[str, bytes]]]


CRASHES = ("excused", "recent", "recent_at", "crash", "newer_since")
"""Fields of a record that describe crashes."""


class Ledger:
    """A model of one partition of one queue, and its workers."""

    def __init__(self, namespace: Namespace, partition: Partition) -> None:
        self.namespace = namespace
        self.at = partition
        self.held = Shelf()
        self.news: list[tuple[str, str]] = []
        self._items: dict[str, int] = {}
        """Numbers of the last items of a write, by stream."""
        self.unattended = 0
        """Milliseconds that passed since the last touch; time itself does not pass here."""

    def take_copy(self) -> LedgerCopy:
        return deepcopy(self.held), self.unattended

    def put_back(self, copy: LedgerCopy) -> None:
        """Lose all that was stored since the copy was taken."""
        now = self.held.now
        self.held, self.unattended = copy
        self.held.now = now

    # -- parts of the acts

    @property
    def ready(self) -> Stream:
        return self.held.stream(self.at.ready)

    @property
    def pending(self) -> dict[bytes, Pending]:
        return self.ready.pending

    def parts(self, task: str) -> tuple[str, str, str, str, str]:
        """Return the keys of the task's record, steps, log, inbox and control."""
        at = self.at
        return at.record(task), at.steps(task), at.log(task), at.inbox(task), at.control(task)

    def streams(self, task: str) -> list[str]:
        """Return the keys of the task's streams, and of the digests of keyed items if there are any."""
        record = self.at.record(task)
        names = (self.held.get(record, "streams") or b"").decode().split()
        keyed = self.held.get(record, "keyed") is not None
        return [
            key for name in names for key in (self.at.stream(task, name), self.at.stream_keys(task, name))[: 1 + keyed]
        ]

    def state(self, task: str) -> bytes | None:
        return self.held.get(self.at.record(task), "state")

    def owned(self, delivery: Delivery) -> bool:
        pending = self.pending.get(delivery.entry)
        return pending is not None and (pending.owner, pending.count) == (delivery.worker, delivery.count)

    def settled(self, delivery: Delivery, task: str) -> bool:
        record = self.at.record(task)
        reported = (self.held.get(record, "settled"), self.held.get(record, "worker"))
        return reported == (_fence(delivery), delivery.worker.encode())

    def tell(self, task: str, what: str) -> None:
        self.news.append((self.at.record(task), what))

    def nudge(self, why: str) -> None:
        self.held.add(self.at.nudge, ((b"why", why.encode()),), most=16)

    def note_event(
        self,
        task: str,
        kind: str,
        data: bytes,
        step: str | None = None,
        number: bytes | None = None,
        entry: int | None = None,
    ) -> Id:
        middle: tuple[tuple[bytes, bytes], ...] = () if step is None else ((b"step", step.encode()),)
        middle = middle if number is None else ((b"n", number),)
        last: tuple[tuple[bytes, bytes], ...] = () if entry is None else ((b"e", b"%d" % entry),)
        return self.held.add(self.at.log(task), ((b"type", kind.encode()), *middle, (b"data", data), *last))

    def _earliest(self) -> float | None:
        scores = [float(text_of(score)) for score in self.held.sets.get(self.at.due, {}).values()]
        return min(scores, default=None)

    def _schedule(self, task: str, delay: int) -> Moment:
        due = Moment(plus=delay)
        self.held.set_score(self.at.due, task, due)
        return due

    def _close_message(self, delivery: Delivery) -> None:
        self.pending.pop(delivery.entry, None)
        self.ready.remove(delivery.entry)

    def _begin_outcome(self, delivery: Delivery, task: str) -> None:
        """Remove what belongs to the message; a record that was not stored with it gets the payload."""
        record = self.at.record(task)
        self.held.drop(record, "entry", *_RUN, "suspect", "returned")
        if self.held.get(record, "args") is None:
            self.held.put(record, _payload(self.ready.find(delivery.entry)))

    def payload(self, task: str) -> dict[bytes, bytes]:
        """Return envelope and arguments of a task as a message has them, from its record; nothing if it lacks them."""
        record = self.at.record(task)
        envelope, name = self.held.get(record, "env"), self.held.get(record, "task")
        if envelope is None and name is not None:
            envelope = orjson.dumps({"v": 1, "id": task, "task": name.decode()})
        if envelope is None:
            return {}
        return {b"env": envelope, b"args": self.held.get(record, "args") or b"{}"}

    # -- enqueuing

    def depth(self, *, delayed: bool) -> int:
        """Return how many tasks wait for a worker; delayed: with those in the due set."""
        held = sum(not is_reserved(pending.owner) for pending in self.pending.values())
        due = len(self.held.sets.get(self.at.due, {})) if delayed else 0
        return max(0, len(self.ready.entries) - held) + due

    def _answers(
        self, tasks: Sequence[tuple[str, bytes, bytes]], limit: int | None, *, delayed: bool = False
    ) -> list[int]:
        """Return the answer for each task. limit: number of waiting tasks from which on none is stored."""
        room = None if limit is None else limit - self.depth(delayed=delayed)
        answers = []
        for task, _, _ in tasks:
            answer = self._stored(task)
            if answer == 1 and room is not None:
                answer = 1 if room > 0 else -3
                room -= 1
            answers.append(answer)
        return answers

    def enqueue(self, tasks: Sequence[tuple[str, bytes, bytes]], limit: int | None = None) -> list[int]:
        answers = self._answers(tasks, limit)
        for (task, envelope, args), answer in zip(tasks, answers, strict=True):
            if answer == 1:
                entry = self.held.add(self.at.ready, ((b"env", envelope), (b"args", args)))
                named = orjson.loads(envelope).keys() == {"v", "id", "task"}
                kept: Hash = {"task": "t"} if named else {"env": envelope}
                self.held.put(self.at.record(task), {"state": "queued", "entry": entry, "args": args, **kept})
                self._list(task, by_producer=True)
        return answers

    def schedule(self, delay: int, tasks: Sequence[tuple[str, bytes, bytes]], limit: int | None = None) -> list[int]:
        first = self._earliest()
        answers = self._answers(tasks, limit, delayed=True)
        for (task, envelope, args), answer in zip(tasks, answers, strict=True):
            if answer == 1:
                due = self._schedule(task, delay)
                kept: Hash = {"state": "scheduled", "at": Moment(), "due": due, "env": envelope, "args": args}
                self.held.put(self.at.record(task), kept)
                self._list(task, by_producer=True)
        if 1 in answers and (first is None or self.held.now + delay < first):
            self.nudge("due")
        return answers

    def upload_chunk(self, upload: str, field: str, chunk: bytes) -> None:
        """Store a chunk of large arguments before their task."""
        self.held.put(upload, {field: chunk})
        self.held.expire(_UPLOAD, upload)

    def _take_upload(self, upload: str | None, record: str, args: bytes) -> bool:
        """Make an upload, if there is one, the record of its task. Return False if chunks are missing."""
        if upload is None:
            return True
        chunks = self.held.hashes.get(upload, {})
        if len(chunks) != orjson.loads(args[1:])["chunks"]:
            return False
        self.held.delete(record, upload)
        self.held.put(record, chunks)
        return True

    def enqueue_one(
        self,
        delay: int,
        task: str,
        envelope: bytes,
        args: bytes,
        upload: str | None,
        *,
        ended: bool,
        limit: int | None = None,
    ) -> int | None:
        """Store a task whose arguments were uploaded, or under a claim. ended: whether the claim has ended."""
        if (answer := self._stored(task)) != 1:
            return answer
        if ended:
            return -2
        if limit is not None and self.depth(delayed=delay > 0) >= limit:
            return -3
        if not self._take_upload(upload, self.at.record(task), args):
            return None
        return self._place(delay, task, envelope, args)

    def fire_schedule(
        self, task: str, envelope: bytes, args: bytes, *, planned: int, epoch: int, delay: int, ended: bool
    ) -> int:
        """Store the task of a planned time, unless this one or a later one was fired."""
        fired = self.at.fired("hourly")
        last = self.held.strings.get(fired, b"0 0")
        assert isinstance(last, bytes)
        if (epoch, planned) <= tuple(map(int, last.split())) or (answer := self._stored(task)) == 0:
            return 0
        if answer == -1 or ended:
            return answer if answer == -1 else -2
        first = self._earliest()
        due = self._schedule(task, delay)
        kept: Hash = {"state": "scheduled", "at": Moment(), "due": due, "env": envelope, "args": args}
        self.held.put(self.at.record(task), kept)
        self._list(task, by_producer=True)
        self.held.strings[fired] = b"%d %d" % (epoch, planned)
        self.held.expire(HOUR, fired)
        if first is None or self.held.now + delay < first:
            self.nudge("due")
        return 1

    def _place(self, delay: int, task: str, envelope: bytes, args: bytes) -> int:
        """Add the message or the due time of a task that has no state yet."""
        record, first = self.at.record(task), self._earliest()
        if delay:
            due = self._schedule(task, delay)
            self.held.put(record, {"state": "scheduled", "at": Moment(), "due": due, "env": envelope, "args": args})
        else:
            entry = self.held.add(self.at.ready, ((b"env", envelope), (b"args", args)))
            self.held.put(record, {"state": "queued", "entry": entry, "env": envelope, "args": args})
        self._list(task, by_producer=True)
        if delay and (first is None or self.held.now + delay < first):
            self.nudge("due")
        return 1

    def known(self, task: str) -> tuple[bytes, ...]:
        """Return what a caller reads of a record before it replaces the task."""
        return tuple(self.held.get(self.at.record(task), name) or b"" for name in ("finished", "token", "replays"))

    def reset(
        self, task: str, envelope: bytes, args: bytes, token: str, known: tuple[bytes, ...], upload: str | None
    ) -> bytes | None:
        """Store a task in the place of an ended one with the same id."""
        record, steps, log, inbox, _ = self.parts(task)
        state, letter = self.state(task), self.held.get(record, "dead")
        if self.held.get(record, "token") == token.encode():
            return b"stored"
        if state not in (None, b"succeeded", b"dead", b"cancelled"):
            return state
        if self.known(task) != known:
            return b"changed"
        if upload is not None and len(self.held.hashes.get(upload, {})) != orjson.loads(args[1:])["chunks"]:
            return None
        if letter is not None:
            self.held.stream(self.at.dead).remove(letter)
        self.held.delete(*self.streams(task), record, steps, log, inbox)
        if self.held.exists(self.at.closed):
            self.held.drop_score(self.at.timeline, task)
            return b"closed"
        self._take_upload(upload, record, args)
        self._place(0, task, envelope, args)
        self._keep_timeline()
        self.held.put(record, {"token": token})
        return b"stored"

    def _list(self, task: str, at: Value | None = None, *, by_producer: bool = False) -> None:
        """Add a task to the timeline, unless it is there with a time that is given. A producer gives it no TTL."""
        if at is None or task not in self.held.sets.get(self.at.timeline, {}):
            self.held.set_score(self.at.timeline, task, at or Moment())
        if not by_producer:
            self._keep_timeline()

    def _keep_timeline(self) -> None:
        self.held.expire(30 * 24 * HOUR, self.at.timeline)

    def _stored(self, task: str) -> int:
        if self.held.exists(self.at.record(task)):
            return 0
        return -1 if self.held.exists(self.at.closed) else 1

    def promote(self, tasks: Sequence[str]) -> int:
        moved = 0
        for task in tasks:
            score = self.held.sets.get(self.at.due, {}).get(task)
            if score is None or float(text_of(score)) > self.held.now:
                continue
            record = self.at.record(task)
            payload = self.payload(task)
            self.held.drop_score(self.at.due, task)
            if payload and self.state(task) == b"scheduled":
                keeps = self.held.get(record, "keeps")
                token = () if keeps is None else ((b"token", keeps.split()[0]),)
                entry = self.held.add(self.at.ready, (*payload.items(), (b"again", b"1"), *token))
                self.held.put(record, {"state": "queued", "entry": entry})
                self.held.drop(record, "due", "waits", "wakes", "returned", "keeps")
                if token:
                    self.held.drop_score(self.at.kept, task)
                moved += 1
        return moved

    def due(self) -> list[str]:
        """Return the tasks whose due time has passed, in order."""
        scores = {task: float(text_of(score)) for task, score in self.held.sets.get(self.at.due, {}).items()}
        return sorted((one for one in scores if scores[one] <= self.held.now), key=lambda one: (scores[one], one))

    # -- reading and claiming

    def join(self, worker: str) -> None:
        """Create the groups."""
        for key in (self.at.ready, self.at.nudge):
            self.held.streams.setdefault(key, Stream()).grouped = True
        self.touch(LEASE)
        del worker

    def touch(self, lease_ms: int) -> None:
        """Restart every lease after more than half a lease without a touch; released messages have none."""
        if not self.held.exists(self.at.seen) or abs(self.unattended) > lease_ms / 2:
            for pending in self.pending.values():
                if pending.owner != RELEASED:
                    pending.since = Moment(loose=True)
        self.unattended = 0
        self.held.strings[self.at.seen] = Moment()
        self.held.expire(HOUR, self.at.seen)

    def read(self, worker: str, most: int) -> tuple[list[Handed], set[bytes]]:
        """Return the new messages, and the subjects of the nudges."""
        handed: list[Handed] = []
        for entry, fields in self.ready.new()[:most]:
            self.pending[text_of(entry)] = Pending(worker, 1, Moment(loose=True))
            self.ready.delivered = entry
            handed.append((text_of(entry), 1, _plain(fields)))
        nudges = self.held.stream(self.at.nudge)
        heard = nudges.new()[:most]
        if heard:
            nudges.delivered = heard[-1][0]
        for stream, some in ((self.ready, handed), (nudges, heard)):
            stream.names[worker] = True if some else stream.names.get(worker) or None
        return handed, {text_of(fields[0][1]) for _, fields in heard}

    def claimable(self, lease_ms: int) -> list[bytes]:
        """Return the entries whose lease has passed, or that were released, in order."""
        old = {one: held.since for one, held in self.pending.items() if held.since.known is not None}
        passed = [one for one, since in old.items() if since.ms <= self.held.now - lease_ms]
        return sorted(passed, key=lambda one: Id(one).order)

    def claim(self, worker: str, lease_ms: int, most: int, holding: set[bytes]) -> list[Handed]:
        """Claim messages of others first, then own ones that the worker does not hold."""
        self.touch(lease_ms)
        passed = [one for one in self.claimable(lease_ms) if one not in holding or self.pending[one].owner != worker]
        taken = sorted(passed, key=lambda one: (self.pending[one].owner == worker, Id(one).order))[:most]
        for entry in taken:
            self.pending[entry] = Pending(worker, self.pending[entry].count + 1, Moment(loose=True))
        self.ready.names[worker] = True if taken else self.ready.names.get(worker) or None
        return [self._handed(entry) for entry in taken]

    def adopt(self, worker: str, holding: set[bytes]) -> list[Handed]:
        mine = [one for one, held in self.pending.items() if held.owner == worker and one not in holding]
        for entry in mine:
            self._raise_count(entry, worker)
        return [self._handed(entry) for entry in sorted(mine, key=lambda one: Id(one).order)]

    def raise_count(self, delivery: Delivery) -> int:
        """Give a delivery a new fence. Return 0 if it is refused, 1, or 2 if it has it already."""
        pending = self.pending.get(delivery.entry)
        if pending is None or pending.owner != delivery.worker or pending.count - delivery.count not in (0, 1):
            return 0
        if pending.count > delivery.count:
            return 2
        self._raise_count(delivery.entry, delivery.worker)
        return 1

    def _raise_count(self, entry: bytes, worker: str) -> None:
        self.pending[entry] = Pending(worker, self.pending[entry].count + 1, Moment(loose=True))
        self._count_returned(entry)

    def _count_returned(self, entry: bytes) -> bool:
        """Count a delivery of a message as ended without a crash, in the record of its task if there is one."""
        task = _task_of(self.ready.find(entry))
        if task is None or not self.held.exists(self.at.record(task)):
            return False
        record = self.at.record(task)
        self.held.put(record, {"returned": int(self.held.get(record, "returned") or 0) + 1})
        return True

    def _handed(self, entry: bytes) -> Handed:
        fields = self.ready.find(entry)
        assert fields is not None
        return entry, self.pending[entry].count, _plain(fields)

    def beat(self, worker: str, some: Sequence[tuple[Delivery, str]], status: RunStatus) -> tuple[list[int], list[int]]:
        """Renew leases, and store the status of the runs: of all the same."""
        self.touch(LEASE)
        lost, cancelled = [], []
        for position, (delivery, task) in enumerate(some):
            pending = self.pending.get(delivery.entry)
            if pending is None or (pending.owner, pending.count) != (worker, delivery.count):
                lost.append(position)
                continue
            pending.since = Moment(loose=True)
            record = self.at.record(task)
            if status.ran is not None and self.held.exists(record):
                began = Moment(plus=-round(status.ran * 1000))
                self.held.put(record, {"run": delivery.count, "began": began, "alive": Moment()})
                self.held.drop(record, "step", "step_at")
                if status.step:
                    since = Moment(plus=-round(status.stepped * 1000))
                    self.held.put(record, {"step": status.step, "step_at": since})
            if self.held.exists(self.at.control(task)):
                cancelled.append(position)
        return lost, cancelled

    # -- during the run

    def record(
        self,
        delivery: Delivery,
        task: str,
        first: int,
        entries: Sequence[tuple[str, str, bytes, bytes]],
        head: bytes = b"",
    ) -> int:
        """Write entries with numbers from `first` on; those that are stored are skipped, and a gap is refused."""
        if not self.owned(delivery):
            return 0
        record, steps, _, inbox, control = self.parts(task)
        last = int(self.held.get(record, "entries") or 0)
        if (refused := self._refused_entries(delivery, record, first, last)) is not None:
            return refused
        new = [(number, *entry) for number, entry in enumerate(entries, first) if number > last]
        self._items = {step.partition(" ")[0]: 0 for kind, step, *_ in entries if kind in ("emitted", "cut")}
        for number, kind, step, value, data in new:
            if kind == "done":
                self.held.put(steps, {f"d:{step}": value})
                self.held.drop(steps, f"i:{step}", f"s:{step}")
                self.note_event(task, "step_completed", data, step, entry=number)
                self.tell(task, "step_completed")
            elif kind in ("event", "base"):
                self._write_event(task, step, value, data, number, base=kind == "base")
            elif kind == "mark":
                self.held.put(steps, {f"d:{step}": value})
                self.held.drop(steps, f"i:{step}", f"s:{step}")
            elif kind == "drop":
                digest, _, chunks = value.decode().partition(" ")
                named = [f"c:{digest}:{chunk}" for chunk in range(int(chunks or 0))]
                self.held.drop(steps, f"d:{step}", f"i:{step}", f"s:{step}", *named)
            elif kind == "taken" or (kind in ("chunk", "emits") and not value):
                self.held.drop(*((inbox, f"m:{step}") if kind == "taken" else (steps, f"{kind[0]}:{step}")))
            elif kind in ("moved", "part"):
                self.held.put(record, {"handed_to" if kind == "moved" else f"result:{step}": value})
            elif kind in ("progress", "excuse", "wait", "answered", "emitted", "cut", "value"):
                self._write_special(task, kind, step, value, data, number)
            else:
                self.held.put(steps, {f"{kind[0]}:{step}": value})
            self.held.put(record, {"entries": number, **({"head": head} if head else {})})
        self._tell_items(task)
        if any(kind == "taken" for _, kind, *_ in new):
            self.held.put(inbox, {"used": self._used(inbox)})
        return 2 if self.held.exists(control) else 1

    def _refused_entries(self, delivery: Delivery, record: str, first: int, last: int) -> int | None:
        """Return the answer to entries that are refused, else None. Note the delivery that writes the first one."""
        writer = b"%b %b" % (delivery.worker.encode(), _fence(delivery))
        if first == 1 and not last:
            self.held.put(record, {"first": writer})
        elif first == 1 and self.held.get(record, "first") not in (None, writer):
            return 0
        return -1 - last if last < first - 1 else None

    def _write_event(self, task: str, kind: str, number: bytes, data: bytes, entry: int, *, base: bool) -> None:
        """Log an event of an agent. base: the log may start there, and loses what precedes the former base."""
        record, _, log, *_ = self.parts(task)
        event, former = self.note_event(task, kind, data, number=number, entry=entry), None
        self.held.put(record, {"events": number})
        if base:
            former = self.held.hashes[record].get("base")
            self.held.put(record, {"base": event})
        if former is not None:
            entries = self.held.stream(log).entries
            del entries[: next(at for at, (one, _) in enumerate(entries) if one is former)]
        self.tell(task, kind)

    def _write_progress(self, task: str, kind: str, step: str, value: bytes) -> None:
        """Store reported progress, or excuse crashes. The window is endless: the model's tests let no time pass."""
        record = self.at.record(task)
        if kind == "progress":
            self.held.put(record, {"progress": value, "progress_at": Moment()})
            self.tell(task, "progress")
            return
        crashes = int(value.split()[0])
        more = crashes - int(self.held.get(record, "excused") or 0)
        recent = int(self.held.get(record, "recent") or 0)
        self.held.put_new(record, "recent_at", Moment())
        self.held.put(record, {"recent": recent + more, "excused": crashes})
        self.note_event(task, step, b'{"excused":%d}' % crashes)

    def _write_special(self, task: str, kind: str, step: str, value: bytes, data: bytes, number: int) -> None:
        if kind in ("progress", "excuse"):
            self._write_progress(task, kind, step, value)
        elif kind in ("emitted", "cut"):
            self._write_item(task, kind, step, value)
        elif kind == "value":
            self._set_value(task, step, Stamped(text=value), Moment())
        else:
            self._write_wait(task, kind, step, value, data, number)

    def _tell_items(self, task: str) -> None:
        """Publish the last number of each stream that was written to, in the order of the first mention."""
        for name, number in self._items.items():
            if number:
                self.news.append((self.at.stream(task, name), str(number)))
        self._items.clear()

    def _write_item(self, task: str, kind: str, place: str, value: bytes) -> None:
        """Add an item to a stream, or a mark that voids some. An item whose key the stream has is dropped."""
        record = self.at.record(task)
        name, *parts = place.split(" ", 3)
        key, keyed = self.at.stream(task, name), self.at.stream_keys(task, name)
        if kind == "cut":
            attempt, unit = parts[0], " ".join(parts[1:])
            fields = {"u": unit, "y": attempt, "cut": "1"}
        elif parts[1] == "key":
            if parts[2] in self.held.sets.get(keyed, {}):
                return
            fields = {"u": "", "k": parts[2], "d": value.decode()}
        else:
            position, _, unit = parts[2].partition(" ")
            fields = {"u": unit, "y": parts[1], "n": position, "d": value.decode()}
        names = (self.held.get(record, "streams") or b"").decode().split()
        if name not in names:
            self.held.put(record, {"streams": " ".join([*names, name])})
            self.tell(task, "stream")
            self.held.persist(key)
        flat = tuple((part.encode(), text.encode()) for part, text in fields.items())
        number = self._items[name] = self.held.add_number(key, ((b"t", Moment()), *flat))
        if "k" in fields:
            self.held.set_score(keyed, fields["k"], b"%d" % number)
            self.held.put(record, {"keyed": "1"})

    def _write_wait(self, task: str, kind: str, wait: str, value: bytes, data: bytes, number: int) -> None:
        """Open or close a wait. An answer that came early is moved to the first wait of its name."""
        inbox, name = self.at.inbox(task), wait.rpartition("/")[2].partition("#")[0]
        fields = self.held.hashes.get(inbox, {})
        known, (opened, closed, last) = f"w:{wait}" in fields, self._wait_counts(inbox, name)
        left = int(self.held.get(inbox, "open") or 0)
        if kind == "answered":
            if known:
                used = b",".join(part for part in (value, last) if part)[:_USED_LENGTH]
                self.held.put(inbox, {f"c:{name}": b"%d %d %b" % (opened, closed + 1, used), "open": max(0, left - 1)})
                self.held.drop(inbox, f"w:{wait}", f"a:{wait}")
                if left <= 1:
                    self.held.drop_score(self.at.waiting, task)
            return
        limit, early, lost, _ = data.split(b" ", 3)
        if lost == b"1" and known:
            return
        kept = fields.get(f"e:{name}") if early == b"1" and not opened else None
        self.held.put(inbox, {f"w:{wait}": Stamped(text=b"%b %d %b" % (limit, number, value))})
        if not known:
            self.held.put(inbox, {f"c:{name}": b"%d %d %b" % (opened + 1, closed, last), "open": left + 1})
            if task not in self.held.sets.get(self.at.waiting, {}):
                self.held.set_score(self.at.waiting, task, Moment())
        if kept is None:
            self.held.drop(inbox, f"a:{wait}")
        else:
            count, size = self._early_counts(inbox)
            self.held.put(inbox, {f"a:{wait}": kept, "early": b"%d %d" % (count - 1, size - len(text_of(kept)))})
            self.held.drop(inbox, f"e:{name}")
        self.tell(task, "wait" if kept is None else "answer")

    def _wait_counts(self, inbox: str, name: str) -> tuple[int, int, bytes]:
        opened, closed, last = (self.held.get(inbox, f"c:{name}") or b"0 0 ").split(b" ")
        return int(opened), int(closed), last

    def _early_counts(self, inbox: str) -> tuple[int, int]:
        count, size = (self.held.get(inbox, "early") or b"0 0").split(b" ")
        return int(count), int(size)

    def answer(
        self, task: str, name: str, wait: str, head: bytes, digest: bytes, answer: bytes, limits: tuple[int, int]
    ) -> list[bytes]:
        """Store an answer to a wait, or keep it for the first wait of its name. limits: of those that are kept."""
        record, *_, inbox, _ = self.parts(task)
        state, field = self.state(task), f"a:{wait}" if wait else f"e:{name}"
        parked = state == b"scheduled" and self.held.get(record, "waits") is not None
        shown = b"waiting" if parked else state or b""
        if (refused := self._refused_answer(task, name, wait, head, digest, shown)) is not None:
            return refused
        count, size = self._early_counts(inbox)
        length = _STAMP + len(digest) + 1 + len(answer)
        if not wait and (count >= limits[0] or size + length > limits[1]):
            return [b"full", b"%d" % count, b"%d" % size]
        self.held.put(inbox, {field: Stamped(text=b"%b %b" % (digest, answer))})
        if not wait:
            self.held.put(inbox, {"early": b"%d %d" % (count + 1, size + length)})
        elif parked and f"answer:{wait}".encode() in (self.held.get(record, "wakes") or b"").split(b" "):
            self._wake(task)
        self.tell(task, "answer")
        return [b"answered" if wait else b"kept", shown]

    def _refused_answer(  # noqa: PLR0911 - each is a reply of the script
        self, task: str, name: str, wait: str, head: bytes, digest: bytes, shown: bytes
    ) -> list[bytes] | None:
        """Return the reply to an answer that is known, or that its wait does not take."""
        record, *_, inbox, _ = self.parts(task)
        opened, closed, last = self._wait_counts(inbox, name)
        held, state = self.held.get(inbox, f"a:{wait}" if wait else f"e:{name}"), self.state(task)
        if state is None:
            return [b"missing"]
        if held is not None and held.split(b" ")[1] == digest:
            return [b"answered" if wait else b"kept", shown]
        if digest in last.split(b","):
            return [b"used", shown]
        if (moved := self.held.get(record, "handed_to")) is not None:
            return [b"moved", moved]
        if state in (b"succeeded", b"cancelled"):
            return [b"ended", state]
        if wait:
            stored = self.held.get(inbox, f"w:{wait}")
            if stored is None or b" ".join(stored.split(b" ")[:3]) != head:
                return [b"changed"]
            if 0 < int(head.split(b" ")[1]) <= self.held.now:
                return [b"late"]
        elif opened:
            return [b"changed"] if opened > closed else [b"closed", b"%d" % closed]
        return None if held is None else [b"taken", b"answer" if wait else b"early"]

    def forget_waits(self, task: str) -> int:
        """Remove a task that has ended, or waits no more, from the index."""
        over = self.state(task) in (None, b"succeeded", b"cancelled")
        if task not in self.held.sets.get(self.at.waiting, {}):
            return 0
        if not over and (self.held.get(self.at.inbox(task), "open") or b"0") != b"0":
            return 0
        self.held.drop_score(self.at.waiting, task)
        return 1

    def _used(self, inbox: str) -> int:
        """Return how many of the first messages of an inbox were all used."""
        sent = int(self.held.get(inbox, "sent") or 0)
        return next((before for before in range(sent) if self._is_unused(inbox, before + 1)), sent)

    def _is_unused(self, inbox: str, position: int) -> bool:
        listed = self.held.get(inbox, f"n:{position}")
        return listed is not None and self.held.get(inbox, f"m:{listed.partition(b' ')[0].decode()}") is not None

    def _gap(self, task: str, last: int) -> int | None:
        """Return the answer to an outcome that follows from entries which the record lacks."""
        stored = int(self.held.get(self.at.record(task), "entries") or 0)
        return -1 - stored if stored < last else None

    # -- settling a delivery

    def finish(
        self,
        delivery: Delivery,
        task: str,
        state: str,
        result: bytes,
        counts: tuple[int, int],
        ran: int,
        ttl: int,
        checkpoint: bool,
        last: int = 0,
        cleanup: TaskMessage | None = None,
    ) -> bool:
        if not self.owned(delivery):
            return self.settled(delivery, task)
        if self._gap(task, last) is not None:
            return False
        record, steps, log, inbox, control = self.parts(task)
        self._register_retention(ttl)
        self._begin_outcome(delivery, task)
        outcome: Hash = {"state": state, "result": result, "attempts": counts[0], "crashes": counts[1], "ran": ran}
        self.held.put(record, outcome)
        self._settle(delivery, task)
        kept: Hash = {} if b"again" in delivery.fields else {"at": _time_of(delivery.entry)}
        self.held.put(record, {"finished": Moment(), **kept})
        unread = [at for at in range(1, int(self.held.get(inbox, "sent") or 0) + 1) if self._is_unused(inbox, at)]
        if unread and state == "succeeded" and self.held.get(record, "handed_to") is None:
            self.held.put(record, {"unread": len(unread)})
            self.note_event(task, "left_unread", b'{"count":%d}' % len(unread))
            checkpoint = True
        if (early := self._early_counts(inbox)[0]) > 0:
            self.held.put(record, {"unused_answers": early})
        self.held.expire(ttl, inbox, *((steps, log) if checkpoint else ()), *self.streams(task))
        self._keep_ended(task, ttl)
        self._keep_timeline()
        self.held.delete(control)
        self._clean_up(task, cleanup)
        self.tell(task, state)
        return True

    def _keep_ended(self, task: str, retention: int) -> None:
        """Let the record of an ended task expire, or put its notice into the outbox if it has watchers."""
        record = self.at.record(task)
        if self.held.get(record, "watchers") is None:
            self.held.expire(retention, record)
            return
        self.held.put(record, {"kept": f"{retention} {registered_retention(retention / 1000)}"})
        self.held.set_score(self.at.outbox, task, Moment(plus=3000))

    def watch(self, task: str, known: bytes, watchers: bytes) -> bytes:
        """Replace the watchers of a task. known: those that the caller has read."""
        record, state = self.at.record(task), self.state(task)
        if state in (None, b"succeeded", b"cancelled", b"dead"):
            return state or b"missing"
        if (self.held.get(record, "watchers") or b"") != known:
            return b"changed"
        self.held.put(record, {"watchers": watchers})
        return b"watched"

    def enqueue_child(self, task: str, envelope: bytes, args: bytes, watchers: bytes, upload: str | None) -> int | None:
        """Store a task with watchers."""
        record = self.at.record(task)
        if (answer := self._stored(task)) != 1:
            return answer
        if not self._take_upload(upload, record, args):
            return None
        entry = self.held.add(self.at.ready, ((b"env", envelope), (b"args", args), (b"watched", b"1")))
        self.held.put(record, {"state": "queued", "entry": entry, "env": envelope, "args": args, "watchers": watchers})
        self._list(task)
        return 1

    def end_of(self, task: str) -> tuple[bytes, ...]:
        """Return what tells one end of a task from another."""
        return tuple(self.held.get(self.at.record(task), name) or b"" for name in ("finished", "settled", "replays"))

    def notice_sent(self, task: str, end: tuple[bytes, ...], shortest: int) -> bool:
        """Take a task out of the outbox, and let its record expire. end: that whose notice is delivered."""
        record = self.at.record(task)
        if self.end_of(task) != end:
            return False
        self.held.drop_score(self.at.outbox, task)
        kept = self.held.get(record, "kept")
        if kept is not None and end[0]:
            passed = max(0, self.held.now - int(end[0]))
            retention = max(int(kept.split()[0]), shortest)
            self.held.drop(record, "kept", *(["watchers"] if self.state(task) != b"dead" else []))
            self._register_retention(retention)
            self.held.expire(max(int(kept.split()[0]) - passed, shortest), record)
        return True

    def _clean_up(self, task: str, cleanup: TaskMessage | None) -> None:
        """Enqueue the clean-up task of a task that ends, unless its id is another program's."""
        if cleanup is None:
            return
        self.held.put(self.at.record(task), {"cleanup": cleanup.id})
        if not self.held.exists(self.at.record(cleanup.id)):
            payload: Hash = {"env": cleanup.envelope, "args": cleanup.arguments}
            entry = self.held.add(self.at.ready, ((b"env", cleanup.envelope), (b"args", cleanup.arguments)))
            self.held.put(self.at.record(cleanup.id), {"state": "queued", "entry": entry, **payload})
            self._list(cleanup.id, by_producer=True)

    def _settle(self, delivery: Delivery, task: str) -> None:
        record = self.at.record(task)
        self._close_message(delivery)
        self.held.put(record, {"worker": delivery.worker, "settled": _fence(delivery)})

    def retry(
        self,
        delivery: Delivery,
        task: str,
        delay: int,
        counts: tuple[int, int, int],
        event: str,
        data: bytes,
        last: int = 0,
        changes: Mapping[str, bytes] = NO_CHANGES,
    ) -> bool:
        if not self.owned(delivery):
            return self.settled(delivery, task)
        if self._gap(task, last) is not None:
            return False
        record = self.at.record(task)
        at_once = event != "returned" and self.held.exists(self.at.control(task))
        self._defer(delivery, task, 0 if at_once else delay, counts)
        self.held.put(record, {"error": data})
        self.held.drop(record, "waits", "wakes")
        self.note_event(task, event, data)
        self.tell(task, event)
        self._end_attempt(task, changes)
        return True

    def _end_attempt(self, task: str, changes: Mapping[str, bytes], ttl: int | None = None) -> None:
        """Change the checkpoint for the next attempt; an empty value deletes the field."""
        steps = self.at.steps(task)
        record = self.at.record(task)
        entries = int(self.held.get(record, "entries") or 0)
        if entries and (head := changes.get(f"head:{entries}")):
            self.held.put(record, {"head": head})
        if kept := {name: value for name, value in changes.items() if value and name[:5] != "head:"}:
            self.held.put(steps, kept)
            if ttl is not None:
                self.held.expire(ttl, steps)
        self.held.drop(steps, *(name for name, value in changes.items() if not value))

    def park(
        self,
        delivery: Delivery,
        task: str,
        delay: int,
        counts: tuple[int, int, int],
        waits: str,
        conditions: Sequence[tuple[str, str]],
        last: int = 0,
        keeps: str = "",
    ) -> bool:
        """Park the task. conditions: kind and value of each. keeps: the token of limits that it keeps, for a minute."""
        if not self.owned(delivery):
            return self.settled(delivery, task)
        if self._gap(task, last) is not None:
            return False
        record = self.at.record(task)
        over = self.held.exists(self.at.control(task)) or any(self._is_over(task, *each) for each in conditions)
        self._defer(delivery, task, 0 if over else delay, counts)
        wakes = " ".join(dict.fromkeys(_wake_word(*each) for each in conditions))
        self.held.put(record, {"waits": waits, "wakes": wakes})
        if keeps:
            self.held.put(record, {"keeps": keeps})
            self.held.set_score(self.at.kept, task, Moment(plus=60_000))
        self.tell(task, "waiting")
        return True

    def wake_for_limit(self, task: str) -> bool:
        """Wake a task that is parked for a limit; return whether it was due later."""
        record, woken = self.at.record(task), False
        if (state := self.state(task)) is None:
            return False
        words = (self.held.get(record, "wakes") or b"").split(b" ")
        parked = state == b"scheduled" and self.held.get(record, "waits") is not None
        if parked and any(word.startswith(b"limit:") for word in words):
            woken = float(text_of(self.held.sets[self.at.due][task])) > self.held.now
            self._wake(task)
        self.tell(task, "limit")
        return woken

    def note_kept(self, task: str, keeps: str, *, renewed: bool) -> int:
        """Note that the token of a parked task was renewed for an hour, or is gone; return how many keep one."""
        record, kept = self.at.record(task), self.held.sets.get(self.at.kept, {})
        if kept and (self.held.get(record, "keeps") or b"") == keeps.encode():
            if renewed and task in kept:
                self.held.set_score(self.at.kept, task, Moment(plus=3_600_000))
            elif not renewed:
                self.held.drop_score(self.at.kept, task)
                self.held.drop(record, "keeps")
        return len(self.held.sets.get(self.at.kept, {}))

    def _is_over(self, task: str, kind: str, value: str) -> bool:
        """Return whether what a condition waits for has come."""
        inbox = self.at.inbox(task)
        match kind:
            case "message":
                return int(self.held.get(inbox, "last") or 0) > int(value)
            case "answer":
                return self.held.get(inbox, f"a:{value}") is not None
        return False

    def await_version(
        self,
        delivery: Delivery,
        task: str,
        needed: int,
        limit: int,
        name: str | None,
        counts: tuple[int, int, int] | None,
    ) -> bool:
        """Park a task until a newer worker comes. Its first wait may have start long ago."""
        if not self.owned(delivery):
            return self.settled(delivery, task)
        record, first = self.at.record(task), self._earliest()
        self._begin_outcome(delivery, task)
        self.held.put_new(record, "at", _time_of(delivery.entry))
        self.held.put_new(record, "newer_since", Moment())
        since = self.held.hashes[record]["newer_since"]
        start = None if isinstance(since, Later) and since.known is None else int(text_of(since))
        delay = limit if start is None else max(0, start + limit - self.held.now)
        delay = 0 if self.held.exists(self.at.control(task)) else delay
        waits, waiting = f"version {needed}", self.at.versions
        if name is not None:
            waits, waiting = f"{waits} of {name}", f"{waiting}:{name}"
        self.held.put(record, {"state": "scheduled", "waits": waits, "wakes": "version"})
        if counts is not None:
            self.held.put(record, dict(zip(("attempts", "crashes", "returns"), counts, strict=True)))
        self._settle(delivery, task)
        self.held.put(record, {"due": self._schedule(task, delay)})
        self.held.set_score(waiting, task, str(needed).encode())
        self.held.expire(limit, waiting)
        if first is None or self.held.now + delay < first:
            self.nudge("due")
        self.tell(task, "waiting")
        return True

    def wake_version(self, known: int, tasks: Mapping[str, int]) -> int:
        """Make the tasks due that wait for a version up to this one, or of their own code up to that in `tasks`."""
        woken = 0
        wanted = {self.at.versions: known} | {f"{self.at.versions}:{name}": version for name, version in tasks.items()}
        for key, newest in wanted.items():
            waiting = self.held.sets.get(key, {})
            for task in [task for task, needed in waiting.items() if float(text_of(needed)) <= newest]:
                self.held.drop_score(key, task)
                score = self.held.sets.get(self.at.due, {}).get(task)
                if score is not None and float(text_of(score)) > self.held.now:
                    self._schedule(task, 0)
                    woken += 1
        return woken

    def await_resume(
        self, delivery: Delivery, task: str, number: int, look: int, kept: int, counts: tuple[int, int, int]
    ) -> bool:
        """Park a task that the pause with this number holds."""
        if not self.owned(delivery):
            return self.settled(delivery, task)
        record, first = self.at.record(task), self._earliest()
        self._begin_outcome(delivery, task)
        self.held.put_new(record, "at", _time_of(delivery.entry))
        delay = 0 if self.held.exists(self.at.control(task)) else look
        counters = dict(zip(("attempts", "crashes", "returns"), counts, strict=True))
        self.held.put(record, {"state": "scheduled", "wakes": f"pause:{number}", **counters})
        self.held.drop(record, "waits")
        self._settle(delivery, task)
        self.held.put(record, {"due": self._schedule(task, delay)})
        self.held.set_score(self.at.paused, task, str(number).encode())
        self.held.expire(kept, self.at.paused)
        if first is None or self.held.now + delay < first:
            self.nudge("due")
        self.tell(task, "waiting")
        return True

    def wake_paused(self, revision: int, numbers: Sequence[int]) -> tuple[int, int]:
        """Make the tasks due whose pause is not among these numbers; return how many were taken, and are due now."""
        held = self.held.sets.get(self.at.paused, {})
        freed = [task for task, score in held.items() if int(text_of(score)) not in numbers]
        freed = [task for task in freed if int(text_of(held[task])) <= revision]
        woken = 0
        for task in freed:
            self.held.drop_score(self.at.paused, task)
            score = self.held.sets.get(self.at.due, {}).get(task)
            if score is not None and float(text_of(score)) > self.held.now:
                self._schedule(task, 0)
                woken += 1
        if woken:
            self.nudge("due")
        return len(freed), woken

    def _defer(self, delivery: Delivery, task: str, delay: int, counts: tuple[int, int, int]) -> None:
        """Move the task from its message to the due set."""
        record, first = self.at.record(task), self._earliest()
        self._begin_outcome(delivery, task)
        self.held.put_new(record, "at", _time_of(delivery.entry))
        numbers: Hash = {"due": self._schedule(task, delay)}
        numbers |= {"attempts": counts[0], "crashes": counts[1], "returns": counts[2]}
        self.held.put(record, {"state": "scheduled", **numbers})
        self._settle(delivery, task)
        if first is None or self.held.now + delay < first:
            self.nudge("due")

    def release(self, delivery: Delivery, task: str | None, data: bytes | None, last: int = 0) -> bool:
        record = self.at.record(task or _task_of(tuple(delivery.fields.items())) or "")
        fence = delivery.worker.encode() + b" " + _fence(delivery)
        if not self.owned(delivery):
            pending = self.pending.get(delivery.entry)
            waits = pending is not None and (pending.owner, pending.count) == (RELEASED, delivery.count)
            return waits or self.held.get(record, "released") == fence
        if task is not None and self._gap(task, last) is not None:
            return False
        self._give_back(delivery.entry)
        if self._count_returned(delivery.entry):
            self.held.put(record, {"released": fence})
        if data is not None:
            assert task is not None
            self.held.drop(record, *_RUN)
            self.note_event(task, "handed_off", data)
            self.tell(task, "handed_off")
        self.nudge("released")
        return True

    def _give_back(self, entry: bytes) -> None:
        self.pending[entry] = Pending(RELEASED, self.pending[entry].count, Moment(plus=-RELEASED_IDLE_MS, loose=True))
        self.ready.names[RELEASED] = True

    def bury(
        self,
        delivery: Delivery,
        task: str,
        name: str,
        reason: str,
        evidence: bytes,
        counts: tuple[int, int],
        retention: int,
        raw: bool,
        last: int = 0,
        changes: Mapping[str, bytes] = NO_CHANGES,
        cleanup: TaskMessage | None = None,
    ) -> bool:
        if not self.owned(delivery):
            return self.settled(delivery, task)
        if self.held.get(self.at.control(task), "cancel") is not None:
            return True  # nothing is done: the caller stores that it was cancelled
        if self._gap(task, last) is not None:
            return False
        record, steps, log, inbox, control = self.parts(task)
        self._register_retention(retention)
        kept: Fields = ()
        if raw:
            kept = tuple((b"raw:" + field, value) for field, value in (self.ready.find(delivery.entry) or ())[:500])
        self._begin_outcome(delivery, task)
        kept = kept if raw else tuple(self.payload(task).items())
        self.held.put_new(record, "at", _time_of(delivery.entry))
        letter = self.held.add(
            self.at.dead,
            (
                *_fields(id=task, task=name, reason=reason, evidence=evidence),
                *_fields(attempts=counts[0], crashes=counts[1], worker=delivery.worker),
                *kept,
                (b"at", self.held.hashes[record]["at"]),
            ),
        )
        reported: Hash = {"reason": reason, "error": evidence, "attempts": counts[0], "crashes": counts[1]}
        self.held.put(record, {"state": "dead", "dead": letter, "finished": Moment(), **reported})
        self.held.drop(record, "env", "args", "task", "app")
        self._settle(delivery, task)
        self._list(task, self.held.hashes[record]["at"])
        self.note_event(task, "buried", evidence)
        self.held.put_new(inbox, "sent", b"0")
        self.held.expire(retention, steps, log, inbox, *self.streams(task))
        self._keep_ended(task, retention)
        self.held.delete(control)
        self._clean_up(task, cleanup)
        self.tell(task, "dead")
        self._end_attempt(task, changes, retention)
        return True

    # -- suspects

    def crash(self, worker: str, how: str, doing: Mapping[str, str]) -> int:
        """Record the crash of a worker that its supervisor reports."""
        held = sorted(
            (one for one, held in self.pending.items() if held.owner == worker), key=lambda one: Id(one).order
        )
        for entry in held:
            self._give_back(entry)
            task = _task_of(self.ready.find(entry))
            if task is not None:
                self._note_crash(task, {"how": how, "worker": worker}, doing)
            self.nudge("released")
        self._name_gone(worker)
        return len(held)

    def _note_crash(self, task: str, known: dict[str, object], doing: Mapping[str, str]) -> None:
        record = self.at.record(task)
        reported = orjson.dumps(known | ({"step": doing[task]} if task in doing else {}))
        self.held.drop(record, *_RUN)
        self.held.put(record, {"crash": reported})
        self.note_event(task, "crashed", reported)
        self.tell(task, "crashed")

    def _suspect(self, entry: bytes, count: int) -> None:
        self.pending[entry] = Pending(SUSPECTS, count, Moment(loose=True))
        self.ready.names[SUSPECTS] = True

    def set_aside(self, delivery: Delivery, task: str) -> bool:
        if not self.owned(delivery):
            pending = self.pending.get(delivery.entry)
            return pending is not None and (pending.owner, pending.count) == (SUSPECTS, delivery.count)
        self._suspect(delivery.entry, delivery.count)
        if self._count_returned(delivery.entry):
            self.held.put(self.at.record(task), {"suspect": "1"})
        self.nudge("suspect")
        return True

    def take_suspect(self, worker: str) -> tuple[list[Handed], bool]:
        """Take the first waiting suspect; return it, and whether there are more."""
        waiting = sorted(
            (one for one, held in self.pending.items() if held.owner == SUSPECTS), key=lambda one: Id(one).order
        )
        for entry in waiting[:1]:
            self.pending[entry] = Pending(worker, self.pending[entry].count + 1, Moment(loose=True))
            self.ready.names[worker] = True
        return [self._handed(entry) for entry in waiting[:1]], len(waiting) > 1

    def acquit(self, delivery: Delivery, task: str) -> bool:
        if self.owned(delivery):
            self.held.drop(self.at.record(task), "suspect")
            return True
        return False

    # -- calls of clients

    def cancel(self, task: str, retention: int, replaced_by: str = "", *, unstarted: bool = False) -> str:
        """Cancel a task. unstarted: one that a worker has started is left alone, and its state returned."""
        state = self.state(task)
        record, steps, log, inbox, control = self.parts(task)
        if state is None:
            return "missing"
        if state not in (b"queued", b"scheduled"):
            return state.decode()
        if unstarted and self._has_started(task):
            return self._shown_state(task)
        if replaced_by:
            self.held.put(record, {"replaced_by": replaced_by})
        if state == b"scheduled":
            self.held.drop_score(self.at.due, task)
            waits, _, name = (self.held.get(record, "waits") or b"").decode().partition(" of ")
            if waits.startswith("version "):
                self.held.drop_score(f"{self.at.versions}:{name}" if name else self.at.versions, task)
            if (self.held.get(record, "wakes") or b"").startswith(b"pause:"):
                self.held.drop_score(self.at.paused, task)
        else:
            entry = self.held.get(record, "entry")
            assert entry is not None
            pending = self.pending.get(entry)
            if pending is not None and not is_reserved(pending.owner):
                self.held.put(control, {"cancel": "1"})
                self.news.append((self.namespace.worker_channel(pending.owner), task))
                return "running"
            self.pending.pop(entry, None)
            self.ready.remove(entry)
            self.held.put_new(record, "at", _time_of(entry))
        if self.held.get(record, "keeps") is not None and task in self.held.sets.get(self.at.kept, {}):
            self.held.set_score(self.at.kept, task, Moment())
        if b"on_end" in (self.held.get(record, "env") or b"") or self.held.get(steps, "s:#on_end") is not None:
            self.held.put(control, {"cancel": "1"})
            self.held.put(record, {"state": "scheduled", "due": self._schedule(task, 0)})
            self.held.drop(record, "entry", "waits", "wakes")
            self.nudge("due")
            return "scheduled"
        self._register_retention(retention)
        self.held.put(record, {"state": "cancelled", "finished": Moment()})
        self.held.drop(record, "entry", "due", "waits", "wakes")
        self.held.delete(control)
        self.held.expire(retention, steps, log, inbox, *self.streams(task))
        self._keep_ended(task, retention)
        self._keep_timeline()
        self.tell(task, "cancelled")
        return "cancelled"

    def _has_started(self, task: str) -> bool:
        record = self.at.record(task)
        pending = self.pending.get(self.held.get(record, "entry") or b"")
        names = ("returned", "attempts", "crashes", "replays", "worker", "settled")
        held = self.state(task) == b"limited" or (self.held.get(record, "wakes") or b"").startswith(b"pause:")
        touched = any((self.held.get(record, name) or b"0") != b"0" for name in names[: 4 if held else 6])
        recorded = held and self.held.exists(self.at.steps(task))
        return touched or recorded or (pending is not None and pending.count > 0)

    def _shown_state(self, task: str) -> str:
        """Return the state of a queued or scheduled task as callers see it."""
        record = self.at.record(task)
        pending = self.pending.get(self.held.get(record, "entry") or b"")
        if self.state(task) == b"queued":
            return "running" if pending is not None and not is_reserved(pending.owner) else "queued"
        return "waiting" if self.held.get(record, "waits") is not None else "scheduled"

    def send(
        self, task: str, digest: str, message: bytes, sealed: int | None, limits: tuple[int, int], answer: list[bytes]
    ) -> list[bytes]:
        """Put a message into the inbox; return the answer of the script, of which a new message's number is taken.

        message: Empty to ask for a number.
        sealed: Number for which the message is encrypted.
        limits: Messages and bytes that an inbox holds.
        """
        most, limit = limits
        record, *_, inbox, _ = self.parts(task)
        state, sent = self.state(task), int(self.held.get(inbox, "sent") or 0)
        unsent = self._unsent(task, digest)
        if state is None or unsent is not None:
            return unsent or [b"missing"]
        used = int(self.held.get(inbox, "used") or 0)
        size = int(self.held.get(inbox, "bytes") or (limit if sent > used else 0))
        if sent - used >= most or size + len(message) > limit:
            used = self._used(inbox)
            size = sum(map(len, self._unused(inbox).values()))
        if sent - used >= most or size + len(message) > limit:
            return [b"full", b"%d" % (sent - used), b"%d" % size]
        number, last = int(answer[1]), int(self.held.get(inbox, "last") or 0)
        if not message or (sealed is not None and sealed <= last):
            given = int(self.held.get(inbox, "given") or 0)
            if number <= max(last, given) or (number not in (last + 1, given + 1) and number < self.held.now):
                return [b"a number that was not given, or the time"]
            self.held.put(inbox, {"given": number})
            return [b"number", b"%d" % number]
        if number != sealed and (number <= last or (number != last + 1 and number < self.held.now)):
            return [b"a number after the last one, or the time"]
        reported: Hash = {f"m:{number}": Stamped(text=message), f"id:{digest}": number, "used": used}
        place: Hash = {f"n:{sent + 1}": b"%d %s" % (number, digest.encode()), "sent": sent + 1, "last": number}
        place["bytes"] = (size if sent > used else 0) + _STAMP + len(message)
        self.held.put(inbox, {**reported, **place})
        past = self.held.get(inbox, f"n:{sent + 1 - most}")
        if past is not None:
            self.held.drop(inbox, f"id:{past.partition(b' ')[2].decode()}", f"n:{sent + 1 - most}")
        parked = state == b"scheduled" and self.held.get(record, "waits") is not None
        if parked and b"message" in (self.held.get(record, "wakes") or b"").split(b" "):
            self._wake(task)
        self.tell(task, "message")
        return [b"sent", b"%d" % number, b"waiting" if parked else state]

    def update(
        self, task: str, name: str, value: bytes, digest: bytes, most: int, number: int | None, answer: list[bytes]
    ) -> list[bytes]:
        """Set a value from outside; return the answer of the script, of which a new change's number is taken.

        most: values that a task has. number: that of a change of the task that this one continues.
        """
        record, *_, inbox, _ = self.parts(task)
        known = (self.held.get(inbox, "updates") or b"").split(b",")
        parked = self.state(task) == b"scheduled" and self.held.get(record, "waits") is not None
        shown = b"waiting" if parked else self.state(task) or b""
        if (answered := self._answered_update(task, name, digest in known, number, shown)) is not None:
            return answered
        names = (self.held.get(inbox, "values") or b"").split()
        if name.encode() not in names and len(names) >= most:
            return [b"full", b"%d" % len(names)]
        last = int(self.held.get(inbox, "changed") or 0)
        found = int(answer[1]) if number is None else number
        if number is None and (found <= last or (found != last + 1 and found < self.held.now)):
            return [b"a number after the last one, or the time"]
        self._set_value(task, name, b"%d %b" % (found, value), b"%d" % max(found, last))
        self.held.put(inbox, {f"o:{name}": b"%d" % found, "updates": b",".join([digest, *filter(None, known)])[:799]})
        return [b"set", b"%d" % found, shown]

    def _answered_update(
        self, task: str, name: str, known: bool, number: int | None, shown: bytes
    ) -> list[bytes] | None:
        """Return the answer to an update that is known or comes too late, or that the task does not take."""
        record, *_, inbox, _ = self.parts(task)
        state, present = self.state(task), self._value_number(inbox, name)
        if state is None:
            return [b"missing"]
        if not known and (moved := self.held.get(record, "handed_to")) is not None:
            return [b"moved", moved]
        if not known and state in (b"succeeded", b"cancelled"):
            return [b"ended", state]
        done = known or (number is not None and present >= number)
        return [b"set", b"%d" % present, shown] if done else None

    def _set_value(self, task: str, name: str, value: Value, changed: Value) -> None:
        inbox = self.at.inbox(task)
        names = (self.held.get(inbox, "values") or b"").split()
        if name.encode() not in names:
            self.held.put(inbox, {"values": b" ".join([*names, name.encode()])})
        self.held.put(inbox, {f"v:{name}": value, "changed": changed})
        self.tell(task, "value")

    def _value_number(self, inbox: str, name: str) -> int:
        return int((self.held.get(inbox, f"v:{name}") or b"0").partition(b" ")[0])

    def read_values(self, task: str, after: int, name: str) -> list[bytes | int]:
        """Return the answer of the script for values below its limit. name: the only one, empty for all."""
        inbox = self.at.inbox(task)
        names = [name] if name else (self.held.get(inbox, "values") or b"").decode().split()
        found: list[bytes | int] = [self.held.get(inbox, "changed") or b"0"]
        for one in names:
            value = self.held.get(inbox, f"v:{one}")
            if value is not None and self._value_number(inbox, one) > after:
                found += [one.encode(), value]
        return found

    def read_inbox(self, task: str, most: int) -> list[bytes | int]:
        """Return the answer of the script for a page that has all unread messages of an inbox."""
        inbox = self.parts(task)[3]
        sent, used = (int(self.held.get(inbox, name) or 0) for name in ("sent", "used"))
        counts = ("sent", "used", "last", "bytes", "given", "open", "early", "values", "changed", "updates")
        known = sum(self.held.get(inbox, name) is not None for name in counts)
        known += sum(name[:2] in ("w:", "a:", "e:", "c:", "v:", "o:") for name in self.held.hashes.get(inbox, {}))
        foreign = len(self.held.hashes.get(inbox, {})) - known - 2 * min(sent, most) - sent + used
        return [b"", max(0, foreign), *(part for pair in self._unused(inbox).items() for part in pair)]

    def _unused(self, inbox: str) -> dict[bytes, bytes]:
        """Return the unread messages of an inbox by their numbers, in order."""
        positions = [at for at in range(1, int(self.held.get(inbox, "sent") or 0) + 1) if self._is_unused(inbox, at)]
        numbers = [(self.held.get(inbox, f"n:{at}") or b"").partition(b" ")[0] for at in positions]
        return {number: self.held.get(inbox, f"m:{number.decode()}") or b"" for number in numbers}

    def _unsent(self, task: str, digest: str) -> list[bytes] | None:
        """Return the answer for a message that is known, or that the task does not take."""
        record, *_, inbox, _ = self.parts(task)
        state = self.state(task) or b""
        if (known := self.held.get(inbox, f"id:{digest}")) is not None and state:
            parked = state == b"scheduled" and self.held.get(record, "waits") is not None
            return [b"sent", known, b"waiting" if parked else state]
        if (moved := self.held.get(record, "handed_to")) is not None:
            return [b"moved", moved]
        return [b"ended", state] if state in (b"succeeded", b"cancelled") else None

    def _wake(self, task: str) -> None:
        """Make a waiting task due now."""
        first, score = self._earliest(), float(text_of(self.held.sets[self.at.due][task]))
        if score > self.held.now:
            self._schedule(task, 0)
            if first is not None and self.held.now < first:
                self.nudge("due")

    def hand(
        self,
        task: str,
        envelope: bytes,
        args: bytes,
        source: str,
        name: str,
        value: bytes,
        values: Mapping[str, bytes],
        upload: str | None = None,
    ) -> int | None:
        """Store the successor of a task, which continues with its checkpoint and its values."""
        record, steps, *_ = self.parts(task)
        answer = self._stored(task)
        if answer == 0:
            return 0 if self.held.get(record, "handed_from") == source.encode() else -2
        if answer == 1 and not self._take_upload(upload, record, args):
            return None
        if answer == 1:
            entry = self.held.add(self.at.ready, ((b"env", envelope), (b"args", args), (b"again", b"1")))
            self.held.put(record, {"state": "queued", "entry": entry, "at": Moment(), "handed_from": source})
            self.held.put(record, {"env": envelope, "args": args})
            self.held.put(steps, {name: value})
            if values:
                self.held.put(self.at.inbox(task), values)
            self._list(task)
        return answer

    def store_copy(
        self,
        task: str,
        envelope: bytes,
        args: bytes,
        source: str,
        past: Past,
        parts: tuple[str, str, str],
        upload: str | None = None,
    ) -> int | None:
        """Store a task with the past of another one. parts: uploads of its steps, log and inbox."""
        record, steps, log, inbox, _ = self.parts(task)
        answer = self._stored(task)
        if answer == 0:
            return int(self.held.get(record, "forked") == source.encode())
        if answer != 1:
            return answer
        kept = (self.held.hashes.get(parts[0], {}), self.held.hashes.get(parts[2], {}))
        entries = self.held.stream(parts[1])
        counts = (len(kept[0]), len(entries.entries), len(kept[1]))
        if counts != (len(past.fields), len(past.log), len(past.inbox)):
            return None
        if not self._take_upload(upload, record, args):
            return None
        self.held.delete(steps, log, inbox, *parts)
        for key, fields in ((steps, kept[0]), (inbox, kept[1])):
            if fields:
                self.held.put(key, fields)
        if entries.entries:
            self.held.streams[log] = entries
        entry = self.held.add(self.at.ready, ((b"env", envelope), (b"args", args), (b"again", b"1")))
        numbers = {"events": past.events, "entries": past.entries}
        self.held.put(
            record, {"state": "queued", "entry": entry, **numbers, "forked": source, "head": b"head of a copy"}
        )
        self.held.put(record, {"at": Moment(), "env": envelope, "args": args})
        if past.format is not None:
            self.held.put(record, {"format": past.format})
        self._list(task)
        return 1

    def upload_events(self, upload: str, before: int, entries: Sequence[tuple[str, Mapping[str, bytes]]]) -> int:
        """Add entries to a log before its task is stored. before: how many there are already."""
        known = len(self.held.stream(upload).entries)
        if known != before:
            return int(known > before)
        for at, fields in entries:
            entry = self.held.add(upload, tuple((name.encode(), value) for name, value in fields.items()))
            if at != "*":
                entry.known = at.encode()
        self.held.expire(_UPLOAD, upload)
        return 1

    def mark(self, task: str) -> tuple[bytes, ...]:
        """Return what an export reads of a task, and compares before it ends the task."""
        record, _, log, inbox, _ = self.parts(task)
        fields = [self.held.get(record, name) for name in _COMPARED]
        counts = [self.held.get(inbox, name) for name in ("sent", "used", "last", "changed")]
        entries = self.held.stream(log).entries
        return (*(value or b"" for value in (*fields, *counts)), text_of(entries[-1][0]) if entries else b"")

    def close_exported(self, task: str, mark: tuple[bytes, ...], event: bytes, retention: int) -> bool:
        """Cancel a task that continues on another deployment, unless something of it has changed since the export."""
        record, steps, log, inbox, control = self.parts(task)
        state, entry = self.state(task), self.held.get(record, "entry")
        if state not in (b"queued", b"scheduled", b"dead") or self.mark(task) != mark:
            return False
        if self.held.get(record, "kept" if state == b"dead" else "watchers") is not None:
            return False
        if state == b"queued":
            pending = self.pending.get(entry or b"")
            if entry is None or (pending is not None and not is_reserved(pending.owner)):
                return False
            self.pending.pop(entry, None)
            self.ready.remove(entry)
            self.held.put_new(record, "at", _time_of(entry))
        if self.held.get(record, "keeps") is not None and task in self.held.sets.get(self.at.kept, {}):
            self.held.set_score(self.at.kept, task, Moment())
        letter = self.held.get(record, "dead")
        if letter is not None:
            letters = self.held.stream(self.at.dead)
            self.held.put(record, _payload(letters.find(letter)))
            letters.remove(letter)
        self.held.drop_score(self.at.due, task)
        self.note_event(task, "exported", event)
        self._register_retention(retention)
        self.held.put(record, {"state": "cancelled", "finished": Moment()})
        self.held.drop(record, "entry", "due", "waits", "wakes", "dead", "reason", "error")
        self.held.delete(control)
        self.held.expire(retention, record, steps, log, inbox, *self.streams(task))
        self._keep_timeline()
        self.tell(task, "cancelled")
        return True

    def forget_task(self, task: str, successor: bytes) -> int:
        """Delete a task in whatever state it is. successor: that of the record as the caller has read it."""
        record = self.at.record(task)
        if (self.held.get(record, "handed_to") or b"") != successor:
            return -1
        entry, letter = self.held.get(record, "entry"), self.held.get(record, "dead")
        self.held.drop_score(self.at.due, task)
        self.held.drop_score(self.at.timeline, task)
        if letter is not None:
            self.held.stream(self.at.dead).remove(letter)
        holder = None
        if entry is not None:
            holder = self.pending.pop(entry, None)
            self.ready.remove(entry)
        if not any(self.held.exists(part) for part in self.parts(task)):
            return 0
        self.held.delete(*self.streams(task), *self.parts(task))
        self.tell(task, "forgotten")
        if holder is not None and not is_reserved(holder.owner):
            self.news.append((self.namespace.worker_channel(holder.owner), task))
        return 1

    def dismiss(self, task: str, data: bytes) -> bytes:
        """Log that a person dismissed a finding."""
        state, log = self.state(task), self.at.log(task)
        if state is None or not self.held.exists(log):
            return b"missing"
        if state in (b"succeeded", b"cancelled"):
            return state
        self.note_event(task, "dismissed", data)
        self.tell(task, "dismissed")
        return b"dismissed"

    def edit(self, task: str, events: int, entries: int, wakes: str, fields: Mapping[str, bytes], gone: str) -> int:
        """Edit the checkpoint of a task that no worker has, and wake the task if it waits for that."""
        record, steps, *_ = self.parts(task)
        known = [int(self.held.get(record, name) or 0) for name in ("events", "entries")]
        state, entry = self.state(task), self.held.get(record, "entry")
        holder = None if entry is None else self.pending.get(entry)
        free = state == b"queued" and entry is not None and (holder is None or is_reserved(holder.owner))
        if not (free or state in (b"scheduled", b"dead")) or known != [events, entries] or not self.held.exists(steps):
            return 0
        self.held.put(record, {"events": events + 1, "entries": entries + 1, "head": b"head of an edit"})
        self.held.put(steps, dict(fields))
        self.held.drop(steps, gone)
        self.note_event(task, "archived", b"{}", number=b"%d" % (events + 1), entry=entries + 1)
        self.tell(task, "archived")
        if state != b"scheduled" or self.held.get(record, "waits") != wakes.encode():
            return 1
        self._wake(task)
        return 2

    def replay(self, letter: bytes, task: str, fresh: bool, args: bytes | None) -> bool:
        found = self.held.stream(self.at.dead).find(letter)
        record, steps, log, inbox, _ = self.parts(task)
        holder = self.held.get(record, "dead")
        if found is None or (self.held.exists(record) and holder != letter):
            return False
        entry = self.held.add(self.at.ready, ((b"again", b"1"), *_message_again(found, args)))
        self.held.stream(self.at.dead).remove(letter)
        if task.startswith("unreadable-"):
            self.held.delete(*self.streams(task), record, steps, log, inbox)
            self.held.drop_score(self.at.timeline, task)
            return True
        if self.held.exists(record):
            self._keep_timeline()
        else:
            self._list(task)
        replays = int(self.held.get(record, "replays") or 0) + 1
        zero = {"attempts": 0, "crashes": 0, "returns": 0}
        self.held.put(record, {"state": "queued", "entry": entry, "replays": replays, **zero})
        self.held.put(record, _payload(_message_again(found, args)))
        self.held.put_new(record, "at", Moment())
        self.held.drop(record, "dead", "reason", "error", "finished", "result", "settled", *CRASHES)
        self.note_event(task, "replayed", b'{"fresh":true}' if fresh else b'{"fresh":false}')
        if args is not None:
            self.held.drop(record, *_chunks_of(found))
            self.held.put(record, {"edited": 1})
        if fresh:
            names = set(self.held.hashes.get(steps, ()))
            kept = names & {"s:#forgotten", "s:#used"}
            self.held.drop(steps, *(names - kept))
            if not kept:
                self.held.delete(steps)
            self.held.drop(record, "handed_to", "progress", "progress_at", "head")
        streams = self.streams(task)
        self.held.persist(record, steps, log, inbox, *streams)
        for key in streams if fresh else ():
            if self.held.stream(key).entries:
                mark = ((b"t", Moment()), (b"u", b""), (b"y", b"0"), (b"cut", b"all"))
                self.news.append((key, str(self.held.add_number(key, mark))))
        self.tell(task, "replayed")
        return True

    def discard(self, letter: bytes, task: str) -> bool:
        if not self.held.stream(self.at.dead).remove(letter):
            return False
        record = self.at.record(task)
        if not self.held.exists(record) or self.held.get(record, "dead") == letter:
            self.held.delete(*self.streams(task), *self.parts(task))
            self.held.drop_score(self.at.timeline, task)
        return True

    def trim_timeline(self) -> int:
        """Remove the tasks whose record has expired."""
        listed = self.held.sets.get(self.at.timeline, {})
        gone = [task for task in listed if not self.held.exists(self.at.record(task))]
        self._keep_timeline()
        self.held.drop_score(self.at.timeline, *gone)
        return len(gone)

    # -- mistakes of other programs

    def delete_message(self, entry: bytes) -> None:
        """Delete a message that is not pending."""
        self.ready.remove(entry)

    def acknowledge(self, entry: bytes) -> None:
        self.pending.pop(entry, None)

    def delete_consumer(self, worker: str) -> None:
        """Delete a consumer with what is pending on it."""
        for entry in [entry for entry, held in self.pending.items() if held.owner == worker]:
            del self.pending[entry]
        self.ready.names[worker] = False

    def skip_messages(self, last: bytes) -> None:
        self.ready.delivered = Id(last)

    def replace_stream(self, last: bytes) -> None:
        """Replace the stream, whose last id was used up. last: its last id then."""
        self.ready.last = Id(last)

    def put_lost_back(self) -> int:
        """Put the tasks back that are not where their records say, the oldest first; return their number."""
        listed = self.held.sets.get(self.at.timeline, {})
        found = sorted(listed, key=lambda task: (float(text_of(listed[task])), task))
        found = [task for task in found if self._put_lost_back(task)]
        self.held.strings[self.at.checked] = b"0"
        self.held.expire(HOUR, self.at.checked)
        return len(found)

    def _put_lost_back(self, task: str) -> bool:
        record, state = self.at.record(task), self.state(task)
        if state == b"scheduled" and task not in self.held.sets.get(self.at.due, {}):
            known = self.held.hashes[record]
            self.held.set_score(self.at.due, task, Moment() if "waits" in known else known["due"])
            return True
        entry = self.held.get(record, "entry")
        if state != b"queued" or entry is None or entry in self.pending or self._is_new(entry):
            return False
        payload = self.payload(task)
        self.ready.remove(entry)
        new = self.held.add(self.at.ready, (*payload.items(), (b"again", b"1")))
        self.held.put_new(record, "at", _time_of(entry))
        self.held.put(record, {"entry": new})
        self.held.drop(record, *_RUN, "returned")
        return True

    def _is_new(self, entry: bytes) -> bool:
        found = next((one for one, _ in self.ready.entries if one.known == entry), None)
        return found is not None and (not self.ready.grouped or found.order > self.ready.delivered.order)

    def trim(self, oldest: int) -> int:
        """Delete letters from before a time, and the records that belong to them."""
        letters = self.held.stream(self.at.dead)
        old = [(one, fields) for one, fields in letters.entries if one.known is not None and one.order < (oldest, 0)]
        for one, fields in old:
            self.discard(text_of(one), _plain(fields)[b"id"].decode())
        return len(old)

    def move_to_junk(self, key: str, items: Mapping[bytes, bytes]) -> int:
        """Move what another program wrote, with its content, from a key to the junk. The key keeps what else it has."""
        for item, content in items.items():
            fields = ((b"key", key.encode()), (b"item", item[:KEPT]), (b"content", content[:KEPT]))
            self.held.add(self.at.junk, (*fields, (b"bytes", b"%d" % len(item + content))), most=JUNK_ENTRIES)
        self.held.expire(round(JUNK_TTL * 1000), self.at.junk)
        return len(items)

    # -- workers that leave

    def leave(self, worker: str) -> None:
        for entry in [one for one, held in self.pending.items() if held.owner == worker]:
            if self._count_returned(entry):
                fence = b"%b %b %d" % (worker.encode(), entry, self.pending[entry].count)
                self.held.put(self.at.record(_task_of(self.ready.find(entry)) or ""), {"released": fence})
            self.nudge("released")
            self._give_back(entry)
        if any(held.owner == RELEASED for held in self.pending.values()):
            self.nudge("released")
        if self.held.strings.get(self.at.promote_lock) == worker.encode():
            self.held.delete(self.at.promote_lock)
            self.nudge("due")
        self._name_gone(worker)

    def forget(self, present: set[str]) -> None:
        """Remove consumers without a message, except for workers that are present."""
        for name in [*self.ready.names]:
            holds = any(held.owner == name for held in self.pending.values())
            if name not in present and not is_reserved(name) and not holds:
                self._name_gone(name)

    def _name_gone(self, worker: str) -> None:
        for key in (self.at.ready, self.at.nudge):
            self.held.stream(key).names[worker] = False

    # -- closing partitions

    def close(self, route: bytes) -> bytes:
        known = self.held.get(self.at.closed, "route")
        if known is not None:
            return known
        self.held.put(self.at.closed, {"route": route, "last": self.ready.last, "at": Moment()})
        self.nudge("route")
        return route

    def drained(self) -> int:
        last = self.held.get(self.at.closed, "last")
        if last is None:
            return -1
        if not self.ready.entries and not self.held.sets.get(self.at.due):
            return 2
        return int(not any(entry.order <= Id(last).order for entry, _ in self.ready.new()))

    def _register_retention(self, ms: int) -> None:
        """Register that records are kept for a time, rounded up to a quarter of a doubling."""
        kept = math.ceil(2 ** (math.ceil(4 * math.log2(ms)) / 4))
        key, known = self.at.retentions, dict(self.held.sets.get(self.at.retentions, {}))
        if int(float(text_of(known.get(str(kept), b"0")))) >= self.held.now:
            return
        expiries = {int(float(text_of(until))) + int(other) for other, until in known.items()}
        self.held.set_score(key, str(kept), Moment(plus=VALID))
        self.held.expire(VALID + kept, key)
        if max(expiries, default=0) > self.held.now + VALID + kept:
            self.held.deadlines[key] = Moment(known=b"%d" % max(expiries), loose=True)

    def retire(self) -> bool:
        if not self.held.exists(self.at.closed):
            return False
        waiting = self.held.sets.get(self.at.due) or self.held.sets.get(self.at.outbox)
        if self.ready.entries or self.held.stream(self.at.dead).entries or waiting:
            self.held.drop(self.at.closed, "empty")
            return False
        since = self.held.hashes[self.at.closed].setdefault("empty", Moment())
        just_now = isinstance(since, Later) and since.known is None
        empty = self.held.now if just_now else int(text_of(since))
        for kept, until in self.held.sets.get(self.at.retentions, {}).items():
            if min(int(float(text_of(until))), empty) + int(kept) > self.held.now:
                return False
        self.held.expire(HOUR, self.at.ready, self.at.nudge, self.at.dead, self.at.timeline)
        self.held.expire(7 * 24 * HOUR, self.at.closed)
        return True


def _task_of(fields: Fields | None) -> str | None:
    try:
        return str(orjson.loads(_plain(fields or ())[b"env"])["id"])
    except (LookupError, TypeError, orjson.JSONDecodeError):
        return None


def _wake_word(kind: str, value: str) -> str:
    return kind if kind in ("message", "time") else f"{kind}:{value}"


def _fence(delivery: Delivery) -> bytes:
    return b"%b %d" % (delivery.entry, delivery.count)


def _time_of(entry: bytes) -> bytes:
    return entry.partition(b"-")[0]


def _plain(fields: Fields) -> dict[bytes, bytes]:
    return {name: text_of(value) for name, value in fields}


def _payload(fields: Fields | None) -> dict[str, Value]:
    return {name.decode(): value for name, value in fields or () if name in (b"env", b"args")}


def _chunks_of(letter: Fields) -> list[str]:
    """Return the fields of a record with the chunks of the arguments of a dead letter."""
    plain = _plain(letter)
    args = plain.get(b"args") or plain.get(b"raw:args") or b"{}"
    stored = orjson.loads(args[1:]) if args.startswith(b"#") else {"chunks": 0}
    return [f"args:{stored['digest']}:{number}" for number in range(stored["chunks"])]


def _fields(**fields: str | int | bytes) -> Fields:
    return tuple(
        (name.encode(), value if isinstance(value, bytes) else str(value).encode()) for name, value in fields.items()
    )


def _message_again(letter: Fields, args: bytes | None) -> Fields:
    """Return the message that a replay makes of a dead letter."""
    message: list[tuple[bytes, Value]] = []
    for name, value in letter:
        plain = name.removeprefix(b"raw:")
        kept = plain != b"again" if name.startswith(b"raw:") else name in (b"env", b"args")
        if kept:
            message.append((plain, args if plain == b"args" and args is not None else value))
    return tuple(message)
