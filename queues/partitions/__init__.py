"""Partitions of a queue: independent key groups, each in one hash slot.

| module | what it holds |
|---|---|
| `route` | the route of a queue: its generations of partitions, and the hash of a key; no Redis |
| `resharding` | the route in Redis; a change of the number of partitions while the queue is used |
| `router` | producer side: the partition of the next task |
| `assignment` | worker side: the partitions that this worker reads and serves |

Before a change: tasks of one key are started in the order of their enqueues, across resharding, too. Producers write
into the oldest generation that is not closed; workers read from the oldest one that is not drained. Index numbers are
never used again. tests/conformance/test_resharding.py checks that with workers and producers that know different
routes.
"""
