"""The prose of the benchmark page. `OLDER_TREE` and `INEQUALITIES` describe the stored run, the rest holds for any."""

from __future__ import annotations

from collections.abc import Sequence

from .results import Data

__all__ = ["GUARANTEES", "HOW_TO_READ", "INEQUALITIES", "LIMITS", "OLDER_TREE", "SECTIONS", "TITLE", "facts"]

TITLE = """# Benchmarks

`make bench-peers` writes this page. Change `benchmarks/peers` instead of editing it.
"""

OLDER_TREE = """**These figures are of an older tree**, whose revision is below; commits since then have changed
Perdure's speed. The performance section of the [README](../../README.md#performance) has a newer run, of fewer
benchmarks, with each project at its best documented setting.
"""

INEQUALITIES = """The setups of this run are not equal in these points, mostly in favour of Perdure. A later
run will remove them:

- **arq and docket** ran with their default idle timers (0.5 s and 0.1 s). With short timers they reach 2,201
  and 1,654 no-op tasks/s, so Perdure is about 11 and 14 times as fast, not 72 and 73. The echo benchmark is
  affected in the same way.
- **Celery** ran one process with 32 threads.
- **LangGraph** takes one lock around each operation of a checkpointer, so its concurrent callers wait for
  each other.
- **uvloop** was installed for some setups only; see the versions at the end.
"""


def facts(data: Data) -> str:
    """Return when, where and how the run was made, as a list."""
    machine = data["machine"]
    settings = ", ".join(f"{name} {value}" for name, value in data.get("postgres_settings", {}).items())
    size = data["amounts"]
    command = " ".join(["python -m benchmarks.peers", *data["command"]])
    computer = f"{machine['cores']} cores, {machine['processor']}, {machine['memory_gb']:g} GB, {machine['system']}"
    found = [
        f"Measured {data['made']} at revision `{data['revision']}` in {data['seconds'] / 60:.0f} minutes",
        f"Command: `{command}`",
        f"{size['rounds']} rounds, {size['recoveries']} for recovery; data: [results.json](benchmarks/results.json)",
        f"{computer}; load {machine['load_before']:g} before the run",
        f"Python {machine['python']}, Redis {machine['redis']}, Postgres {machine['postgres']}"
        + (f" ({settings})" if settings else ""),
    ]
    if data["note"]:
        found.append(data["note"])
    warning = "**A quick run: it only checks that everything runs. Ignore its figures.**\n\n" if data["quick"] else ""
    return warning + "\n".join(f"- {fact}" for fact in found) + "\n"


HOW_TO_READ = """Every figure is the median of several rounds, with the lowest and highest round in brackets. Rounds are
interleaved: each setup once, then each setup again. Compare ratios within one run: the column "Perdure is"
says how many times as fast Perdure is as that setup, or how many times sooner. Below 1 the other setup is
better.

All queue setups use a private redis-server on loopback TCP, restarted for each figure and without
persistence; the same number of tasks; one worker process with the same concurrency; results stored and read
back with the setup's own client. Each is started as its documentation describes, with JSON if it offers it,
and without a log line per task. Handlers write start and end times to a memory-mapped file, which costs the
same for all of them.
"""

_QUEUES = """One worker process each. RQ runs one job at a time, whatever the concurrency.
"""

_STEPS = """Ten steps per task, each recorded before the next one runs. DBOS and LangGraph run in the calling process.
Perdure's task passes through a queue to a worker process, and its result returns by push. Setups that fsync
are compared with Perdure on a Redis that fsyncs too.
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
