"""Key names: every key that Perdure has in Redis. No other module builds a key.

All keys of a task share the hash tag `{namespace:queue:partition}`, so that one script may use them on Redis Cluster as
on one server.

    key                           type    writer              lifetime
    {ns:queue:n}:ready            stream  producers, workers  as long as the queue; holds live messages only
    {ns:queue:n}:nudge            stream  scripts, workers    as long as the queue; at most 16 entries, hints only
    {ns:queue:n}:timeline         zset    producers, workers  tasks by time of enqueueing (ms); TTL of 30 days, renewed
    {ns:queue:n}:due              zset    producers, workers  while anything is scheduled (score: ms of Redis' clock);
                                                              and requests to cancel, see cancellation.py
    {ns:queue:n}:seen             string  workers             time of the last touch (ms), see seen.lua; TTL of an hour
    {ns:queue:n}:dead             stream  deadletter          while it has dead letters; trimmed past the retention
    {ns:queue:n}:closed           hash    resharding.py       from the closing of the partition; TTL once retired
    {ns:queue:n}:junk             stream  workers             items that another program wrote into keys of the
                                                              partition; at most 1,000; TTL of 30 days, renewed
    {ns:queue:n}:junk:NAME        any     all                 value of another type that another program had put under
                                                              the key {ns:queue:n}:NAME; TTL of 30 days
    {ns:queue:n}:mark             string  replication.py      write that replicas confirm; TTL of a minute
    {ns:queue:n}:retentions       zset    workers, operators  TTL until the last record that they cover has expired
    {ns:queue:n}:versions         zset    workers             tasks that wait for a newer version (score: its data
                                                              format); TTL of their longest wait
    {ns:queue:n}:versions:TASK    zset    workers             tasks of a name that wait for a version of its code
                                                              (the score); TTL of their longest wait
    {ns:queue:n}:paused           zset    workers             tasks that a pause of an operator holds (score: number of
                                                              its rule, see pauses.py); TTL of two hours, renewed
    {ns:queue:n}:waiting          zset    workers             tasks with open waits (score: ms of the first one)
    {ns:queue:n}:limited:KEYID    zset    producers, workers  tasks that wait for limits of one key, by their places
                                                              (microseconds of Redis' clock); of an ordered key also
                                                              those that were admitted, until they end
    {ns:queue:n}:turns:RING       zset    producers, workers  KEYIDs of a ring that have waiting tasks (score: ms of the
                                                              next look), and `~`, until when all of them wait
    {ns:queue:n}:rings            zset    producers, workers  rings that have waiting tasks (score: ms of the next look)
    {ns:queue:n}:kept             zset    workers             parked tasks that keep their tokens of limits (score: ms
                                                              of the next renewal)
    {ns:queue:n}:fired:SCHEDULE   string  workers             last planned time of the schedule (ms) whose task is
                                                              stored here; TTL of 30 days
    {ns:queue:n}:checked          string  workers             position of the last search for lost tasks in the
                                                              timeline; TTL of an hour
    {ns:queue:n}:outbox           zset    scripts, workers    tasks that have ended and whose watchers are not notified
                                                              yet (score: ms from which on to look); see joins.py
    {ns:queue:n}:joins            zset    workers             joins `PARENT:GROUP` (score: ms of the next look)
    {ns:queue:n}:join:PARENT:GROUP hash   workers             children of a call and their results; until the parent has
                                                              read them, or its attempt has ended
    {ns:queue:n}:open:PARENT:GROUP set    workers             children that were launched and have not ended; like its
                                                              join
    {ns:queue:n}:todo:PARENT:GROUP list   workers             messages of children that are not launched yet; like its
                                                              join
    {ns:queue:n}:lock:notices     string  workers             fleet lock for delivering notices; TTL of a few seconds
    {ns:queue:n}:lock:promote     string  workers             fleet lock for promoting; TTL of a few seconds
    {ns:queue:n}:lock:clean       string  workers             fleet lock for cleaning up; TTL of half a minute
    {ns:queue:n}:lock:sweep       string  workers             fleet lock for claiming; TTL of half a claim interval
    {ns:queue:n}:record:ID        hash    producers, workers  no TTL while the task is live, then the retention
    {ns:queue:n}:steps:ID         hash    workers             like its record
    {ns:queue:n}:log:ID           stream  workers             like its record
    {ns:queue:n}:inbox:ID         hash    senders, workers    like its record; see inbox.py
    {ns:queue:n}:control:ID       hash    operators           while the task is live: what operators ask of its run
    {ns:queue:n}:stream:ID:NAME   stream  workers             like its record: emitted items, see stream_items.py
    {ns:queue:n}:stream-keys:ID:NAME  zset  workers           like its record: digests of the keys of keyed items
                                                              (score: number of the item)
    {ns:queue:n}:upload:ID:DIGEST hash    producers, workers  TTL of ten minutes: chunks of large arguments; it becomes
                                                              the record of the task when that is stored
    {ns:~sessions:n}:session:ID   hash    producers, workers  until it is forgotten or idle for the retention
    {ns:~sessions:n}:history:ID   stream  producers, workers  like its session; PERDURE_SESSION_TURNS and some more
    {ns:~sessions:n}:timeline     zset    producers, workers  sessions by time of the last activity (ms)
    {ns:~sessions:n}:due          zset    producers, workers  sessions to look at (score: ms of Redis' clock)
    {ns:~sessions:n}:junk         stream  workers             like that of a queue
    {ns:~sessions:n}:junk:NAME    any     all                 like that of a queue
    {ns:~sessions:n}:forgotten    hash    workers, operators  while tasks of forgotten sessions are to be deleted
    {ns:~sessions:n}:session:forgotten  hash  workers, operators  time of the last removal; TTL of an hour
    {ns:~tokens:n}:token:DIGEST   string  workers             while the wait with this token is open; its time-out
                                                              and 30 days, or 400 days
    {ns:~unique:n}:unique:DIGEST  string  producers, workers  while a task of this unique key is live: until its end,
                                                              else 400 days after it is due; or for the window of
                                                              seconds, see unique.py
    {ns:~limits:0}:clock          string  workers             virtual clock of the limits, see lua/limits.lua
    {ns:~limits:0}:limits         zset    workers             names of limits by their last registration (ms); TTL of 30
                                                              days, renewed
    {ns:~limits:0}:limit:NAME     hash    workers             definition of a limit, its hold and its breaker; TTL of 30
                                                              days, renewed
    {ns:~limits:0}:control:limit:NAME  hash  operators        what operators have set in place of the definition, until
                                                              it is reset
    {ns:~limits:0}:control:limits stream  operators, workers  who has set what; about 1,000; TTL of a year, renewed
    {ns:~limits:0}:holders:NAME   zset    workers             tokens of a limit (score: virtual ms of their expiry)
    {ns:~limits:0}:holders:NAME:KEY  zset  workers            tokens of one key of the limit
    {ns:~limits:0}:waiters:NAME   zset    workers             what waits for a token (score: virtual ms); TTL of an hour
    {ns:~limits:0}:waiters:NAME:KEY  zset  workers            what waits for a token of the key; TTL of an hour
    {ns:~limits:0}:rate:NAME:KEY  string  workers             time at which the rate of the key is unused again; TTL
    {ns:~limits:0}:cost:NAME:KEY  string  workers             time at which its costs are paid; TTL
    {ns:~limits:0}:label:NAME:KEY string  workers             encrypted text of the key for people; TTL of a day
    {ns:~budgets:n}:ledger:ID     hash    workers, operators  what is spent of a budget; TTL of its window, else 400
                                                              days from the last charge, or like its task's record
    {ns:~budgets:n}:charged:ID    zset    workers             nonces of its charges (score: ms), at most 100,000;
                                                              TTL of an hour
    {ns:~budgets:n}:asks:ID       zset    workers             tasks that wait for the budget (score: ms); TTL of 15 min
    {ns:~budgets:n}:ledgers       zset    workers             ids of named ledgers (score: ms of the last charge);
                                                              TTL of 400 days, renewed
    {ns:~store:ID}:entries        hash    programs, workers   entries of a namespace of the key-value store; until they
                                                              are deleted or have expired
    {ns:~store:ID}:names          zset    programs, workers   their keys, sorted (score: 0); as long as they
    {ns:~store:ID}:expiries       zset    programs, workers   keys of entries that expire (score: ms); as long as they
    {ns:~store:ID}:fences         hash    workers             newest token of each task that uses the namespace, see
                                                              store.lua; TTL of seven days, renewed
    {ns:~store:ID}:users          zset    workers             these tasks (score: ms of the last use), at most 100,000;
                                                              TTL of seven days, renewed
    {ns:~store:ID}:batches        zset    programs, workers   ids of batches (score: version), at most 100,000; TTL of
                                                              an hour
    {ns:~store:ID}:acts           zset    workers             ids of batches of steps (score: version), at most 10,000;
                                                              TTL of seven days
    {ns:~store:ID}:upload:UPLOAD  hash    programs, workers   TTL of ten minutes: chunks of a large value
    {ns:~store:ID}:value:UPLOAD   hash    programs, workers   chunks of a large value; as long as its entry
    {ns}:stores                   zset    programs, workers   namespaces of the key-value store (score: 0), until a list
                                                              finds one empty
    {ns}:schedules                zset    workers, operators  names of schedules (score: ms of the next look)
    {ns}:schedule:NAME            hash    workers, operators  until it is removed, or no worker has published it for a
                                                              month; then an hour
    {ns}:lock:schedules           string  workers             fleet lock for firing schedules; TTL of a few seconds
    {ns}:lock:sessions            string  workers             fleet lock for looking at sessions; TTL of half a minute
    {ns}:junk                     stream  all                 like that of a queue
    {ns}:junk:NAME                any     all                 like that of a queue
    {ns}:queues                   hash    producers, workers  for ever: one field per queue (its route, route.py)
    {ns}:deployment               hash    producers, workers  for ever: id of the deployment, format of its keys,
                                                              and a change of all of them that is under way
    {ns}:registry:sharing:QUEUE   zset    workers             members of a queue; TTL of an hour (score: ms; < 0: left)
    {ns}:registry:workers         zset    workers             one member per registered worker (score: ms)
    {ns}:registry:worker:ID       hash    workers             TTL of an hour
    {ns}:registry:supervisors     zset    supervisors         TTL of a few registrations (score: ms of the last one)
    {ns}:registry:supervisor:ID   hash    supervisors         TTL of a few registrations
    {ns}:registry:catalog         zset    workers             TTL of 30 days: published apps (score: ms of the start)
    {ns}:registry:catalog:APP:VERSION  string  workers        TTL of 30 days: tasks of one version of an app, catalog.py
    {ns}:registry:crashes:NAME    zset    supervisors         TTL of the window; one member per crash (score: ms,
                                                              negative for crashes before a resumption)
    {ns}:workspace:NAME           hash    workers             files of a shared workspace; TTL, renewed by each write
    {ns}:registry:workspaces      zset    workers             shared workspaces by the end of their TTL (ms)
    {ns}:control:identity:AGENT   hash    operators           for ever: the identity of an agent, the last 100 versions
    {ns}:control:config           hash    operators           for ever: settings that all workers share
    {ns}:control:pauses           hash    operators           for ever: pauses of queues and tasks, pauses.py
    {ns}:control:jobs             zset    operators, workers  jobs by the time of their next look (ms), ended ones by
                                                              that of their end (< 0); TTL of 31 days, renewed
    {ns}:control:job:NAME         hash    operators, workers  a job over many tasks; TTL of 30 days from its last change
    {ns}:control:paused           zset    supervisors         TTL of 30 days (score: ms at which a pause is dropped)
    {ns}:control:pause:NAME       hash    supervisors         until it is lifted; TTL of 30 days

The kind of a key comes before the id in its name, so that a pattern such as `{ns:*}:record:*` selects the keys of one
kind in access rules and scans.

Channels of pub/sub:

    {ns:queue:n}:record:ID   the task has changed
    {ns:queue:n}:stream:ID:NAME  the task has emitted items; the message is the number of the last one
    {ns:~sessions:n}:session:ID   a turn of the session has ended or failed
    {ns:~limits:0}:waiters:NAME   a token of the limit is free; the message is the waiter whose turn it is
    {ns:~schedules}:changed  a schedule was added or changed
    {ns:~pauses}:changed     a queue or tasks were paused or resumed, or a worker is to be drained
    {ns:worker}:ID           a task that the worker runs is to be cancelled: it renews its leases, and reads the request
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from .lanes import Lane, lane_of

SNAPSHOT: Final = "#state"
"""Name under which the checkpoint of an agent has the snapshot of its state."""

DATA_FORMAT: Final = 2
"""Newest format of stored data that this version reads: key names, and what the keys hold. Since 2: large arguments."""

KEY_FORMAT: Final = 1
"""Format of the key names and of their meaning. A process that does not know it cannot use the namespace."""

GROUP = "workers"
"""The consumer group of every ready and nudge stream."""

RESERVED = "~"
"""First character of the consumers that are not workers."""

RELEASED = "~released"
"""Consumer of released messages."""

SUSPECTS = "~suspects"
"""Consumer of quarantined messages."""

JUNK_ENTRIES: Final = 1000
"""Most entries of the junk of a partition; the oldest make room."""

JUNK_TTL_MS: Final = 30 * 86_400_000
"""Milliseconds for which junk is kept: the list after its last entry, a value of another type from its move on."""

LEFT_TTL_MS: Final = 3_600_000
"""Milliseconds for which a late registration is refused: a kernel gives up unsent bytes after some 15 minutes."""

SESSION_PARTITIONS: Final = 16
"""Hash slots that the sessions of a namespace are spread over. Part of the data format."""

TOKEN_PARTITIONS: Final = 16
"""Hash slots that the tokens of open waits are spread over. Part of the data format."""

UNIQUE_PARTITIONS: Final = 16
"""Hash slots that the markers of unique keys are spread over. Part of the data format."""

BUDGET_PARTITIONS: Final = 16
"""Hash slots that the ledgers of budgets are spread over. Part of the data format."""

TaskKey = Literal["record", "steps", "log", "inbox", "control", "join", "stream", "stream-keys"]
"""A kind of key that each task may have: a join for each of several calls, a stream for each of several names."""

NAME_PATTERN: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
"""Pattern of a name that is valid in a key."""

_NAME = re.compile(NAME_PATTERN[1:-1])


def is_reserved(consumer: str) -> bool:
    """Return whether a consumer is not a worker, but a name for released or quarantined messages."""
    return consumer.startswith(RESERVED)


def is_name(name: str) -> bool:
    """Return whether a name is valid in a key."""
    return _NAME.fullmatch(name) is not None


def check_name(kind: str, name: object) -> str:
    """Return a name that is valid in a key. Raises `ValueError` with the rule for any other."""
    if not isinstance(name, str) or not is_name(name):
        raise ValueError(
            f"{kind} must be 1 to 64 letters, digits, '.', '_' or '-', and start with a letter or digit, got {name!r}"
        )
    return name


TENANT_MARK: Final = "~"
"""Character between a tenant and an id. No id of a caller may contain it."""

TENANT_PREFIX: Final = f"(?:{NAME_PATTERN[1:-1]}{TENANT_MARK})?"
"""Pattern of the tenant in front of an id, if it has one.

