"""A worker that cannot start: one sentence with the cause and the remedy, and nothing else."""

from __future__ import annotations

import socket
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis
from perdure.queues.errors import Refused
from perdure.worker.cli.support.errors import explained
from perdure.worker.settings import Settings
from typer import Exit

from tests.support.command_line import process

APP = "from perdure import App\napp = App('shop')\n@app.task\nasync def pay(ctx): ...\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "start_errors_app.py").write_text(APP)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refusal(*options: str, code: int) -> str:
    """Return the only line of a worker, which is a process, since it makes its own end sure (`force_exit`)."""
    answer = process("worker", "run", "start_errors_app.py:app", "--burst", *options)
    assert (answer.code, answer.out) == (code, "")
    [line] = answer.err.splitlines()
    return line


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = refusal("--health-port", str(port), code=1)
    assert said == (
        f"perdure: --health-port: could not listen on 127.0.0.1:{port}: Address already in use; choose another port "
        "(0: any free one) or another --health-host"
    )


def test_a_right_that_an_acl_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Exit) as left, explained():
        raise Refused("redis://host refused TIME; roles with the rights: worker: User bob has no permissions")
    assert left.value.exit_code == 1
    assert capsys.readouterr().err.endswith("; 'perdure doctor --role ROLE' lists all that a user lacks\n")


@pytest.mark.integration
@pytest.mark.processes
@pytest.mark.parametrize("command", ["xreadgroup", "xautoclaim"])
def test_a_user_that_may_not_read_or_claim(command: str, settings: Settings, folder: Path) -> None:
    place, user = urlsplit(settings.redis_url), f"less-{command}"
    with redis.Redis.from_url(settings.redis_url) as admin:
        admin.execute_command("ACL", "SETUSER", user, "reset", "on", ">pw", "~*", "&*", "+@all", f"-{command}")
        try:
            url = place._replace(netloc=f"{user}:pw@{place.netloc.rpartition('@')[2]}").geturl()
            options = ("--no-supervisor", "--redis-url", url, "--namespace", settings.namespace)
            answer = process("worker", "run", "start_errors_app.py:app", *options, cwd=folder)
        finally:
            admin.execute_command("ACL", "DELUSER", user)
    last = answer.err.splitlines()[-1]
    assert answer.code == 1
    assert f"refused {command.upper()} on {{{settings.namespace}:*}}:ready; roles with the rights: worker" in last
    assert last.endswith("'perdure doctor --role ROLE' lists all that a user lacks")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("LEASE", "soon", "PERDURE_LEASE: must be a number of seconds, or a duration such as 90s"),
        ("ENCRYPTION_KEYS", "zz", "PERDURE_ENCRYPTION_KEYS: key 1 must be 32 bytes in base64; generate one"),
        ("ENCRYPTION_KEY_FILE", "/nowhere", "could not read key file /nowhere: No such file or directory"),
        ("ENCRYPTION_REQUIRED", "1", "encryption is required and there is no key: set PERDURE_ENCRYPTION_KEYS"),
        ("WEBHOOK_URL", "ftp://x", "PERDURE_WEBHOOK_URL: must be an http or https URL"),
        ("REDIS_URL", "http://x", "unknown scheme 'http' in 'http://x'; known are redis://host:6379/0"),
    ],
)
def test_a_broken_setting(name: str, value: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"PERDURE_{name}", value)
    assert said in refusal("--no-supervisor", code=2)


def test_a_data_directory_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERDURE_DATA_DIR", "/proc/nothing/here" if Path("/proc").exists() else "/dev/nothing/here")
    assert refusal("--no-supervisor", code=1).endswith("; name another one with PERDURE_DATA_DIR")
