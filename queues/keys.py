"""Every key Perdure has in Redis. No other module puts a key together.

All keys of a task share the hash tag `{namespace:queue:partition}`, so one script may touch them on Redis Cluster
as on one server.

    key                           type    owner               lives
    {ns:queue:n}:ready            stream  producers, workers  as long as the queue; holds live messages only
    {ns:queue:n}:nudge            stream  scripts, workers    as long as the queue; at most 16 entries, hints only
    {ns:queue:n}:due              zset    producers, workers  while anything is scheduled (score: ms of Redis' clock)
    {ns:queue:n}:dead             stream  deadletter          while it holds dead letters; trimmed past retention
    {ns:queue:n}:watch            string  workers             TTL of a few seconds: who promotes what is due
    {ns:queue:n}:cleaning         string  workers             TTL of half a minute: who cleaned up last
    {ns:queue:n}:closed           hash    rerouting           from when the queue left the partition; TTL once retired
    {ns:queue:n}:sweep            string  workers             TTL of half a sweep's interval
    {ns:queue:n}:mark             string  replication         TTL of a minute: what a replica is asked for
    {ns:queue:n}:task:ID          hash    all scripts         no TTL while the task is live, retention afterwards;
                                                              its inbox is in it: fields m:1 ..., see inbox.py
    {ns:queue:n}:task:ID:steps    hash    write_checkpoint.lua          like its task
    {ns:queue:n}:task:ID:log      stream  scripts             like its task
    {ns}:queues                   hash    producers, workers  for ever: one field per queue (its route, routes.py)
    {ns}:deployment               hash    deployment.py       for ever: the deployment's id
    {ns}:sharing:QUEUE            zset    workers             TTL of a few refreshes (score: ms), one member per sharer
    {ns}:workers                  zset    workers             one member per worker that beat lately (score: ms)
    {ns}:worker:ID                hash    workers             TTL of six announcements; a string (JSON) of older workers
    {ns}:supervisors              zset    supervisors         TTL of a few announcements (score: ms of the last one)
    {ns}:supervisor:ID            hash    supervisors         TTL of a few announcements
    {ns}:crashes:NAME             zset    supervisors         TTL of the window; one member per crash (score: ms)
    {ns}:paused                   zset    supervisors         TTL of 30 days (score: ms at which a pause is forgotten)
    {ns}:pause:NAME               hash    supervisors         until it is lifted; TTL of 30 days

A task's record key is also the name of the channel on which its news is published.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

__all__ = ["GROUP", "NOBODY", "RELEASED", "SUSPECTS", "Namespace", "Partition", "check_name", "is_nobody"]

GROUP = "workers"
"""The one consumer group of every ready and nudge stream."""

NOBODY = "~"
"""First character of consumers that are no workers, but names for what waits to be taken up again."""

RELEASED = "~released"
"""The consumer that holds what was given back."""

SUSPECTS = "~suspects"
"""The consumer that holds what a worker died with, for one who runs it alone."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def is_nobody(consumer: str) -> bool:
    """Whether a consumer is no worker, but a name for what waits to be taken up again."""
    return consumer.startswith(NOBODY)


def check_name(kind: str, name: str) -> str:
    """Return `name` where it can stand in a key; `ValueError` with the rule where it cannot."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{kind} {name!r} cannot stand in a key: use 1 to 64 letters, digits, '.', '_' or '-', "
            "beginning with a letter or digit"
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
        """Pattern of every record, step hash and log of this partition, for SCAN."""
        return self._task.replace("[", "\\[") + "*"


@dataclass(frozen=True, slots=True)
class Namespace:
    """All of one deployment's keys. Two namespaces on one Redis never see each other."""

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
        """Pattern of the records, step hashes and logs of one queue, or of all, for SCAN."""
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
