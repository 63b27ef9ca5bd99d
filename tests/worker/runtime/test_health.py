"""Health levels of a worker: each fails for its own faults only."""

from __future__ import annotations

import asyncio
import json
import math
import re
import signal
import socket
import struct
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any
from urllib.parse import urlsplit

import pytest
from perdure import App, Context, Settings, Unavailable, Worker
from perdure.queues import ConfigurationError, Namespace, list_workers
from perdure.queues.delivery import heartbeat
from perdure.queues.delivery.heartbeat import LeaseHeartbeat
from perdure.queues.pauses import PauseRule, PauseStore
from perdure.worker.runtime.health import probe_server
from perdure.worker.runtime.health.probe_server import ProbePage, ProbeServer
from perdure.worker.runtime.health.report import CombinedReport, IncoherentRun, Level, Report

from tests.support.servers import BUNDLED, RedisServer, find_program
from tests.support.workers import BOUND, bounded, running_worker, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.app("health", heartbeat=0.5, stall_warning=0.5, lease=0.9)]


def failing(worker: Worker) -> dict[str, str]:
    """Return the failing levels, each with its message."""
    return {level.name: level.said for level in worker.health().levels if not level.ok}


async def until_failing(worker: Worker, *levels: str) -> None:
    async def so() -> bool:
        return failing(worker).keys() == set(levels)

    await wait_until(so, f"failing are {levels or 'none'}")


# the levels


async def test_a_worker_is_ready_from_its_first_read_until_it_stops(app: App) -> None:
    @app.task
    async def job(ctx: Context) -> None: ...

    worker = Worker(app)
    assert failing(worker).keys() == {"connected", "consuming"}
    assert (worker.health().live, worker.health().ready) == (True, False)
    async with worker:
        running = asyncio.create_task(worker.run())
        await until_failing(worker)
        assert worker.health().ready
        worker.stop()
        assert failing(worker) == {"consuming": "the worker is stopping"}
        assert worker.health().live
        await bounded(running)


async def test_workers_publish_their_health_in_redis(app: App) -> None:
    @app.task
    async def job(ctx: Context) -> None: ...

    gateway, namespace = app.producer.gateway, Namespace(app.settings.namespace)
    async with running_worker(app) as worker:

        async def ready() -> bool:
            (info,) = await list_workers(gateway, namespace)
            return Report.from_summary(info.health).ready and Report.from_summary(info.health).worker == worker.id

        await wait_until(ready, "it announces that it is ready")
        (before,) = await list_workers(gateway, namespace)
        assert (before.progress, before.interval) == (None, 0.5)
        await bounded((await job.enqueue()).result())

        async def progressed() -> bool:
            (info,) = await list_workers(gateway, namespace)
            return info.progress is not None and info.progress < BOUND

        await wait_until(progressed, "it announces that something was settled")
        assert await gateway.command("TYPE", namespace.worker(worker.id)) == b"hash"


@pytest.mark.processes
async def test_a_redis_outage_fails_connected_and_consuming_until_redis_returns(settings: Settings) -> None:
    program = find_program(BUNDLED)
    assert program is not None
    server = RedisServer(program).start()
    try:
        changed = settings.model_copy(update={"redis_url": server.url, "heartbeat": 0.2})
        async with App("health", settings=changed) as app:

            @app.task
            async def job(ctx: Context) -> None: ...

            async with running_worker(app) as worker:
                await until_failing(worker)
                server.kill()
                await until_failing(worker, "connected", "consuming")
                assert worker.health().live  # a restart of the worker would not repair Redis
                assert "Redis" in failing(worker)["consuming"]
                server.start()
                await until_failing(worker)
    finally:
        server.stop()


@pytest.mark.processes
async def test_an_unresponsive_redis_fails_connected(settings: Settings) -> None:
    """The connections stay open without replies."""
    program = find_program(BUNDLED)
    assert program is not None
    server = RedisServer(program).start()
    assert server.process is not None
    try:
        changed = settings.model_copy(update={"redis_url": server.url, "heartbeat": 0.2})
        async with App("health", settings=changed) as app:

            @app.task
            async def job(ctx: Context) -> None: ...

            async with running_worker(app) as worker:
                await until_failing(worker)
                server.process.send_signal(signal.SIGSTOP)
                await until_failing(worker, "connected")
                server.process.send_signal(signal.SIGCONT)
                await until_failing(worker)
    finally:
        server.process.send_signal(signal.SIGCONT)
        server.stop()


