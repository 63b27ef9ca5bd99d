"""Settings of the connection: defaults, environment, arguments, and the same errors for producers and workers."""

from __future__ import annotations

import os
import subprocess
import sys
from difflib import get_close_matches
from pathlib import Path

import pytest
from perdure.queues import Address, ConfigurationError, ConnectionSettings, Producer, read_settings
from perdure.worker.settings import Settings, load_settings

DATA = Path("/data")


def test_defaults_come_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PERDURE_DATA_DIR", str(tmp_path))
    assert ConnectionSettings().data_folder == tmp_path
    assert ConnectionSettings().address == Address(directory=tmp_path)
    assert ConnectionSettings(data_dir=DATA).address == Address(directory=DATA)
    monkeypatch.setenv("PERDURE_REDIS_URL", "redis://elsewhere")
    assert ConnectionSettings().address == Address("redis://elsewhere")
    assert ConnectionSettings(redis_url="redis://here").address == Address("redis://here")


def test_the_default_data_folder_follows_the_xdg_specification(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PERDURE_DATA_DIR")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert ConnectionSettings().data_folder == tmp_path / "data" / "perdure"
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert ConnectionSettings().data_folder == tmp_path / ".local" / "share" / "perdure"


def test_the_namespace_is_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ConnectionSettings().namespace == "perdure"
    monkeypatch.setenv("PERDURE_NAMESPACE", "mine")
    assert ConnectionSettings().namespace == "mine"
    monkeypatch.setenv("PERDURE_NAMESPACE", "")
    assert ConnectionSettings().namespace == "perdure"


@pytest.mark.parametrize("name", ["PERDURE_REPLICAS", "PERDURE_REPLICATION_TIMEOUT"])
def test_an_invalid_number_is_refused_by_producer_and_worker_alike(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for wrong in ("0", "many"):
        monkeypatch.setenv(name, wrong)
        with pytest.raises(ConfigurationError, match=f"{name}: .*got '?{wrong}\\b") as of_producer:
            Producer()
        with pytest.raises(ConfigurationError) as of_worker:
            load_settings()
        assert str(of_producer.value) == str(of_worker.value)


def test_an_error_names_a_wrong_value_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError) as raised:
        read_settings(ConnectionSettings, {"namespace": "a b"})
    assert str(raised.value).startswith("namespace: namespace must be 1 to 64 letters")
    assert str(raised.value).count("got 'a b'") == 1


def test_a_url_is_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERDURE_DATA_DIR", "redis://:topsecret@localhost")
    with pytest.raises(ConfigurationError) as raised:
        Producer()
    assert str(raised.value) == "PERDURE_DATA_DIR: must be a folder of this host, got a URL with redis://"


def test_arguments_take_precedence_and_none_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERDURE_NAMESPACE", "environment")
    monkeypatch.setenv("PERDURE_REPLICAS", "2")
    settings = read_settings(ConnectionSettings, {"namespace": "argument", "replicas": None})
    assert (settings.namespace, settings.replicas) == ("argument", 2)


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no setting is called leese"):
        read_settings(ConnectionSettings, {"leese": 3})


def test_a_url_is_not_quoted_in_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERDURE_REDIS_URL", "redis://:topsecret@localhost")
    monkeypatch.setenv("PERDURE_NAMESPACE", "a b")
    with pytest.raises(ConfigurationError, match="PERDURE_NAMESPACE") as raised:
        Producer()
    assert "topsecret" not in str(raised.value)


def unknown(names: dict[str, str], program: str = "") -> list[str]:
    """Return what a program reports that creates a producer twice in an environment with these variables."""
    program += "\nfrom perdure.queues import Producer\nProducer()\nProducer()\n"
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **names}, capture_output=True, text=True, check=True
    )
    return done.stderr.splitlines()


def test_a_variable_that_is_no_setting_is_reported_once_with_the_nearest_name() -> None:
    foreign = {"PERDURE_TEST_REDIS_URL": "x", "PERDURE_LLM_URL": "x", "PERDURE_LEASE": "30", "PERDURE_NOTHING": ""}
    named = {"PERDURE_REDISURL": "redis://x", "PERDURE_LEAS": "3", "PERDURE_XYZ": "1"}
    text = "the environment variable {} is not a setting of Perdure; did you mean {}?"
    assert unknown(foreign | named) == [text.format("PERDURE_REDISURL", "PERDURE_REDIS_URL")]
    assert unknown(foreign | named, "from perdure import Settings") == [
        text.format("PERDURE_LEAS", "PERDURE_LEASE"),
        text.format("PERDURE_REDISURL", "PERDURE_REDIS_URL"),
        "the environment variable PERDURE_XYZ is not a setting of Perdure; help(perdure.Settings) lists them",
    ]


def test_no_setting_of_a_worker_looks_like_a_misspelt_one_of_the_connection() -> None:
    own = ConnectionSettings.model_fields
    others = [name for name in Settings.model_fields if name not in own]
    assert not [name for name in others if get_close_matches(name.upper(), map(str.upper, own), n=1, cutoff=0.8)]
