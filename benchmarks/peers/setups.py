"""The measured setups: how each is installed and started, and what it guarantees, in the order of the tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

__all__ = ["PERDURE", "PERDURE_FSYNC", "QUEUES", "STEPS", "Choice", "Guarantee", "Peer"]

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
class Choice:
    """Settings of a project's documentation that the sweep tries in place of the defaults.

    name: as text for the tables. variables: of the environment of its programs. options: added to the command of the
    worker. worker: another command. uvloop: whether the worker runs on uvloop, which is in its environment anyway.
    concurrency: at which it runs the lines whose concurrency is free.
    """

    name: str
    variables: Mapping[str, str] = field(default_factory=dict)
    options: str = ""
    worker: str = ""
    uvloop: bool = False
    concurrency: int | None = None


@dataclass(frozen=True, slots=True)
class Peer:
    """One measured setup.

    key: its name in commands and data. project: the key of the setup with the defaults, empty if this is it. module:
    its module in `programs.frameworks`. worker: the command that starts a worker, from the bin folder of its
    environment; `{concurrency}` and the server's `{url}` are filled in. recovery: options added to that command to set
    the recovery timeout, `{seconds}` filled in; empty if the program sets it.
    environment: the virtual environment, None for the one of this process. distributions: packages whose versions are
    reported. settings: how it is run, as text for the table. cannot: reason by workload. extra: environment variables.
    prepare: commands that make its tables. choices: other settings, tried by the sweep. timer: why a rate that a timer
    of the project sets is flat or round. concurrency: at which it runs where that is free, None for the usual one.
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
    prepare: Sequence[str] = ()
    choices: Sequence[Choice] = ()
    timer: str = ""
    project: str = ""
    concurrency: int | None = None

    def at(self, choice: Choice) -> Peer:
        """Return this setup with other settings."""
        worker = " ".join(part for part in (choice.worker or self.worker, choice.options) if part)
        return replace(
            self,
            key=f"{self.key}: {choice.name}",
            name=f"{self.name}, {choice.name}",
            settings=f"as {self.name}, with {choice.name}",
            worker=f"{_ON_UVLOOP} {worker}" if choice.uvloop and worker else worker,
            extra={**self.extra, **choice.variables},
            choices=(),
            timer="",
            project=self.key,
            concurrency=choice.concurrency,
        )


_ON_UVLOOP = "python -m programs.on_uvloop"
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
_CELERY_PREFORK = "celery -A programs.frameworks.on_celery worker --pool prefork -c 2"
_DOCKET_RUN = "python -m programs.frameworks.docket_worker"
_ONE_AT_A_TIME = "one job at a time, each in a forked process"