async def test_failed_lease_renewals_fail_connected(app: App) -> None:
    @app.task
    async def job(ctx: Context) -> None: ...

    async with running_worker(app) as worker:
        await until_failing(worker)
        worker._on_renewal(Unavailable("no way"))
        assert failing(worker) == {"connected": "leases cannot be renewed: no way"}
        worker._on_renewal(None)
        assert failing(worker) == {}


async def test_a_stuck_intake_fails_consuming_unless_all_slots_are_taken(app: App) -> None:
    started, proceed = asyncio.Event(), asyncio.Event()

    @app.task
    async def job(ctx: Context) -> None:
        started.set()
        await proceed.wait()

    async with running_worker(app, concurrency=1) as worker:
        await until_failing(worker)
        worker._health._clock = lambda: time.monotonic() + 1000
        assert failing(worker)["consuming"].startswith("no read for ")
        await job.enqueue()
        await bounded(started.wait())
        assert "consuming" not in failing(worker)  # all slots are taken
        worker._health._clock = time.monotonic
        proceed.set()


async def test_stuck_runs_in_all_slots_fail_progress(app: App) -> None:
    """The handlers exceed their idle limit and ignore their cancellation."""
    let_go = asyncio.Event()

    @app.task(idle_timeout=0.3)
    async def hangs(ctx: Context) -> None:
        while not let_go.is_set():
            try:
                await let_go.wait()
            except asyncio.CancelledError:
                continue

    @app.task(idle_timeout=math.inf)
    async def works(ctx: Context) -> None:
        await let_go.wait()

    async with running_worker(app, concurrency=2) as worker:
        await until_failing(worker)
        await hangs.enqueue()
        working_on = await works.enqueue()

        async def one_stuck() -> bool:
            return worker.in_flight == 2 and any(worker._deadlines.is_stuck(run) for run in worker._executor.runs)

        await wait_until(one_stuck, "one hangs")
        assert failing(worker) == {}  # the other run makes progress
        await working_on.cancel()
        await hangs.enqueue()
        await until_failing(worker, "progress")
        assert failing(worker)["progress"] == "all 2 slots are used by runs that are stuck"
        assert not worker.health().live
        let_go.set()
        await until_failing(worker)


async def test_a_worker_that_should_be_replaced_fails_progress(app: App) -> None:
    @app.task
    async def job(ctx: Context) -> None: ...

    async with running_worker(app) as worker:
        await until_failing(worker)
        worker._deadlines.degraded = "20 of 40 threads are lost"
        assert failing(worker) == {"progress": "20 of 40 threads are lost"}


def test_several_workers_are_ready_if_all_are_and_live_if_any_is() -> None:
    def report(**levels: bool) -> Report:
        return Report("w", tuple(Level(name, ok) for name, ok in levels.items()))

    well, away, stuck = report(alive=True, connected=True), report(alive=True, connected=False), report(alive=False)
    cases: list[tuple[list[Report], tuple[bool, bool]]] = [
        ([], (True, False)),
        ([well, well], (True, True)),
        ([well, away], (True, False)),
        ([well, stuck], (True, False)),
        ([stuck, stuck], (False, False)),
    ]
    for reports, expected in cases:
        combined = CombinedReport(reports)
        assert (combined.live, combined.ready) == expected
        assert len(combined.summary()["workers"]) == len(reports)
        assert combined.coherent
    assert not CombinedReport([stuck], [well]).live
    assert CombinedReport([well], [stuck]).live
    assert not CombinedReport([well], [stuck]).ready
    assert len(CombinedReport([well], [stuck]).summary()["workers"]) == 2
    assert not CombinedReport([well, Report("w", (), (IncoherentRun("id-1", "research", ("progress",)),))]).coherent
    assert Report.from_summary(json.loads(json.dumps(well.summary()))) == well


def test_reasons_say_why_a_worker_is_not_ready_and_what_is_paused() -> None:
    levels = (
        Level("alive", True, "the event loop answers"),
        Level("connected", False, "Redis is read-only: READONLY", "promote it"),
        Level("consuming", False, "the worker is draining: it takes no more tasks"),
    )
    paused = "paused by ann since 2026-11-27T09:00:00+00:00: queue 'q'; to end that: perdure queue resume q"
    report = Report("w1", levels, paused=(paused,))
    assert report.reasons == [
        "Redis is read-only: READONLY; promote it",
        "the worker is draining: it takes no more tasks",
        paused,
    ]
    well = Report("w2", levels[:1], paused=(paused,))
    assert (well.ready, well.reasons) == (True, [paused])
    assert Report.from_summary(json.loads(json.dumps(report.summary()))) == report
    combined = CombinedReport([report, well], reasons=["the supervisor is stopping all workers"])
    assert combined.reasons == [
        "the supervisor is stopping all workers",
        "worker w1: Redis is read-only: READONLY; promote it",
        "worker w1: the worker is draining: it takes no more tasks",
        paused,  # once
    ]
    assert CombinedReport([]).reasons == ["no worker is running"]
    assert CombinedReport([], reasons=["the supervisor is paused"]).reasons == ["the supervisor is paused"]


