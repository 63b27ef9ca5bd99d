"""The measured setups: how each is installed and started, and what it guarantees, in the order of the tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

__all__ = ["PERDURE", "PERDURE_FSYNC", "QUEUES", "STEPS", "Guarantee", "Peer"]

Store = Literal["redis", "redis-fsync", "postgres", "sqlite"]


@dataclass(frozen=True, slots=True)
class Guarantee:
    """Guarantees of a setup, as text for the table.

    acknowledged: when a message is removed, or when progress is durable. delivery: how often a task may run.
    on_disk: what is fsynced before a call returns. recovery: what finds the task of a dead worker.
    """

    acknowledged: str
    delivery: str
    on_disk: str
    recovery: str


@dataclass(frozen=True, slots=True)
class Peer:
    """One measured setup.

    key: its name in commands and data. module: its module in `programs.frameworks`. worker: the command that starts a
    worker, from the bin folder of its environment; `{concurrency}` and the server's `{url}` are filled in. recovery:
    options added to that command to set the recovery timeout, `{seconds}` filled in; empty if the program sets it.
    environment: the virtual environment, None for the one of this process. distributions: packages whose versions are
    reported. settings: how it is run, as text for the table. cannot: reason by workload. extra: environment variables.
    """

    key: str
    name: str
    module: str
    store: Store
    environment: str | None
    distributions: Sequence[str]
    settings: str
    guarantee: Guarantee
    worker: str = ""
    recovery: str = ""
    cannot: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, str] = field(default_factory=dict)


_NO_BULK = "no bulk call"
_MEMORY = "nothing: the server runs without persistence"

_PERDURE_WORKER = "perdure worker run programs.frameworks.on_perdure:app --concurrency {concurrency}"

PERDURE = Peer(
    key="perdure",
    name="Perdure",
    module="on_perdure",
    store="redis",
    environment=None,
    distributions=("perdure", "redis", "hiredis", "uvloop"),
    settings="`perdure worker run` with defaults, log level WARNING",
    guarantee=Guarantee(
        "late, in the script that stores the result",
        "at least once; a recorded step exactly once",
        _MEMORY,
        "an expired lease, found by a sweep",
    ),
    worker=_PERDURE_WORKER,
    recovery="--lease {seconds}",
)

PERDURE_FSYNC = Peer(
    key="perdure-fsync",
    name="Perdure, fsync on every write",
    module="on_perdure",
    store="redis-fsync",
    environment=None,
    distributions=PERDURE.distributions,
    settings=f"{PERDURE.settings}; Redis with `appendonly yes`, `appendfsync always`",
    guarantee=Guarantee(
        PERDURE.guarantee.acknowledged,
        PERDURE.guarantee.delivery,
        "every write, before its reply",
        PERDURE.guarantee.recovery,
    ),
    worker=_PERDURE_WORKER,
)

_CELERY_WORKER = "celery -A programs.frameworks.on_celery worker --pool threads -c {concurrency}"
_ONE_AT_A_TIME = "one job at a time, each in a forked process"

QUEUES: Sequence[Peer] = (
    PERDURE,
    Peer(
        key="streaq",
        name="streaq",
        module="on_streaq",
        store="redis",
        environment="streaq",
        distributions=("streaq", "coredis"),
        settings="`streaq run`, concurrency {concurrency}; JSON instead of pickle",
        guarantee=Guarantee(
            "late, with the result", "at least once", _MEMORY, "an idle timeout, checked by every reading worker"
        ),
        worker="streaq run programs.frameworks.on_streaq:worker",
    ),
    Peer(
        key="saq",
        name="SAQ",
        module="on_saq",
        store="redis",
        environment="saq",
        distributions=("saq", "redis", "hiredis"),
        settings="`saq`, concurrency {concurrency}; JSON by default; the first sweep runs before the tasks "
        "are enqueued, because a worker that starts with a backlog aborts jobs that it has just dequeued",
        guarantee=Guarantee(
            "late, with the result",
            "at most once by default (retries=1), otherwise at least once",
            _MEMORY,
            "a sweep every 60 s for jobs over their time limit (10 s)",
        ),
        worker="saq programs.frameworks.on_saq.settings",
        cannot={"bulk": _NO_BULK},
    ),
    Peer(
        key="taskiq",
        name="taskiq-redis",
        module="on_taskiq",
        store="redis",
        environment="taskiq",
        distributions=("taskiq", "taskiq-redis", "redis", "hiredis", "uvloop"),
        settings="`taskiq worker --workers 1 --max-async-tasks {concurrency}`, RedisStreamBroker; results as JSON "
        "instead of pickle",
        guarantee=Guarantee(
            "late, after the result (when_saved)",
            "at least once",
            _MEMORY,
            "an idle timeout, checked by every reading worker",
        ),
        worker="taskiq worker programs.frameworks.on_taskiq:broker --workers 1 --max-async-tasks {concurrency}",
        cannot={"bulk": _NO_BULK},
    ),
    Peer(
        key="arq",
        name="arq",
        module="on_arq",
        store="redis",
        environment="arq",
        distributions=("arq", "redis", "hiredis"),
        settings="`arq`, max_jobs {concurrency}; JSON instead of pickle",
        guarantee=Guarantee(
            "late, with the result", "at least once", _MEMORY, "the job's time limit (300 s) plus 10 s"
        ),
        worker="arq programs.frameworks.on_arq.WorkerSettings",
        cannot={"bulk": _NO_BULK},
    ),
    Peer(
        key="docket",
        name="docket",
        module="on_docket",
        store="redis",
        environment="docket",
        distributions=("pydocket", "redis", "hiredis"),
        settings="`docket worker --concurrency {concurrency}`; cloudpickle (no alternative); up to 1,000 "
        "connections, because the client's default of 100 stalls it for 5 s at a concurrency of 100",
        guarantee=Guarantee(
            "late, with the result", "at least once", _MEMORY, "a redelivery timeout, found by a sweep"
        ),
        worker="docket worker --docket bench --url {url}?max_connections=1000 --tasks "
        "programs.frameworks.on_docket:tasks --concurrency {concurrency}",
        recovery="--redelivery-timeout {seconds}s",
    ),
    Peer(
        key="dramatiq",
        name="dramatiq",
        module="on_dramatiq",
        store="redis",
        environment="dramatiq",
        distributions=("dramatiq", "redis", "hiredis"),
        settings="`dramatiq -p 1 -t {concurrency}`, Results middleware; JSON by default",
        guarantee=Guarantee(
            "late, after the result",
            "at least once",
            _MEMORY,
            "the worker's heartbeat, checked by maintenance at random commands",
        ),
        worker="dramatiq programs.frameworks.on_dramatiq -p 1 -t {concurrency}",
        cannot={"bulk": _NO_BULK},
    ),
    Peer(
        key="celery",
        name="Celery",
        module="on_celery",
        store="redis",
        environment="celery",
        distributions=("celery", "kombu", "redis", "hiredis"),
        settings="`celery worker --pool threads -c {concurrency}`, Redis as broker and result backend; JSON by default",
        guarantee=Guarantee("early, before it runs", "at most once", _MEMORY, "nothing: the task is lost"),
        worker=_CELERY_WORKER,
        cannot={"bulk": _NO_BULK, "recovery_set": "lost: acknowledged before it runs"},
    ),
    Peer(
        key="celery-late",
        name="Celery, acks_late",
        module="on_celery",
        store="redis",
        environment="celery",
        distributions=("celery", "kombu", "redis", "hiredis"),
        settings="as Celery, with `task_acks_late = True`",
        guarantee=Guarantee("late, after the result", "at least once", _MEMORY, "a visibility timeout"),
        worker=_CELERY_WORKER,
        extra={"BENCH_ACKS_LATE": "1"},
        cannot={
            "bulk": _NO_BULK,
            "nap": "not measured: same as Celery",
            "spread": "not measured: same as Celery",
        },
    ),
    Peer(
        key="rq",
        name="RQ",
        module="on_rq",
        store="redis",
        environment="rq",
        distributions=("rq", "redis", "hiredis"),
        settings=f"a `Worker` in a program that imports the tasks first; JSON instead of pickle; {_ONE_AT_A_TIME}",
        guarantee=Guarantee(
            "early: moved to a registry of started jobs",
            "at most once, unless it has retries",
            _MEMORY,
            "maintenance every 600 s",
        ),
        worker="python -m programs.frameworks.rq_worker",
        cannot={"recovery_set": "moved to the failed jobs unless it has retries"},
    ),
)

_DBOS: Final = Guarantee(
    "each step committed before the next", "a recorded step exactly once", "every commit", "the next launch"
)
_LANGGRAPH: Final = Guarantee(
    "each node checkpointed before the next",
    "a checkpointed node exactly once",
    "every commit",
    "the caller, by invoking the thread again",
)

STEPS: Sequence[Peer] = (
    PERDURE,
    PERDURE_FSYNC,
    Peer(
        key="dbos-postgres",
        name="DBOS, Postgres",
        module="on_dbos",
        store="postgres",
        environment="dbos",
        distributions=("dbos", "sqlalchemy", "psycopg"),
        settings="`DBOS.launch()` with defaults, workflow and steps as plain functions; one thread per concurrent "
        "caller",
        guarantee=_DBOS,
    ),
    Peer(
        key="dbos-sqlite",
        name="DBOS, SQLite",
        module="on_dbos",
        store="sqlite",
        environment="dbos",
        distributions=("dbos", "sqlalchemy", "SQLite"),
        settings="as above, with its default SQLite database",
        guarantee=_DBOS,
    ),
    Peer(
        key="langgraph-postgres",
        name="LangGraph, Postgres",
        module="on_langgraph",
        store="postgres",
        environment="langgraph",
        distributions=("langgraph", "langgraph-checkpoint-postgres", "psycopg"),
        settings='a graph of ten nodes, `ainvoke(durability="sync")`, AsyncPostgresSaver on a pool',
        guarantee=_LANGGRAPH,
    ),
    Peer(
        key="langgraph-sqlite",
        name="LangGraph, SQLite",
        module="on_langgraph",
        store="sqlite",
        environment="langgraph",
        distributions=("langgraph", "langgraph-checkpoint-sqlite", "SQLite"),
        settings="as above, with AsyncSqliteSaver (write-ahead log, SQLite's default `synchronous`)",
        guarantee=_LANGGRAPH,
    ),
)