QUEUES: Sequence[Peer] = (
    PERDURE,
    PERDURE_FSYNC,
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
        choices=(
            Choice("uvloop", {"BENCH_UVLOOP": "1"}),
            Choice("uvloop, prefetch 256", {"BENCH_UVLOOP": "1", "BENCH_PREFETCH": "256"}),
        ),
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
        choices=(
            Choice("uvloop", uvloop=True),
            Choice("uvloop, concurrency 10", uvloop=True, concurrency=10),
        ),
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
        choices=(
            Choice("prefetch 64", options="--max-prefetch 64"),
            Choice("prefetch 64, arguments not parsed", options="--max-prefetch 64 --no-parse"),
        ),
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
        choices=(
            Choice("poll every 10 ms", {"BENCH_POLL": "0.01"}),
            Choice("poll every 10 ms, uvloop", {"BENCH_POLL": "0.01"}, uvloop=True),
            Choice("poll every 1 ms, uvloop", {"BENCH_POLL": "0.001"}, uvloop=True),
        ),
        timer="arq reads at most 160 jobs (`queue_read_limit`, five times `max_jobs`) every 0.5 s (`poll_delay`), so "
        "its rate at a concurrency of 32 is 320, whatever the machine",
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
        choices=(
            Choice("check every 10 ms", {"BENCH_POLL": "0.01"}, worker=_DOCKET_RUN),
            Choice("check every 1 ms", {"BENCH_POLL": "0.001"}, worker=_DOCKET_RUN),
            Choice("check every 1 ms, uvloop", {"BENCH_POLL": "0.001", "BENCH_UVLOOP": "1"}, worker=_DOCKET_RUN),
        ),
        timer="docket fills its free slots once in 100 ms (`minimum_check_interval`), so its rate at a concurrency of "
        "32 is 320, whatever the machine",
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
        choices=(
            Choice("8 threads", concurrency=8),
            Choice("8 threads, prefetch 128", {"dramatiq_queue_prefetch": "128"}, concurrency=8),
            Choice("2 threads, prefetch 128", {"dramatiq_queue_prefetch": "128"}, concurrency=2),
        ),
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
        choices=(
            Choice("2 processes", worker=_CELERY_PREFORK),
            Choice("2 processes, prefetch 64 each", {"BENCH_PREFETCH": "64"}, worker=_CELERY_PREFORK),
            Choice("8 threads, prefetch 64 each", {"BENCH_PREFETCH": "64"}, concurrency=8),
        ),
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
        choices=(Choice("`SimpleWorker`, without a process per job", {"BENCH_SIMPLE": "1"}),),
    ),
    Peer(
        key="pgqueuer",
        name="PgQueuer",
        module="on_pgqueuer",
        store="postgres",
        environment="pgqueuer",
        distributions=("pgqueuer", "asyncpg", "uvloop"),
        settings="`pgq run --max-concurrent-tasks {concurrency}` with asyncpg and uvloop, both by default; a batch of "
        "10; keeps the state of a job, no result",
        guarantee=Guarantee(
            "late, in batches, without a result", "at least once", "every commit", "a heartbeat older than 30 s"
        ),
        worker="pgq run programs.frameworks.on_pgqueuer:worker --max-concurrent-tasks {concurrency}",
        recovery="--heartbeat-timeout {seconds}",
        cannot={"spread": "a job cannot wait for others"},
        choices=(
            Choice("a batch of 16", options="--batch-size 16"),
            Choice("a batch of 16, pool of connections", {"BENCH_POOL": "1"}, options="--batch-size 16"),
        ),
    ),
    Peer(
        key="procrastinate",
        name="procrastinate",
        module="on_procrastinate",
        store="postgres",
        environment="procrastinate",
        distributions=("procrastinate", "psycopg", "uvloop"),
        settings="`procrastinate worker -c {concurrency}`, PsycopgConnector; keeps the state of a job, no result",
        guarantee=Guarantee(
            "late, without a result",
            "at most once, unless a task of the application retries stalled jobs",
            "every commit",
            "nothing by default",
        ),
        worker="procrastinate -a programs.frameworks.on_procrastinate.app worker -c {concurrency}",
        cannot={
            "spread": "a job cannot wait for others",
            "recovery_set": "only a task of the application retries stalled jobs",
        },
        choices=(
            Choice("uvloop", uvloop=True),
            Choice("uvloop, pool of 20 connections", {"BENCH_POOL": "20"}, uvloop=True),
        ),
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
        choices=(
            Choice("coroutines", {"BENCH_COROUTINES": "1"}),
            Choice("coroutines, pool of 40 connections", {"BENCH_COROUTINES": "1", "BENCH_POOL": "40"}),
        ),
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
        choices=(Choice("coroutines", {"BENCH_COROUTINES": "1"}),),
    ),
    Peer(
        key="absurd",
        name="Absurd",
        module="on_absurd",
        store="postgres",
        environment="absurd",
        distributions=("absurd-sdk", "absurdctl", "psycopg", "uvloop"),
        settings="`AsyncAbsurd.start_worker(concurrency={concurrency})` in a process of its own, defaults otherwise; "
        "the caller waits with `await_task_result`",
        guarantee=Guarantee(
            "each step committed before the next",
            "a recorded step exactly once",
            "every commit",
            "an expired claim (120 s)",
        ),
        worker="python -m programs.frameworks.absurd_worker",
        prepare=("absurdctl init", "absurdctl create-queue bench"),
        choices=(
            Choice("poll every 10 ms", {"BENCH_POLL": "0.01"}),
            Choice("poll every 10 ms, threads", {"BENCH_POLL": "0.01", "BENCH_THREADS": "1"}),
        ),
        timer="Absurd's worker looks for tasks every 0.25 s if it found none (`poll_interval`), and the caller polls "
        "for the result, so one task at a time waits mostly for these timers",
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
