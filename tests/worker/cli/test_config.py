"""`perdure config`: store, remove and show the settings that all workers share; workers that are given other values."""

from __future__ import annotations

from pathlib import Path

import pytest
from anyio import to_thread
from perdure import Producer, Settings
from perdure.queues import WorkerInfo
from perdure.queues.presence import announce

from tests.support.command_line import Answer, call, process

pytestmark = [pytest.mark.integration, pytest.mark.processes]


@pytest.fixture
def config(settings: Settings) -> Config:
    return Config(settings)


class Config:
    """The command, on the namespace of the test."""

    def __init__(self, settings: Settings) -> None:
        self.place = ("--redis-url", settings.redis_url, "--namespace", settings.namespace)

    def __call__(self, *args: str) -> Answer:
        return call("config", *args, *self.place)


def test_settings_are_stored_shown_and_removed(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERDURE_RESULT_TTL", "7200")
    answer = config("set", "result_ttl", "12h", "--json")
    assert answer.json["result_ttl"] == {"stored": 43_200.0, "environment": 7200.0}
    answer = config("set", "lease", "30")
    assert answer.code == 0
    assert answer.err.startswith("perdure: the lease is being changed: complete in")
    rows = [line.split() for line in config("show").out.splitlines()]
    assert ["lease", "30", "s", "15", "s"] in rows
    assert ["dead_letter_ttl", "-", "2592000", "s"] in rows
    assert config("unset", "lease", "--json").json["lease"]["stored"] is None
    answer = config("unset", "lease")
    assert (answer.code, answer.out) == (1, "")
    assert "lease is not stored in namespace" in answer.err
    assert config("show", "--json").json["result_ttl"]["stored"] == 43_200.0


async def test_a_change_of_the_lease_waits_for_the_registrations_of_all_workers(
    config: Config, settings: Settings
) -> None:
    async with Producer(settings.redis_url, namespace=settings.namespace) as producer:
        info = WorkerInfo("a", "x", "h", 7, "0.1", ("q",), concurrency=1, in_flight=0, started=0, interval=100.0)
        await announce(producer.gateway, producer.namespace, info, ttl=60)
    answer = await to_thread.run_sync(config, "set", "lease", "30", "--json")
    assert 500 < answer.json["lease"]["complete_in"] <= 600


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("lease", "0.1"), "lease: Input should be greater than or equal to 0.3 (got 0.1)"),
        (("lease", "2h"), "lease: Input should be less than or equal to 3600 (got 7200.0)"),
        (("dead_letter_ttl", "0"), "dead_letter_ttl: Input should be greater than 0 (got 0.0)"),
        (("result_ttl", "soon"), "must be a number of seconds"),
        (("grace", "30"), "must be one of lease, dead_letter_ttl, result_ttl; got 'grace'"),
    ],
)
def test_an_invalid_setting_is_refused(config: Config, arguments: tuple[str, ...], said: str) -> None:
    answer = config("set", *arguments)
    assert (answer.code, answer.out) == (2, "")
    assert said in answer.err
    assert all(found["stored"] is None for found in config("show", "--json").json.values())


def test_a_strict_worker_does_not_start_with_another_lease(config: Config, tmp_path: Path) -> None:
    app = tmp_path / "tasks.py"
    app.write_text("from perdure import App\napp = App('x')\n@app.task\nasync def t(ctx): ...\n")
    config("set", "lease", "30")
    answer = process("worker", "run", f"{app}:app", "--burst", "--strict", "--lease", "60", *config.place)
    assert (answer.code, answer.out) == (1, "")
    (line,) = [line for line in answer.err.splitlines() if line.startswith("perdure: ")]
    assert line.startswith("perdure: lease must be the stored 30 s, got 60 s: unset PERDURE_LEASE or the argument")
    assert "Traceback" not in answer.err
