"""Settings from arguments and the environment; errors name the setting and show no secret."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from perdure import App, Retry, Settings
from perdure.queues import ConfigurationError, ConnectionSettings, Gateway, Producer, Refused
from perdure.queues.security.encryption import NO_KEYS
from perdure.queues.transport.clients import pipelined_connection
from perdure.worker.artifacts.store import shown_place
from perdure.worker.cli.support.connection import ConnectionOptions
from perdure.worker.log import logger
from perdure.worker.runtime.children.child import delay_after
from perdure.worker.settings import load_settings
from pydantic import SecretStr
from rich.console import Console

from tests.support.servers import BUNDLED, RedisServer, find_program


def test_arguments_override_environment_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERDURE_LEASE", "7.5")
    monkeypatch.setenv("PERDURE_NAMESPACE", "from-environment")
    settings = load_settings(namespace="from-argument", redis_url=None)
    assert (settings.lease, settings.namespace) == (7.5, "from-argument")


@pytest.mark.parametrize(("name", "value"), [("PERDURE_LEASE", "soon"), ("PERDURE_LOG_LEVEL", "LOUD")])
def test_an_invalid_variable_is_reported_with_its_value(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=f"{name}: .*{value}"):
        load_settings()


def test_settings_with_several_values_are_read_from_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERDURE_UNKNOWN_TASK", '{"max_attempts": 2, "base": 0.5}')
    monkeypatch.setenv("PERDURE_RESTART_DELAYS", "0,2.5")
    settings = load_settings()
    assert (settings.unknown_task, settings.restart_delays) == (Retry(max_attempts=2, base=0.5), (0.0, 2.5))
    monkeypatch.setenv("PERDURE_UNKNOWN_TASK", "{")
    with pytest.raises(ConfigurationError, match="PERDURE_UNKNOWN_TASK: "):
        load_settings()


def test_the_longest_restart_delay_is_reached_before_the_pause() -> None:
    settings = load_settings()
    delays = [delay_after(crashes, settings.restart_delays) for crashes in range(1, settings.crash_threshold + 1)]
    assert delays == [5, 30, 120, 600, 600]


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="leese"):
        load_settings(leese=3)


def test_the_error_of_a_setting_shows_no_other_setting() -> None:
    with pytest.raises(ConfigurationError) as raised:
        load_settings(namespace="a b", redis_url="redis://:topsecret@localhost")
    assert "a b" in str(raised.value)
    assert "topsecret" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "place", "said"),
    [
        ("MEMORY", "mysql://u:topsecret@h/x", "must be a file or a postgresql:// URL, got a URL with mysql://"),
        ("WORKSPACES", "s3://bucket", "must be a folder of this host, got a URL with s3://"),
        ("WEBHOOK_URL", "ftp://topsecret", "must be an http or https URL"),
    ],
)
def test_a_url_of_another_kind_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, place: str, said: str) -> None:
    monkeypatch.setenv(f"PERDURE_{name}", place)
    with pytest.raises(ConfigurationError) as raised:
        load_settings()
    assert str(raised.value) == f"PERDURE_{name}: {said}"
    with pytest.raises(ValueError, match=said) as direct:
        Settings.model_validate({name.lower(): place})
    assert "topsecret" not in str(direct.value)


def test_the_data_directory_is_resolved_only_if_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home(_: type[Path]) -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("PERDURE_DATA_DIR", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", classmethod(no_home))
    assert load_settings(redis_url="redis://localhost").address.url == "redis://localhost"


@pytest.mark.parametrize(
    "place",
    [
        "postgresql://user:hunter2@host/db",
        "postgresql://user:hunt er2 hunter2@host/db",
        "postgresql:///x?host=h&password=hunter2",
        "redis://user:hunter2@host",
        "redis+sentinel://:a@host/s?sentinel_password=hunter2",
        "s3://key:hunt/er hunter2@bucket",
        "simplecache::ftp://user:hunter2@host/path",
    ],
)
def test_no_text_of_settings_has_a_password(place: str) -> None:
    settings = Settings(
        redis_url=place, memory=place if place.startswith("postgresql") else "", artifacts=place,
        webhook_url=SecretStr("http://host/hunter2"), encryption_keys=SecretStr("hunter2"),
    )  # fmt: skip
    for shown in (repr(settings), str(settings), f"{settings}", repr(ConnectionSettings(redis_url=place))):
        assert "hunter2" not in shown
        assert "host" in shown or "bucket" in shown
    console = Console(file=io.StringIO(), width=10_000)
    console.print(settings)
    assert "hunter2" not in console.file.getvalue()  # type: ignore[attr-defined]
    assert "hunter2" not in shown_place(place)


def test_objects_of_a_deployment_show_no_password() -> None:
    url = "redis://user:hunter2@host"
    app = App("quiet", redis_url=url)
    settings = Settings(redis_url=url)
    gateway = settings.make_gateway(NO_KEYS)
    producer = Producer(redis_url=url)
    for shown in (app, app.settings, producer, gateway, settings.address, ConnectionOptions(url)):
        assert "hunter2" not in repr(shown) + str(shown)
    connection = pipelined_connection(settings.address, None)
    assert "hunter2" not in repr(connection) + str(connection)


_BAD_PLACES = ("mysql://user:hunter2@host", "host=h password=hunter2", "http://host:hunter2/", "hunter2@host")
_BAD_URLS = (
    "http://host:hunter2/",
    "http://host/hunter2 x",
    "http://user:hunter2@[host/x",
    "http://host/hunter2\u00e9",
)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("PERDURE_MEMORY", value) for value in _BAD_PLACES[:-1]],
        *[("PERDURE_REDIS_URL", value) for value in _BAD_PLACES],
        *[("PERDURE_WEBHOOK_URL", value) for value in _BAD_URLS],
    ],
)
def test_an_error_of_a_setting_shows_no_password(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises((ConfigurationError, ConfigurationError)) as caught:
        _ = load_settings().address
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("bad", [{"max_attempts": 0}, {"max_crashes": -1}, {"jitter": 2.0}, {"factor": 0.5}])
def test_an_invalid_retry_policy_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="Retry"):
        Retry(**bad)  # type: ignore[arg-type]  # each value is a number


@pytest.mark.integration
@pytest.mark.parametrize("place", ["unix", "tcp"])
async def test_a_wrong_password_is_refused_and_not_retried(place: str, unused_tcp_port: int) -> None:
    program = find_program(BUNDLED)
    assert program is not None
    options = ("--save", "", "--requirepass", "right", "--port", str(unused_tcp_port), "--bind", "127.0.0.1")
    server = RedisServer(program, options=options).start(password="right")
    try:
        url = f"unix://:wrong@{server.socket}" if place == "unix" else f"redis://:wrong@127.0.0.1:{unused_tcp_port}"
        with pytest.raises(Refused, match="credentials"):
            await Gateway(load_settings(redis_url=url).address).open()
    finally:
        server.stop()


def test_control_characters_do_not_reach_the_log() -> None:
    lines: list[str] = []
    sink = logger.add(lambda message: lines.append(str(message)), format="{message} {extra[task]}")
    try:
        logger.bind(task="\x1b[2Jname").warning("attempt failed: {}", "\x1b[31mred\x07")
    finally:
        logger.remove(sink)
    assert lines == ["attempt failed: \\x1b[31mred\\x07 \\x1b[2Jname\n"]
