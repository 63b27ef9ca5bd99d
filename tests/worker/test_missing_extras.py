"""Packages of extras that are not installed: one sentence with the command that installs them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from perdure.queues import ConfigurationError, generate_key
from perdure.queues.security.encryption import make_encryptor
from perdure.worker.artifacts.store import open_store
from perdure.worker.memory.factory import make_store
from perdure.worker.settings import load_settings
from perdure.worker.testing.clock import open_clock
from perdure.worker.web import extra


@pytest.fixture
def remove(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Function that makes a package unavailable, and forgets modules that have imported it."""

    def removing(package: str, *importers: str) -> None:
        for name in list(sys.modules):
            if name.split(".")[0] == package:
                monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, package, None)
        for importer in importers:
            monkeypatch.delitem(sys.modules, importer, raising=False)

    return removing


def test_memories_in_postgresql_need_psycopg(remove: Callable[..., None]) -> None:
    remove("psycopg", "perdure.worker.memory.postgres")
    settings = load_settings(memory="postgresql://user:secret@host/db")
    with pytest.raises(ConfigurationError) as raised:
        make_store(settings)
    assert str(raised.value) == ("memories in PostgreSQL need the package psycopg: pip install 'perdure[postgres]'")


def test_remote_artifacts_need_fsspec(remove: Callable[..., None]) -> None:
    remove("fsspec", "perdure.worker.artifacts.object_store")
    with pytest.raises(ConfigurationError) as raised:
        open_store("memory://bucket", "perdure", limit=1)
    assert str(raised.value) == (
        "artifacts at memory://bucket need the package fsspec: pip install 'perdure[artifacts]'"
    )


def test_keys_need_cryptography(remove: Callable[..., None]) -> None:
    key = generate_key()
    remove("cryptography", "perdure.queues.security.aesgcm")
    with pytest.raises(ConfigurationError) as raised:
        make_encryptor(key, None)
    assert str(raised.value) == "encryption needs the package cryptography: pip install 'perdure[encryption]'"


@pytest.mark.parametrize("package", ["fakeredis", "lupa"])
def test_the_clock_of_a_test_needs_fakeredis_with_lua(
    remove: Callable[..., None], package: str, tmp_path: Path
) -> None:
    engine = [f"perdure.worker.testing.{name}" for name in ("fake_engine", "timed_server")]
    remove(package, "fakeredis.commands_mixins.scripting_mixin", *engine)
    with pytest.raises(ConfigurationError) as raised, open_clock(tmp_path):
        pass
    assert str(raised.value) == f"the fixture perdure_clock needs the package {package}: pip install 'perdure[testing]'"


def test_the_web_needs_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extra, "find_spec", lambda name: None if name == "sse_starlette" else find_spec(name))
    monkeypatch.delitem(sys.modules, "perdure.web", raising=False)
    with pytest.raises(ConfigurationError) as raised:
        import_module("perdure.web")
    assert str(raised.value) == "perdure.web needs the package sse-starlette: pip install 'perdure[web]'"


def test_traces_need_the_api_of_opentelemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "opentelemetry" else find_spec(name))
    monkeypatch.delitem(sys.modules, "perdure.otel", raising=False)
    with pytest.raises(ConfigurationError) as raised:
        import_module("perdure.otel")
    assert str(raised.value) == "perdure.otel needs the package opentelemetry-api: pip install 'perdure[otel]'"