The tenant is part of the ids of its tasks and sessions, and of the owners of its memories: `acme~order-17`. So it is
part of their keys and of the associated data of their encryption, and what is derived from an id has the same tenant.
"""

_TENANT: Final = re.compile(f"({NAME_PATTERN[1:-1]}){TENANT_MARK}")


def check_tenant(tenant: object) -> str:
    """Return the name of a tenant. Raises `ValueError` with the rule for anything else."""
    return check_name("tenant", tenant)


def tenant_of(name: str) -> str | None:
    """Return the tenant of a task, session or owner by its id; None without one."""
    found = _TENANT.match(name) if TENANT_MARK in name else None
    return None if found is None else found[1]


def without_tenant(name: str) -> str:
    """Return an id without the tenant in front of it."""
    return name if (tenant := tenant_of(name)) is None else name[len(tenant) + 1 :]


def with_tenant(tenant: str | None, name: str) -> str:
    """Return the id of a tenant. One that is complete stays as it is.

    Raises `ValueError` for an id of another tenant.
    """
    if tenant is None:
        return name
    own = tenant_of(name)
    if own not in (None, tenant):
        raise ValueError(f"id must be of tenant {tenant!r}, got {name!r}")
    return name if own == tenant else f"{tenant}{TENANT_MARK}{name}"


def belongs_to(tenant: str | None, name: str) -> bool:
    """Return whether a caller of a tenant sees what has this id. A caller without a tenant sees everything."""
    return tenant is None or tenant_of(name) == tenant


def owner_of_tenant(tenant: str | None, name: str) -> str:
    """Return the owner of the memories of an agent of a tenant, whatever the name of the agent has."""
    return name if tenant is None else f"{tenant}{TENANT_MARK}{name}"


def common_tenant(what: str, *tenants: str | None) -> str | None:
    """Return the tenant that these name; None if none does. Raises `ValueError` if they name several."""
    named = dict.fromkeys(tenant for tenant in tenants if tenant is not None)
    if len(named) > 1:
        first, second, *_ = named
        raise ValueError(f"{what} must have one tenant, got {first!r} inside tenant {second!r}")
    return next(iter(named), None)


_TYPES: Final = {
    "string": (
        "seen",
        "mark",
        "checked",
        "lock:*",
        "token:*",
        "unique:*",
        "registry:catalog:*",
        "clock",
        *("rate:*", "cost:*", "label:*", "fired:*"),
    ),
    "hash": (
        *("closed", "record:*", "steps:*", "inbox:*", "control:*", "session:*", "forgotten", "queues", "deployment"),
        *("registry:worker:*", "registry:supervisor:*", "workspace:*", "control:identity:*", "control:config"),
        *("control:pause:*", "join:*", "limit:*", "control:limit:*", "schedule:*", "control:job:*", "ledger:*"),
        *("entries", "fences", "value:*"),
    ),
    "set": ("open:*",),
    "list": ("todo:*",),
    "stream": ("ready", "nudge", "dead", "junk", "log:*", "history:*", "stream:*", "control:limits"),
    "zset": (
        *("due", "timeline", "retentions", "versions", "versions:*", "registry:sharing:*", "registry:workers"),
        *("registry:supervisors", "registry:catalog", "registry:crashes:*", "registry:workspaces", "control:paused"),
        *("waiting", "outbox", "joins", "stream-keys:*", "holders:*", "waiters:*", "rings", "turns:*", "limited:*"),
        *("limits", "kept", "schedules", "paused", "control:jobs", "ledgers", "charged:*", "asks:*"),
        *("names", "expiries", "users", "batches", "acts", "stores"),
    ),
}
"""Keys of each type, without their hash tag; `*` stands for an id."""

_TYPE_OF: Final = {name: stored for stored, names in _TYPES.items() for name in names}
_KEY: Final = re.compile(r"(\{([^{}:]+)(:[^{}]+)?\}):(.+)", re.DOTALL)


def stored_type(key: str) -> str | None:
    """Return the type that a key has, in the words of TYPE. None for what has no fixed type: uploads, kept junk."""
    found = _KEY.fullmatch(key)
    if found is None:
        return None
    name = found[4]
    if name in _TYPE_OF:
        return _TYPE_OF[name]
    # An operator asks of a task under `control:ID`, and of the namespace under `control:pause:NAME`.
    prefixes = [name[: at + 1] + "*" for at, letter in enumerate(name) if letter == ":"]
    return next((_TYPE_OF[prefix] for prefix in reversed(prefixes) if prefix in _TYPE_OF), None)


class JunkKeys(NamedTuple):
    """Keys for a value of another type: `value` takes it, `entries` is the list of junk."""

    value: str
    entries: str


def junk_keys(key: str) -> JunkKeys:
    """Return where a value of another type is kept that another program had put under a key: in its hash slot."""
    tag, end, name = key.partition("}:")
    return JunkKeys(f"{tag}{end}junk:{name}", f"{tag}{end}junk")


_STREAMS: Final = ("ready", "nudge", "dead", "junk")
_OTHERS: Final = (
    *("due", "timeline", "seen", "closed", "mark", "retentions", "versions", "checked"),
    *("waiting", "outbox", "joins", "rings", "kept", "paused"),
)


@dataclass(frozen=True, slots=True)
class Partition:
    """One independent key group of a queue: one hash slot."""

    namespace: str
    queue: str
    index: int
    ready: str = field(init=False, compare=False, repr=False)
    nudge: str = field(init=False, compare=False, repr=False)
    due: str = field(init=False, compare=False, repr=False)
    timeline: str = field(init=False, compare=False, repr=False)
    seen: str = field(init=False, compare=False, repr=False)
    dead: str = field(init=False, compare=False, repr=False)
    closed: str = field(init=False, compare=False, repr=False)
    junk: str = field(init=False, compare=False, repr=False)
    mark: str = field(init=False, compare=False, repr=False)
    versions: str = field(init=False, compare=False, repr=False)
    retentions: str = field(init=False, compare=False, repr=False)
    checked: str = field(init=False, compare=False, repr=False)
    waiting: str = field(init=False, compare=False, repr=False)
    outbox: str = field(init=False, compare=False, repr=False)
    joins: str = field(init=False, compare=False, repr=False)
    rings: str = field(init=False, compare=False, repr=False)
    kept: str = field(init=False, compare=False, repr=False)
    paused: str = field(init=False, compare=False, repr=False)
    promote_lock: str = field(init=False, compare=False, repr=False)
    clean_lock: str = field(init=False, compare=False, repr=False)
    sweep_lock: str = field(init=False, compare=False, repr=False)
    notices_lock: str = field(init=False, compare=False, repr=False)
    _record: str = field(init=False, compare=False, repr=False)
    _steps: str = field(init=False, compare=False, repr=False)
    _log: str = field(init=False, compare=False, repr=False)
    _inbox: str = field(init=False, compare=False, repr=False)
    _control: str = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        tag = f"{{{self.namespace}:{self.queue}:{self.index}}}"
        for name in (*_STREAMS, *_OTHERS):
            object.__setattr__(self, name, f"{tag}:{name}")
        for name in ("promote", "clean", "sweep", "notices"):
            object.__setattr__(self, f"{name}_lock", f"{tag}:lock:{name}")
        for name in ("record", "steps", "log", "inbox", "control"):
            object.__setattr__(self, f"_{name}", f"{tag}:{name}:")

    def record(self, task_id: str) -> str:
        return self._record + task_id

    def steps(self, task_id: str) -> str:
        return self._steps + task_id

    def log(self, task_id: str) -> str:
        return self._log + task_id

    def inbox(self, task_id: str) -> str:
        return self._inbox + task_id

    def control(self, task_id: str) -> str:
        return self._control + task_id

    def stream(self, task_id: str, name: str) -> str:
        """Return the key of a stream of a task, which is also the channel of its readers."""
        return f"{{{self.namespace}:{self.queue}:{self.index}}}:stream:{task_id}:{name}"

    def stream_keys(self, task_id: str, name: str) -> str:
        """Return the key of the digests of a stream's keyed items."""
        return f"{{{self.namespace}:{self.queue}:{self.index}}}:stream-keys:{task_id}:{name}"

    def upload(self, task_id: str, content: str) -> str:
        return f"{{{self.namespace}:{self.queue}:{self.index}}}:upload:{task_id}:{content}"

    def fired(self, schedule: str) -> str:
        """Return the key of the last planned time of a schedule that was fired here."""
        return f"{{{self.namespace}:{self.queue}:{self.index}}}:fired:{schedule}"

    def limited(self, key_id: str) -> str:
        """Return the key of the tasks that wait for limits of one key, see `gate_of`."""
        return f"{{{self.namespace}:{self.queue}:{self.index}}}:limited:{key_id}"

    def turns(self, ring: str) -> str:
        """Return the key of the limit keys of one ring that have waiting tasks, see `gate_of`."""
        return f"{{{self.namespace}:{self.queue}:{self.index}}}:turns:{ring}"

    def join_keys(self, task_id: str, group: str) -> tuple[str, str, str]:
        """Return the keys of a join: its hash, the set of open children, the list of those that are not launched."""
        tag = f"{{{self.namespace}:{self.queue}:{self.index}}}"
        join, launched, waiting = (f"{tag}:{kind}:{task_id}:{group}" for kind in ("join", "open", "todo"))
        return join, launched, waiting

    def run_keys(self, task_id: str) -> tuple[str, ...]:
        """Return what a run of a task writes to: `ready`, record, steps, log, inbox, control."""
        return (
            self.ready,
            self._record + task_id,
            self._steps + task_id,
            self._log + task_id,
            self._inbox + task_id,
            self._control + task_id,
        )

    @property
    def lane(self) -> Lane:
        """The lane of the queue that the partition belongs to."""
        return lane_of(self.index)

    @property
    def shared_keys(self) -> tuple[str, ...]:
        """The keys of the partition that belong to no task."""
        names = (*_STREAMS, *_OTHERS, "promote_lock", "clean_lock", "sweep_lock", "notices_lock")
        return tuple(getattr(self, name) for name in names)

    def task_versions(self, task: str) -> str:
        return f"{self.versions}:{task}"

    def task_keys(self, kind: TaskKey) -> str:
        """Return the SCAN pattern of the keys of one kind of all tasks of this partition."""
        return f"{{{self.namespace}:{self.queue}:{self.index}}}:{kind}:*"


