"""Key names: every key that Perdure has in Redis. No other module builds a key.

All keys of a task share the hash tag `{namespace:queue:partition}`, so that one script may use them on Redis Cluster as
on one server.

    key                           type    writer              lifetime
    {ns:queue:n}:ready            stream  producers, workers  as long as the queue; holds live messages only
    {ns:queue:n}:nudge            stream  scripts, workers    as long as the queue; at most 16 entries, hints only
    {ns:queue:n}:due              zset    producers, workers  while anything is scheduled (score: ms of Redis' clock)
    {ns:queue:n}:dead             stream  deadletter          while it has dead letters; trimmed past the retention
    {ns:queue:n}:watch            string  workers             fleet lock for promoting; TTL of a few seconds
    {ns:queue:n}:cleaning         string  workers             fleet lock for cleaning up; TTL of half a minute
    {ns:queue:n}:sweep            string  workers             fleet lock for claiming; TTL of half a claim interval
    {ns:queue:n}:closed           hash    resharding.py       from the closing of the partition; TTL once retired
    {ns:queue:n}:mark             string  replication.py      write that replicas confirm; TTL of a minute
    {ns:queue:n}:task:ID          hash    all scripts         no TTL while the task is live, then the retention;
                                                              holds the inbox: fields m:1 ..., see inbox.py
    {ns:queue:n}:task:ID:steps    hash    write_checkpoint    like its task
    {ns:queue:n}:task:ID:log      stream  scripts             like its task
    {ns}:queues                   hash    producers, workers  for ever: one field per queue (its route, route.py)
    {ns}:deployment               hash    presence.py         for ever: the id of the deployment
    {ns}:sharing:QUEUE            zset    workers             members of a queue; TTL of a few refreshes (score: ms)
    {ns}:workers                  zset    workers             one member per registered worker (score: ms)
    {ns}:worker:ID                hash    workers             TTL of six registrations; a string (JSON) of old workers
    {ns}:supervisors              zset    supervisors         TTL of a few registrations (score: ms of the last one)
    {ns}:supervisor:ID            hash    supervisors         TTL of a few registrations
    {ns}:crashes:NAME             zset    supervisors         TTL of the window; one member per crash (score: ms)
    {ns}:paused                   zset    supervisors         TTL of 30 days (score: ms at which a pause is dropped)
    {ns}:pause:NAME               hash    supervisors         until it is lifted; TTL of 30 days

The record key of a task is also the channel of its notifications.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

__all__ = ["GROUP", "RELEASED", "RESERVED", "SUSPECTS", "Namespace", "Partition", "check_name", "is_reserved"]

GROUP = "workers"
"""The consumer group of every ready and nudge stream."""

RESERVED = "~"
"""First character of the consumers that are not workers."""

RELEASED = "~released"
"""Consumer of released messages."""

SUSPECTS = "~suspects"
"""Consumer of quarantined messages."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def is_reserved(consumer: str) -> bool:
    """Return whether a consumer is not a worker, but a name for released or quarantined messages."""
    return consumer.startswith(RESERVED)


def check_name(kind: str, name: str) -> str:
    """Return a name that is valid in a key. Raises `ValueError` with the rule for any other."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{kind} must be 1 to 64 letters, digits, '.', '_' or '-', and start with a letter or digit, got {name!r}"
        )
    return name


@dataclass(frozen=True, slots=True)
class Partition:
    """One independent key group of a queue: one hash slot."""

    namespace: str
    queue: str
    index: int
    ready: str = field(init=False, compare=False, repr=False)
    nudge: str = field(init=False, compare=False, repr=False)
    due: str = field(init=False, compare=False, repr=False)
    dead: str = field(init=False, compare=False, repr=False)
    watch: str = field(init=False, compare=False, repr=False)
    cleaning: str = field(init=False, compare=False, repr=False)
    closed: str = field(init=False, compare=False, repr=False)
    sweep: str = field(init=False, compare=False, repr=False)
    mark: str = field(init=False, compare=False, repr=False)
    _task: str = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        tag = f"{{{self.namespace}:{self.queue}:{self.index}}}"
        for name in ("ready", "nudge", "due", "dead", "watch", "cleaning", "closed", "sweep", "mark"):
            object.__setattr__(self, name, f"{tag}:{name}")
        object.__setattr__(self, "_task", f"{tag}:task:")

    def record(self, task_id: str) -> str:
        return self._task + task_id

    def steps(self, task_id: str) -> str:
        return f"{self._task}{task_id}:steps"

    def log(self, task_id: str) -> str:
        return f"{self._task}{task_id}:log"

    @property
    def records(self) -> str:
        """SCAN pattern of all records, step hashes and logs of this partition."""
        return self._task.replace("[", "\\[") + "*"


@dataclass(frozen=True, slots=True)
class Namespace:
    """Keys of one deployment. Two namespaces on one Redis share no key."""

    name: str = "perdure"

    def __post_init__(self) -> None:
        check_name("namespace", self.name)

    def partition(self, queue: str, index: int = 0) -> Partition:
        return Partition(self.name, check_name("queue", queue), index)

    @property
    def queues(self) -> str:
        return f"{{{self.name}}}:queues"

    @property
    def deployment(self) -> str:
        return f"{{{self.name}}}:deployment"

    def records(self, queue: str | None = None) -> str:
        """Return the SCAN pattern of the records, step hashes and logs of one queue, or of all queues."""
        return f"{{{self.name}:{queue or '*'}:*}}:task:*"

    def sharing(self, queue: str) -> str:
        return f"{{{self.name}}}:sharing:{queue}"

    @property
    def workers(self) -> str:
        return f"{{{self.name}}}:workers"

    def worker(self, worker_id: str) -> str:
        return f"{{{self.name}}}:worker:{worker_id}"

    @property
    def supervisors(self) -> str:
        return f"{{{self.name}}}:supervisors"

    def supervisor(self, supervisor_id: str) -> str:
        return f"{{{self.name}}}:supervisor:{supervisor_id}"

    def crashes(self, supervisor: str) -> str:
        return f"{{{self.name}}}:crashes:{supervisor}"

    @property
    def paused(self) -> str:
        return f"{{{self.name}}}:paused"

    def pause(self, supervisor: str) -> str:
        return f"{{{self.name}}}:pause:{supervisor}"