async def test_a_server_that_became_read_only_is_named_with_the_remedy(app: App) -> None:
    @app.task
    async def job(ctx: Context) -> None: ...

    async with running_worker(app) as worker:
        await until_failing(worker)
        worker._health.read_failed(Unavailable("READONLY You can't write against a read only replica."))
        (reason,) = worker.health().reasons
        assert reason == (
            "Redis is read-only: READONLY You can't write against a read only replica; it is a replica, or was "
            "demoted: promote it, or point the workers to the primary"
        )


async def test_a_pause_of_an_operator_is_a_reason_and_leaves_the_worker_ready(app: App) -> None:
    @app.task
    async def job(ctx: Context) -> None: ...

    async with running_worker(app) as worker:
        await until_failing(worker)
        store = PauseStore(app.producer.gateway, app.producer.namespace)
        await store.add(PauseRule("health", by="ann", why="a move"))

        async def follows() -> bool:
            return worker.health().reasons != []

        await wait_until(follows, "the worker follows the pause")
        (reason,) = worker.health().reasons
        assert re.fullmatch(
            r"paused by ann since \S+\+00:00: queue 'health': a move; to end that: perdure queue resume health", reason
        )
        assert worker.health().ready


# over HTTP


class Asker:
    """HTTP client of the probes; the test calls it from a thread."""

    def __init__(self, address: str) -> None:
        self.address = address

    def ask(self, path: str, method: str = "GET") -> tuple[int, Any]:
        request = urllib.request.Request(self.address + path, method=method)
        try:
            with urllib.request.urlopen(request, timeout=BOUND) as answer:
                return answer.status, json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as refused:
            with refused:
                return refused.code, json.loads(refused.read() or b"null")


@pytest.fixture
def probing() -> Iterator[Callable[[Report], Asker]]:
    served: list[ProbeServer] = []

    def serve(report: Report) -> Asker:
        served.append(ProbeServer(lambda: report, "127.0.0.1", 0))
        served[-1].__enter__()
        return Asker(served[-1].address)

    yield serve
    for probes in served:
        probes.__exit__()


@pytest.mark.parametrize(
    ("level", "live", "ready"),
    [(None, 200, 200), ("alive", 503, 503), ("connected", 200, 503), ("consuming", 200, 503), ("progress", 503, 503)],
)
def test_each_level_fails_its_probes(
    probing: Callable[[Report], Asker], level: str | None, live: int, ready: int
) -> None:
    names = ("alive", "connected", "consuming", "progress")
    asker = probing(Report("w", tuple(Level(name, name != level, f"of {name}") for name in names)))
    assert (asker.ask("/livez")[0], asker.ask("/readyz")[0]) == (live, ready)
    status, body = asker.ask("/readyz?verbose")
    assert (status, body["ok"], body["worker"]) == (ready, level is None, "w")
    assert [(one["name"], one["ok"], one["said"]) for one in body["levels"]] == [
        (name, name != level, f"of {name}") for name in names
    ]
    assert asker.ask("/livez", "HEAD") == (live, None)


def test_an_incoherent_agent_fails_readyz_if_coherence_is_requested(probing: Callable[[Report], Asker]) -> None:
    levels = (Level("alive", True),)
    well = probing(Report("w", levels))
    confused = probing(Report("w", levels, (IncoherentRun("id-1", "research", ("progress", "repetition")),)))
    away = probing(Report("w", (Level("connected", False),)))
    assert [asker.ask("/readyz?coherence")[0] for asker in (well, confused, away)] == [200, 503, 503]
    assert [confused.ask(path)[0] for path in ("/readyz", "/livez", "/livez?coherence")] == [200, 200, 200]
    status, body = confused.ask("/readyz?verbose&coherence")
    assert (status, body["ok"]) == (503, False)
    assert body["incoherent"] == [{"id": "id-1", "task": "research", "checks": ["progress", "repetition"]}]