@dataclass(frozen=True, slots=True)
class SessionPartition:
    """One independent group of sessions: one hash slot. No queue has its name."""

    namespace: str
    index: int

    @property
    def _tag(self) -> str:
        return f"{{{self.namespace}:~sessions:{self.index}}}"

    @property
    def due(self) -> str:
        return f"{self._tag}:due"

    @property
    def timeline(self) -> str:
        return f"{self._tag}:timeline"

    @property
    def junk(self) -> str:
        return f"{self._tag}:junk"

    @property
    def forgotten(self) -> str:
        return f"{self._tag}:forgotten"

    @property
    def last_forgotten(self) -> str:
        """The key is one of those that producers may read: no session has this digest."""
        return f"{self._tag}:session:forgotten"

    @property
    def lane(self) -> Lane:
        """The lane of the queue that the partition belongs to."""
        return lane_of(self.index)

    @property
    def shared_keys(self) -> tuple[str, ...]:
        """The keys of the partition that belong to no session."""
        return (self.due, self.timeline, self.junk, self.forgotten, self.last_forgotten)

    def session(self, digest: str) -> str:
        return f"{self._tag}:session:{digest}"

    def history(self, digest: str) -> str:
        return f"{self._tag}:history:{digest}"


class Gate(NamedTuple):
    """Place where a task waits for its limits.

    key_id: the waiting list: the keys of its limits in the order of their names, `-NAME` for a limit without keys;
        with an ordered limit, `o` and that limit's key alone.
    ring: names of the limits that these keys take turns for.
    """

    key_id: str
    ring: str

    @property
    def ordered(self) -> bool:
        """Whether tasks of the key start one after the other, in the order in which they were enqueued."""
        return self.key_id.startswith("o")


