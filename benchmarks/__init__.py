"""Benchmarks of Perdure beside a raw client on the same server: `make bench`.

| module or package | measures |
|---|---|
| `__main__` | the table: throughput, latency, memory, recovery (`measures/`, each beside `raw/`) |
| `parts` | CPU time of a task and a step, part by part |
| `recovery`, `recovery_many` | time until tasks run again after a killed worker, a lost host, a deploy |
| `resume` | cost of resuming a task with a long history |
| `waking` | latency of a message to one of many parked tasks, and memory of a parked task |
| `streams` | latency of items from handlers to readers, and many readers |
| `limits` | turns of tenants, the cost of a limit, time from a release to the next start |
| `scale` | cost of tasks and idle workers for Redis |
| `peers` | Perdure compared with other projects |

`support` has the servers and processes that they share, `targets` the figures that Perdure has to reach.
"""