def test_unknown_paths_return_404(probing: Callable[[Report], Asker]) -> None:
    asker = probing(Report("w", ()))
    status, body = asker.ask("/healthz")
    assert (status, body) == (404, {"error": "no page /healthz: use /livez, /readyz or /metrics"})
    assert asker.ask("/livez")[0] == 200


@pytest.mark.parametrize(
    ("fails", "status", "answer"),
    [
        (None, 200, b"perdure_x 1\n"),
        (ConfigurationError("metrics need the package x: pip install 'perdure[x]'"), 501, b"pip install 'perdure[x]'"),
        (ValueError("broken"), 500, b"could not report: ValueError"),
    ],
)
def test_metrics_are_served_on_the_same_port(fails: Exception | None, status: int, answer: bytes) -> None:
    def page() -> ProbePage:
        if fails is not None:
            raise fails
        return ProbePage("text/plain; version=0.0.4", b"perdure_x 1\n")

    with ProbeServer(lambda: Report("w", ()), "127.0.0.1", 0, page) as server:
        reply = exchange(server.address, b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert reply.startswith(b"HTTP/1.1 %d " % status)
        assert answer in reply
        assert (b"Content-Type: text/plain; version=0.0.4\r\n" in reply) is (fails is None)
        assert Asker(server.address).ask("/livez")[0] == 200


def exchange(address: str, request: bytes) -> bytes:
    """Send bytes to the probe server, and return its reply: nothing if it closes the connection without one."""
    place = urlsplit(address)
    with socket.create_connection((place.hostname, place.port), timeout=BOUND) as connection:
        connection.sendall(request)
        reply = b""
        with suppress(ConnectionError):
            while received := connection.recv(65_536):
                reply += received
    return reply


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /livez HTTP/1.1\n\n", 200),
        (b"GET /livez HTTP/1.0\r\nHost: localhost:80\r\n\r\n", 200),
        (b"GET /livez HTTP/1.1\r\nHost: [::1]:80\r\n\r\n", 200),
        (b"GET /livez HTTP/1.1\r\nHOST: evil.example:80\r\n\r\n", 421),
        (b"POST /livez HTTP/1.1\r\n\r\n", 405),
        (b"\x16\x03\x01\x02\x00\x01\r\n", 400),
        (b"GET /livez\r\n", 400),
        (b"GET /livez HTTP/1.1\r\nX: " + b"x" * 5_000, 431),
        (b"GET /" + b"x" * 5_000, 431),
        (b"GET /livez HTTP/1.1\r\n" + b"X: y\r\n" * 100, 431),
    ],
)
def test_a_request_of_another_form_is_refused(probing: Callable[[Report], Asker], request_: bytes, status: int) -> None:
    asker = probing(Report("w", ()))
    reply = exchange(asker.address, request_)
    assert reply.startswith(b"HTTP/1.1 %d " % status)
    assert asker.ask("/livez")[0] == 200


def test_any_host_is_answered_on_an_address_that_is_not_loopback() -> None:
    with ProbeServer(lambda: Report("w", ()), "0.0.0.0", 0) as server:
        address = server.address.replace("0.0.0.0", "127.0.0.1")
        assert exchange(address, b"GET /livez HTTP/1.1\r\nHost: worker.example\r\n\r\n").startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_the_server_listens_on_the_address_that_it_is_given(host: str) -> None:
    with ProbeServer(lambda: Report("w", ()), host, 0) as server:
        assert Asker(server.address).ask("/livez")[0] == 200
        with pytest.raises(OSError, match="ddress"):
            ProbeServer(lambda: Report("w", ()), host, urlsplit(server.address).port or 0)


def test_slow_clients_displace_each_other_and_no_probe(
    probing: Callable[[Report], Asker], capfd: pytest.CaptureFixture[str]
) -> None:
    """400 clients send a part of a request and wait; when they end, the log has no line of it."""
    asker = probing(Report("w", ()))
    place = urlsplit(asker.address)
    threads = threading.active_count()
    with ExitStack() as stack:
        slow = []
        for number in range(400):
            slow.append(stack.enter_context(socket.create_connection((place.hostname, place.port), timeout=BOUND)))
            with suppress(ConnectionError):
                slow[-1].sendall(b"GET /livez HTTP/1.1\r\nX: ")
            if number % 100 == 99:
                assert asker.ask("/livez")[0] == 200
        assert threading.active_count() == threads
        closed = [client for client in slow if is_closed(client)]
        assert len(closed) >= 400 - 64
        for client in slow:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close with a reset
    assert asker.ask("/livez")[0] == 200
    assert capfd.readouterr() == ("", "")