def gate_of(limits: Sequence[tuple[str, str, float, str]]) -> Gate:
    """Return where a task waits for limits: name, key, cost and flags of each, as its envelope has them."""
    ordered = [use for use in limits if "o" in use[3]]
    uses = sorted((use[0], use[1]) for use in (ordered[:1] or limits))
    keys = ",".join(f"-{name}" if key == "-" else key for name, key in uses)
    return Gate(f"o{keys}" if ordered else keys, ",".join(name for name, _ in uses))


class TokenKey(NamedTuple):
    """Key of the token of an open wait, and the place as which its value is encrypted."""

    key: str
    place: Partition
    digest: str


class MarkerKey(NamedTuple):
    """Key of the marker of a unique key, and the place as which its value is encrypted."""

    key: str
    place: Partition
    digest: str


class LedgerKeys(NamedTuple):
    """Keys of the ledger of a budget, and the place as which its texts are encrypted.

    charged: nonces of its charges. waiting: tasks that wait for the budget. named: all named ledgers of the hash slot.
    """

    ledger: str
    charged: str
    waiting: str
    named: str
    place: Partition


class StoreKeys(NamedTuple):
    """Keys of a namespace of the key-value store, and the place as which its values are encrypted: one hash slot.

    entries, names, expiries: entries, their sorted keys, and those that expire. fences, users: newest token of each
    task, and the tasks by their last use. batches, acts: ids of batches, and those of steps.
    """

    entries: str
    names: str
    expiries: str
    fences: str
    users: str
    batches: str
    acts: str
    digest: str
    place: Partition

    def upload(self, upload: str) -> str:
        """Return the key of the chunks of a value that no entry has yet."""
        return f"{self.entries.removesuffix('entries')}upload:{upload}"

    def value(self, upload: str) -> str:
        """Return the key of the chunks of a large value."""
        return f"{self.entries.removesuffix('entries')}value:{upload}"


