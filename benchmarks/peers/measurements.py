"""One measurement of one setup: a new server, the setup's client and worker, and the recorded times."""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from .environments import bin_folder, environment_of
from .processes import Failed, Session, started
from .programs.time_file import TimeFile
from .servers import Postgres, redis_server
from .setups import Peer

__all__ = ["Bench", "Facts", "bulk_rate", "facts", "queue_rates", "recovery_seconds", "step_rate"]

CONCURRENCY = 32
STARTED_WITHIN = 60.0
_FILLED_WITHIN = 60.0
_READY_WITHIN = 30.0
_RESULTS_WITHIN = 30.0
_SETTLED = (5.0, 7.0)
"""Seconds from the start of the second worker to the kill of the first; random, because of periodic heartbeats."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Versions and default recovery timeout (seconds; None if it has no default), read in the setup's environment."""

    python: str
    versions: Mapping[str, str]
    recovery: float | None
    recovery_where: str


@dataclass(frozen=True)
class Bench:
    """One measurement of one setup: its folder, its server and the environment of its processes."""

    peer: Peer
    folder: Path
    environment: Mapping[str, str]
    number: Iterator[int] = field(default_factory=lambda: iter(range(1_000)))

    @classmethod
    @contextmanager
    def of(cls, peer: Peer, tasks: int, database: Postgres | None = None, **values: object) -> Iterator[Bench]:
        """Start the server and create the time file; remove both on exit. values: variables, without BENCH_."""
        with TemporaryDirectory(prefix="perdure-peers-") as name:
            folder = Path(name)
            TimeFile.make(folder / "times", tasks)
            variables = {f"BENCH_{key.upper()}": str(value) for key, value in values.items() if value is not None}
            variables |= {"BENCH_TIMES": str(folder / "times"), **peer.extra}
            with _store(peer, database) as store:
                bench = cls(peer, folder, environment_of(peer.environment, variables | store))
                for command in peer.prepare:
                    bench.prepare(command)
                yield bench

    @property
    def times(self) -> TimeFile:
        """The file that the handlers write times to."""
        return TimeFile(str(self.folder / "times"))

    def prepare(self, command: str) -> None:
        """Run a command of the setup's environment to its end. Raises Failed with its output."""
        name, *arguments = command.split()
        program = bin_folder(self.peer.environment) / name
        done = subprocess.run(
            [program, *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=_READY_WITHIN,
            check=False,
        )
        if done.returncode:
            raise Failed(f"{command}: {done.stderr.strip() or done.stdout.strip()}")

    @contextmanager
    def program(self, *arguments: object) -> Iterator[Session]:
        """Run a module of `programs` in the setup's environment."""
        python = bin_folder(self.peer.environment) / "python"
        command: list[str | Path] = [python, "-m", *(str(argument) for argument in arguments)]
        with started(command, self.environment, self.folder, self._log("program")) as session:
            yield session

    @contextmanager
    def worker(self, concurrency: int, silence: float | None = None) -> Iterator[Session]:
        """Start a worker as the setup's documentation describes. silence: recovery timeout, None for the default."""
        words = f"{self.peer.worker} {self.peer.recovery if silence is not None else ''}".split()
        values = {
            "concurrency": concurrency,
            "seconds": f"{silence or 0:g}",
            "url": self.environment.get("BENCH_REDIS_URL", ""),
        }
        enqueued = [word.format_map(values) for word in words]
        command: list[str | Path] = [bin_folder(self.peer.environment) / enqueued[0], *enqueued[1:]]
        environment = {**self.environment, "BENCH_CONCURRENCY": str(concurrency)}
        with started(command, environment, self.folder, self._log("worker")) as session:
            yield session

    def _log(self, of: str) -> Path:
        return self.folder / f"{of}-{next(self.number)}.log"


@contextmanager
def _store(peer: Peer, database: Postgres | None) -> Iterator[dict[str, str]]:
    """Provide the setup's store; yield the variables that name it."""
    if peer.store == "sqlite":
        data = Path(__file__).parents[2] / ".perdure"
        data.mkdir(exist_ok=True)
        with TemporaryDirectory(prefix="bench-", dir=data) as beside:
            yield {"BENCH_DATABASE_URL": f"sqlite:///{beside}/bench.sqlite"}
    elif peer.store == "postgres":
        if database is None:
            raise Failed("no Postgres")
        name = f"bench_{random.getrandbits(48):012x}"
        try:
            url = database.create(name)
            yield {"BENCH_DATABASE_URL": url, "ABSURD_DATABASE_URL": url}
        finally:
            database.drop(name)
    else:
        with redis_server(fsync=peer.store == "redis-fsync") as url:
            # No setup writes a log line per task; see programs/setup.py.
            yield {"BENCH_REDIS_URL": url, "PERDURE_REDIS_URL": url, "PERDURE_LOG_LEVEL": "WARNING"}


def facts(peer: Peer) -> Facts:
    """Read the facts of a setup in its environment."""
    with TemporaryDirectory(prefix="perdure-peers-") as name:
        TimeFile.make(Path(name, "times"), 1)
        environment = environment_of(peer.environment, {"BENCH_TIMES": str(Path(name, "times")), **peer.extra})
        bench = Bench(peer, Path(name), environment)
        with bench.program("programs.facts", peer.module, *peer.distributions) as program:
            found = program.line(STARTED_WITHIN)
    return Facts(found["python"], found["versions"], found["recovery"]["seconds"], found["recovery"]["where"])


def bulk_rate(peer: Peer, tasks: int, database: Postgres | None) -> float:
    """Return the tasks per second of one bulk call."""
    with (
        Bench.of(peer, tasks, database) as bench,
        bench.program("programs.run_client", peer.module, "noop", tasks, _FILLED_WITHIN, "bulk-only", 0) as client,
    ):
        enqueued = client.line(STARTED_WITHIN + _FILLED_WITHIN)
    if not enqueued["bulk"]:
        raise Failed("no bulk call")
    return float(enqueued["enqueued"] / enqueued["seconds"])


def queue_rates(
    peer: Peer,
    task: str,
    tasks: int,
    how: str,
    limit: float,
    concurrency: int,
    database: Postgres | None,
    *,
    children: int = 0,
    within: float = _FILLED_WITHIN,
) -> dict[str, float]:
    """Enqueue tasks, then run them with one worker; return the tasks per second of both, `enqueue` and `run`.

    children: number that each task enqueues and waits for; `run` then counts those. within: seconds after which no more
    tasks are enqueued one by one.
    """
    with (
        Bench.of(peer, tasks + children, database, children=children) as bench,
        bench.program("programs.run_client", peer.module, task, tasks, within, how, limit) as client,
    ):
        enqueued = client.line(STARTED_WITHIN + _FILLED_WITHIN)
        with bench.worker(concurrency) as worker:
            client.go()
            seen = client.line(STARTED_WITHIN + limit + _RESULTS_WITHIN, beside=[worker])
    ran = children or seen["ran"]
    return {"enqueue": enqueued["enqueued"] / enqueued["seconds"], "run": ran / seen["seconds"]}


def recovery_seconds(peer: Peer, silence: float | None, within: float, database: Postgres | None) -> float:
    """Return the seconds from kill -9 of a worker with a running task until an idle worker runs the task again."""
    with (
        Bench.of(peer, 2, database, recovery=silence) as bench,
        bench.program("programs.run_client", peer.module, "hang", 1, _FILLED_WITHIN, "singly-trickle", 0) as client,
    ):
        client.line(STARTED_WITHIN)
        with bench.worker(CONCURRENCY, silence) as victim:
            _until(lambda: bench.times.began(0) > 0, STARTED_WITHIN, "the task did not start", [victim])
            with bench.worker(CONCURRENCY, silence) as rescuer:
                time.sleep(random.uniform(*_SETTLED))
                if bench.times.ended(0):
                    raise Failed("the task ran again while its worker was alive")
                killed = victim.kill()
                _until(lambda: bench.times.ended(0) > 0, within, "not run again", [rescuer])
                return bench.times.ended(0) - killed


def step_rate(peer: Peer, walks: int, at_once: int, limit: float, database: Postgres | None) -> float:
    """Return the durable steps per second of tasks, from their call to their result."""
    with Bench.of(peer, 1, database, concurrency=at_once) as bench:
        program = ("programs.steps", peer.module, walks, at_once, limit)
        if not peer.worker:
            with bench.program(*program) as caller:
                seen = caller.line(STARTED_WITHIN + limit + _RESULTS_WITHIN)
        else:
            with bench.worker(CONCURRENCY) as worker, bench.program(*program) as caller:
                seen = caller.line(STARTED_WITHIN + limit + _RESULTS_WITHIN, beside=[worker])
    return float(seen["ran"] / seen["seconds"])


def _until(done: Callable[[], bool], within: float, otherwise: str, beside: Sequence[Session]) -> None:
    deadline = time.monotonic() + within
    while not done():
        for session in beside:
            session.check()
        if time.monotonic() > deadline:
            raise Failed(f"{otherwise} within {within:g} s")
        time.sleep(0.005)