def is_closed(client: socket.socket) -> bool:
    """Return whether the server has closed the connection; it has sent nothing."""
    client.setblocking(False)
    try:
        return client.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def test_a_client_that_sends_nothing_is_disconnected(
    probing: Callable[[Report], Asker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe_server, "_PATIENCE", 0.05)
    asker = probing(Report("w", ()))
    assert exchange(asker.address, b"GET /livez HTTP/1.1\r\n") == b""


def test_an_error_of_a_report_fails_the_probe_and_leaves_the_server(probing: Callable[[Report], Asker]) -> None:
    class Broken(Report):
        @property
        def live(self) -> bool:
            raise ValueError("broken")

    asker = probing(Broken("w", ()))
    for _ in range(2):
        assert asker.ask("/livez") == (503, {"ok": False, "error": "could not report: ValueError"})
    assert asker.ask("/readyz")[0] == 503


async def test_a_blocked_loop_fails_livez_with_its_reason(app: App) -> None:
    blocked = threading.Event()

    @app.task
    async def blocks(ctx: Context) -> None:
        blocked.wait(BOUND)

    answers: list[tuple[int, Any]] = []

    def ask_until_blocked(asker: Asker) -> None:
        try:
            deadline = time.monotonic() + BOUND
            while time.monotonic() < deadline and (not answers or answers[-1][0] == 200):
                answers.append(asker.ask("/livez"))
        finally:
            if answers:
                time.sleep(app.settings.heartbeat * 3)  # heartbeats are overdue as well
                answers.append(asker.ask("/livez"))
            blocked.set()

    async with running_worker(app) as worker:
        await until_failing(worker)
        with ProbeServer(worker.health, "127.0.0.1", 0) as probes:
            asker = Asker(probes.address)
            assert (await asyncio.to_thread(asker.ask, "/livez"))[0] == 200
            asking = threading.Thread(target=ask_until_blocked, args=(asker,))
            asking.start()
            await bounded((await blocks.enqueue()).result())
            await asyncio.to_thread(asking.join)
            status, body = answers[-1]
            assert status == 503
            (alive,) = [level for level in body["levels"] if not level["ok"]]
            assert alive["name"] == "alive"
            assert alive["said"].startswith("the event loop has not answered for ")
            await until_failing(worker)
            assert (await asyncio.to_thread(asker.ask, "/livez"))[0] == 200


# the thread that renews leases


async def until_probes(worker: Worker, livez: int, readyz: int) -> dict[str, str]:
    """Wait for these answers of the probe server; return the failing levels."""
    with ProbeServer(worker.health, "127.0.0.1", 0) as server:

        async def so() -> bool:
            asker = Asker(server.address)
            return [(await asyncio.to_thread(asker.ask, path))[0] for path in ("/livez", "/readyz")] == [livez, readyz]

        await wait_until(so, f"/livez answers {livez} and /readyz {readyz}")
    return failing(worker)


async def test_a_worker_whose_renewal_thread_has_ended_is_not_live(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    @app.task
    async def job(ctx: Context) -> None: ...

    def end(beat: object) -> None:
        """End at once."""

    monkeypatch.setattr(LeaseHeartbeat, "_run", end)
    async with running_worker(app) as worker:
        failed = await until_probes(worker, 503, 503)
        assert failed == {
            "alive": "the thread that renews leases has ended",
            "connected": "the thread that renews leases has ended",
        }


async def test_a_worker_that_renews_no_lease_is_not_ready_and_then_not_live(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = asyncio.Event()

    @app.task
    async def job(ctx: Context) -> None:
        await finish.wait()

    def fail(*args: object) -> None:
        raise ValueError("no address")

    monkeypatch.setattr(heartbeat, "_open_connection", fail)
    async with running_worker(app) as worker:
        await until_probes(worker, 200, 200)
        handle = await job.enqueue()
        failed = await until_probes(worker, 200, 503)
        assert failed["connected"].endswith("ValueError: no address")
        failed = await until_probes(worker, 503, 503)
        assert re.match(r"no lease has been renewed for [0-9.]+ s ValueError: no address", failed["alive"])
        monkeypatch.undo()
        await until_probes(worker, 200, 200)
        finish.set()
        await bounded(handle.result())