@dataclass(frozen=True, slots=True)
class LimitKeys:
    """Keys of all limits of a namespace: one hash slot, so that one script takes several. No queue has its name."""

    namespace: str

    @property
    def _tag(self) -> str:
        return f"{{{self.namespace}:~limits:0}}"

    @property
    def place(self) -> Partition:
        """The place as which the texts of keys are encrypted."""
        return Partition(self.namespace, "~limits", 0)

    @property
    def clock(self) -> str:
        """The virtual clock. Scripts derive the other keys from its tag."""
        return f"{self._tag}:clock"

    @property
    def names(self) -> str:
        return f"{self._tag}:limits"

    @property
    def audit(self) -> str:
        return f"{self._tag}:control:limits"

    def limit(self, name: str) -> str:
        return f"{self._tag}:limit:{check_name('limit', name)}"

    def control(self, name: str) -> str:
        return f"{self._tag}:control:limit:{check_name('limit', name)}"

    def holders(self, name: str, key: str = "-") -> str:
        """Return the set of all holders of a limit, or of one key."""
        return f"{self._tag}:holders:{name}" + ("" if key == "-" else f":{key}")

    def waiters(self, name: str, key: str = "-") -> str:
        """Return the set of those that wait for the limit's total, which is also a channel, or for one key."""
        return f"{self._tag}:waiters:{name}" + ("" if key == "-" else f":{key}")

    def rate(self, name: str, key: str = "-") -> str:
        return f"{self._tag}:rate:{name}:{key}"

    def cost(self, name: str, key: str = "-") -> str:
        return f"{self._tag}:cost:{name}:{key}"

    def label(self, name: str, key: str) -> str:
        return f"{self._tag}:label:{name}:{key}"

    def of_uses(self, uses: Iterable[tuple[str, str]]) -> Iterator[str]:
        """Yield the keys that scripts make for limits and keys."""
        yield self.names
        for name, key in dict.fromkeys(uses):
            yield from (self.limit(name), self.control(name), self.holders(name), self.waiters(name))
            yield from (self.holders(name, key), self.waiters(name, key), self.rate(name, key), self.cost(name, key))


