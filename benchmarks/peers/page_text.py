"""The prose of the benchmark page."""

from __future__ import annotations

from collections.abc import Sequence

from .results import Data

__all__ = ["GUARANTEES", "HOW_TO_READ", "INEQUALITIES", "LIMITS", "SECTIONS", "SWEEP", "TITLE", "conditions"]

TITLE = """# Benchmarks

`make bench-peers` writes this page. Change `benchmarks/peers` instead of editing it.
"""

INEQUALITIES = """The setups are not equal in these points:

- **Processes.** Perdure, like each of the others, runs one process of tasks on two cores. Celery's default are
  processes instead of threads, so its best setting may have two.
- **Concurrency.** It is 32, unless the name of a setting says otherwise: projects that run threads may be faster with
  fewer of them.
- **Supervision.** `perdure worker run` is a supervisor, a worker and a spare process, which starts during the first
  second of a round. arq, docket, SAQ, streaq and procrastinate run one process without a supervisor.
- **Disk.** PgQueuer, procrastinate, DBOS, LangGraph and Absurd write each transition to disk. They are compared with
  Perdure on a Redis that does the same.
- **LangGraph** takes one lock around each operation of a checkpointer, so its concurrent callers wait for each other.
"""

SWEEP = """Before the run, settings that a project's documentation or its command line offers for speed ran one short
round each: of no-op tasks, or of durable steps of 32 tasks. uvloop is one of them where the project does not use it by
itself. The fastest setting is measured beside the defaults, and all ratios on this page are to the better of the two.
A short round is less exact than the figures above: what matters is the order.
"""


def conditions(line: Data) -> list[str]:
    """Return when, where and how a line was measured."""
    run = line["run"]
    found = [run["origin"], ""]
    if run["quick"]:
        found = ["**A quick run: it only checks that everything runs. Ignore its figures.**", "", *found]
    settings = ", ".join(f"{name} {value}" for name, value in run["postgres"].items())
    rounds = run["recoveries"] if line["key"].startswith("recovery") else run["rounds"]
    notes = [f"Rounds: {rounds}.{f' Postgres: {settings}.' if settings else ''}", run["note"]]
    return [*found, *(part for note in notes if note for part in (note, ""))]


HOW_TO_READ = """Every figure is the median of the rounds, with the lowest and highest round in brackets. Rounds are
interleaved: each setup once, then each setup again. A round of tasks lasts as long for each setup. Compare
ratios within one run: the column "Perdure is" says how many times as fast Perdure is as that project at the
better of its settings, or how many times sooner. Below 1 the other project is better.

All queue setups on Redis use a private redis-server on loopback TCP, restarted for each figure and without
persistence; those on Postgres a private server with its defaults. Each has one worker, is started as its
documentation describes, with JSON if it offers it, and without a log line per task; results are read back
with the setup's own client, if it keeps them. Clients that are coroutines run on uvloop. Handlers write start
and end times to a memory-mapped file, which costs the same for all of them.
"""

_QUEUES = """RQ runs one job at a time, whatever the concurrency.
"""

_STEPS = """Ten steps per task, each recorded before the next one runs. DBOS and LangGraph run in the calling process.
A task of Perdure or Absurd passes through a queue to a worker process; its result returns by push, that of Absurd by
polls of the caller. Setups that fsync are compared with Perdure on a Redis that fsyncs too.
"""

_RECOVERY = """Time without progress after a worker dies. One no-op task is enqueued every quarter of a second
meanwhile, because some peers look for lost tasks only when new ones arrive. In taskiq, arq and SAQ the timeout counts
from the start of the task and is not renewed, so it has to exceed the longest task; in this benchmark it therefore
ends sooner after the kill.
"""

SECTIONS: Sequence[tuple[str, Sequence[str], Sequence[str], str]] = (
    ("Queues", ("noop", "enqueue", "bulk", "echo", "nap", "spread"), ("acknowledged", "delivery"), _QUEUES),
    ("Durable steps", ("steps", "steps_shared"), ("acknowledged", "on_disk"), _STEPS),
    ("Recovery", ("recovery", "recovery_set"), ("delivery", "recovery"), _RECOVERY),
)
"""Title, lines, columns of guarantees beside the figures, and introduction of each section."""

GUARANTEES = """What each setup does before a task counts as done, and what finds the task of a dead worker. The
last column is the default timeout, read from the setup's own code.
"""

LIMITS = """- Other machines: with more cores, worker, server and client stop competing, and the ratios change.
- Several workers, networks between machines, or a shared Redis.
- Applications: no-op tasks measure the overhead of a queue, and a handler of 100 ms hides all of it.
- Features: setups that acknowledge early do less, setups that write to disk do more. The tables say which is
  which.
- Blocking or computing handlers: dramatiq, Celery and RQ run threads or processes, which suits them better.
- Tuned servers: Postgres and SQLite ran with their defaults; both, and Redis, can be tuned.
"""
