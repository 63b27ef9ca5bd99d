"""What the page says besides its tables: true of any run, whatever its figures are."""

from __future__ import annotations

from collections.abc import Sequence

from .results import Data

__all__ = ["AT_REST", "HOW_TO_READ", "NOT_SAID", "SECTIONS", "head"]


def head(data: Data) -> str:
    """Title, and when and where the figures were made."""
    machine = data["machine"]
    settings = ", ".join(f"{name} {value}" for name, value in data.get("postgres_settings", {}).items())
    size = data["amounts"]
    command = " ".join(["python -m benchmarks.peers", *data["command"]])
    raw = "[results.json](benchmarks/results.json)"
    computer = f"{machine['cores']} cores, {machine['processor']}, {machine['memory_gb']:g} GB, {machine['system']}"
    facts = [
        f"Made {data['made']} at revision `{data['revision']}` in {data['seconds'] / 60:.0f} minutes by `{command}`",
        f"Rounds: {size['rounds']}, of recoveries {size['recoveries']}; the raw data: {raw}",
        f"{computer}; load {machine['load_before']:g} before",
        f"Python {machine['python']}, Redis {machine['redis']}, Postgres {machine['postgres']}"
        + (f" ({settings})" if settings else ""),
    ]
    if data["note"]:
        facts.append(data["note"])
    warning = "**A quick run: it shows that everything runs; its figures say nothing.**\n\n" if data["quick"] else ""
    listed = "\n".join(f"- {fact}" for fact in facts)
    return f"# Benchmarks\n\nWritten by `make bench-peers`; not by hand.\n\n{warning}{listed}\n"


HOW_TO_READ = """Every figure is a median over rounds, with the lowest and the highest round in brackets. The rounds are
interleaved (each peer once, then each peer again), so that whatever else the machine does meets all alike. What counts
is the ratio within one run, in the column "Perdure is": how many times as fast Perdure is as that peer, or how many
times as soon. Where it is below 1, the peer is the better one.

All peers have the same server, a private redis-server on loopback TCP that is started anew for each figure and keeps
nothing on disk; the same number of tasks; one worker process with the same concurrency; results kept and read back by
their own clients. Each is started as its own documentation tells, with JSON where that is a choice, and with the log
line per task off in all. Handlers write the time of their beginning and end into a file in shared memory, which costs
the same for all of them.
"""

_QUEUES = """One worker process each. RQ runs one job at a time whatever the concurrency.
"""

_STEPS = """Ten steps per task, each recorded before the next one runs. DBOS and LangGraph run in the process that calls
them; Perdure's task goes through a queue to a worker process, and its result comes back by push. What is kept on disk
differs: each peer that fsyncs is compared with Perdure on a Redis that does so too.
"""

_RECOVERY = """How long work lies still when its worker dies. One no-op task is enqueued every quarter of a second
meanwhile, since some peers look for lost tasks only when others come. With taskiq, arq and SAQ the timeout counts from
the task's beginning and is not renewed, so it has to be longer than the longest task; here, that lets it end sooner
after the kill.
"""

SECTIONS: Sequence[tuple[str, Sequence[str], Sequence[str], str]] = (
    ("Queues", ("noop", "enqueue", "bulk", "echo", "nap", "spread"), ("acknowledged", "delivery"), _QUEUES),
    ("Durable steps", ("steps", "steps_shared"), ("acknowledged", "on_disk"), _STEPS),
    ("Recovery", ("recovery", "recovery_set"), ("delivery", "recovery"), _RECOVERY),
)
"""Title, lines, which promises stand beside their figures, and introduction of each section."""

AT_REST = """What a peer does before it calls a task done, and what finds a dead worker's task. The last column is its
default, read from its own code in the environment that was measured.
"""

NOT_SAID = """- Nothing of other machines: with more cores, worker, server and client stop competing, and ratios move.
- Nothing of several workers, of networks between machines, or of a Redis that others use too.
- No-op tasks show what a queue costs, not how fast an application is: a handler of 100 ms hides all of it.
- Peers do different things for their cost: those that acknowledge early do less, those that write to disk do more. The
  tables say which is which; no figure stands for a feature that only one of them has.
- Blocking peers (dramatiq, Celery, RQ) run threads or processes, which suits handlers that compute; coroutines suit
  handlers that wait.
- Postgres and SQLite were used with their defaults; both, and Redis too, can be tuned.
"""