@dataclass(frozen=True, slots=True)
class Namespace:
    """Keys of one deployment. Two namespaces on one Redis share no key.

    tenant: whose tasks and sessions a caller sees and makes; None for all, see `TENANT_PREFIX`.
    """

    name: str = "perdure"
    tenant: str | None = None

    def __post_init__(self) -> None:
        check_name("namespace", self.name)
        if self.tenant is not None:
            check_name("tenant", self.tenant)

    def partition(self, queue: str, index: int = 0) -> Partition:
        return Partition(self.name, check_name("queue", queue), index)

    @property
    def shared_keys(self) -> tuple[str, ...]:
        """The keys of the namespace that are not of one worker, queue or app."""
        registries = (self.workers, self.supervisors, self.catalog, self.workspaces)
        own = (
            self.queues,
            self.deployment,
            self.config,
            self.paused,
            self.pauses,
            self.schedules,
            self.jobs,
            self.stores,
        )
        return (*own, self.session_lock, self.schedule_lock, *registries)

    @property
    def session_partitions(self) -> list[SessionPartition]:
        return [SessionPartition(self.name, index) for index in range(SESSION_PARTITIONS)]

    def token(self, token: str) -> TokenKey:
        """Return the key of the token of a wait, of this tenant. No queue has the name of its place."""
        named = token if self.tenant is None else f"{self.tenant}\0{token}"
        digest = hashlib.blake2b(named.encode(), digest_size=16).hexdigest()
        place = Partition(self.name, "~tokens", int(digest[:8], 16) % TOKEN_PARTITIONS)
        return TokenKey(f"{{{self.name}:{place.queue}:{place.index}}}:token:{digest}", place, digest)

    def unique(self, digest: str) -> MarkerKey:
        """Return the key of a unique key's marker, by its digest. No queue has the name of its place."""
        place = Partition(self.name, "~unique", int(digest[:8], 16) % UNIQUE_PARTITIONS)
        return MarkerKey(f"{{{self.name}:{place.queue}:{place.index}}}:unique:{digest}", place, digest)

    def ledger(self, ledger: str) -> LedgerKeys:
        """Return the keys of the ledger of a budget. No queue has the name of its place."""
        digest = hashlib.blake2b(ledger.encode(), digest_size=4).hexdigest()
        place = Partition(self.name, "~budgets", int(digest, 16) % BUDGET_PARTITIONS)
        tag, index = f"{{{self.name}:{place.queue}:{place.index}}}", self.ledger_index(place.index)
        return LedgerKeys(f"{tag}:ledger:{ledger}", f"{tag}:charged:{ledger}", f"{tag}:asks:{ledger}", index, place)

    def ledger_index(self, index: int) -> str:
        """Return the key of the ids of named ledgers in one hash slot."""
        return f"{{{self.name}:~budgets:{index}}}:ledgers"

    def store(self, parts: Sequence[str]) -> StoreKeys:
        """Return the keys of a namespace of the key-value store. No queue has the name of its place."""
        digest = hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()
        tag = f"{{{self.name}:~store:{digest}}}"
        return StoreKeys(
            f"{tag}:entries",
            f"{tag}:names",
            f"{tag}:expiries",
            f"{tag}:fences",
            f"{tag}:users",
            f"{tag}:batches",
            f"{tag}:acts",
            digest,
            Partition(self.name, "~store", 0),
        )

    @property
    def stores(self) -> str:
        return f"{{{self.name}}}:stores"

    @property
    def limits(self) -> LimitKeys:
        return LimitKeys(self.name)

    @property
    def junk(self) -> str:
        return f"{{{self.name}}}:junk"

    @property
    def schedules(self) -> str:
        return f"{{{self.name}}}:schedules"

    def schedule(self, name: str) -> str:
        return f"{{{self.name}}}:schedule:{name}"

    @property
    def schedule_lock(self) -> str:
        return f"{{{self.name}}}:lock:schedules"

    @property
    def schedule_channel(self) -> str:
        return f"{{{self.name}:~schedules}}:changed"

    @property
    def schedule_place(self) -> Partition:
        """The place as which the tasks of schedules are encrypted. No queue has its name."""
        return Partition(self.name, "~schedules", 0)

    @property
    def pauses(self) -> str:
        return f"{{{self.name}}}:control:pauses"

    @property
    def pause_channel(self) -> str:
        return f"{{{self.name}:~pauses}}:changed"

    @property
    def pause_place(self) -> Partition:
        """The place as which pauses are encrypted. No queue has its name."""
        return Partition(self.name, "~pauses", 0)

    @property
    def jobs(self) -> str:
        return f"{{{self.name}}}:control:jobs"

    def job(self, name: str) -> str:
        return f"{{{self.name}}}:control:job:{check_name('job', name)}"

    @property
    def job_place(self) -> Partition:
        """The place as which the filters of jobs are encrypted. No queue has its name."""
        return Partition(self.name, "~jobs", 0)

    @property
    def session_lock(self) -> str:
        return f"{{{self.name}}}:lock:sessions"

    @property
    def queues(self) -> str:
        return f"{{{self.name}}}:queues"

    @property
    def config(self) -> str:
        return f"{{{self.name}}}:control:config"

    @property
    def deployment(self) -> str:
        return f"{{{self.name}}}:deployment"

    def task_keys(self, kind: TaskKey, queue: str | None = None) -> str:
        """Return the SCAN pattern of the keys of one kind of all tasks of one queue, or of all queues."""
        return f"{{{self.name}:{queue or '*'}:*}}:{kind}:*"

    def sharing(self, queue: str) -> str:
        return f"{{{self.name}}}:registry:sharing:{queue}"

    @property
    def workers(self) -> str:
        return f"{{{self.name}}}:registry:workers"

    def worker(self, worker_id: str) -> str:
        return f"{{{self.name}}}:registry:worker:{worker_id}"

    def worker_channel(self, worker_id: str) -> str:
        return f"{{{self.name}:worker}}:{worker_id}"

    @property
    def supervisors(self) -> str:
        return f"{{{self.name}}}:registry:supervisors"

    def supervisor(self, supervisor_id: str) -> str:
        return f"{{{self.name}}}:registry:supervisor:{supervisor_id}"

    @property
    def catalog(self) -> str:
        return f"{{{self.name}}}:registry:catalog"

    def catalog_entry(self, app: str, version: str) -> str:
        return f"{{{self.name}}}:registry:catalog:{app}:{version}"

    def workspace(self, name: str) -> str:
        return f"{{{self.name}}}:workspace:{check_name('workspace', name)}"

    @property
    def workspaces(self) -> str:
        return f"{{{self.name}}}:registry:workspaces"

    def identity(self, agent: str) -> str:
        return f"{{{self.name}}}:control:identity:{agent}"

    def crashes(self, supervisor: str) -> str:
        return f"{{{self.name}}}:registry:crashes:{supervisor}"

    @property
    def paused(self) -> str:
        return f"{{{self.name}}}:control:paused"

    def pause(self, supervisor: str) -> str:
        return f"{{{self.name}}}:control:pause:{supervisor}"
