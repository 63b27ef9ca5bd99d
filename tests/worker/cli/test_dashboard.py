"""`perdure dashboard`: who may reach it, what it serves, and how it stops."""

from __future__ import annotations

import getpass
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest
from perdure.worker.web import extra

from tests.support.command_line import BOUND, Running, call

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("environment")]


@contextmanager
def running(folder: Path, *options: str) -> Iterator[tuple[Running, str]]:
    """Start the dashboard on a free port; yield the command and the address in its log."""
    with Running("dashboard", "--port", "0", *options, cwd=folder) as command:
        deadline = time.monotonic() + BOUND
        while (found := re.search(r"dashboard at (http://\S+)", (folder / "stderr").read_text())) is None:
            assert command.process.poll() is None, (folder / "stderr").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield command, found[1].rstrip("/")


@pytest.mark.processes
def test_it_serves_the_user_of_this_machine_read_only_until_a_signal(tmp_path: Path) -> None:
    with running(tmp_path) as (command, url):
        assert url.startswith("http://127.0.0.1:")
        page = httpx.get(url, timeout=BOUND)
        assert page.status_code == 200
        assert "read-only" in page.text
        assert f"<span>{getpass.getuser()}</span>" in page.text
        assert httpx.get(url, headers={"host": "evil.example"}, timeout=BOUND).status_code == 403
        command.send(signal.SIGTERM)
        assert command.wait().code == 0


@pytest.mark.processes
def test_it_asks_others_for_a_token_and_works_below_a_path(tmp_path: Path) -> None:
    token = call("web", "token", "ada", "--role", "operator", "--tokens", str(tmp_path / "tokens.toml")).out.strip()
    options = ["--actions", "--tokens", "tokens.toml", "--secret-file", "secret", "--root-path", "/fleet"]
    with (
        running(tmp_path, *options, "--allow-host", "Perdure.Example") as (_, url),
        httpx.Client(timeout=BOUND) as client,
    ):
        here = url.removesuffix("/fleet")
        asked = client.get(here)
        assert asked.headers["location"] == "/fleet/sign-in?next=%2F"
        assert client.get(here, headers={"host": "perdure.example"}).status_code == 303
        signed = client.post(f"{here}/sign-in", data={"token": token}, headers={"origin": here})
        assert signed.headers["location"] == "/fleet/"
        cookie = signed.headers["set-cookie"].partition(";")[0]
        page = client.get(here, headers={"cookie": cookie})
        assert "ada" in page.text
        assert "read-only" not in page.text
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600


def test_another_host_needs_tokens() -> None:
    answer = call("dashboard", "--host", "0.0.0.0")
    assert answer.code == 2
    assert answer.err == (
        "perdure: --tokens must name a file, since other machines reach 0.0.0.0: perdure web token NAME --role viewer "
        "--tokens tokens.toml\n"
    )


def test_a_missing_token_file_is_named(tmp_path: Path) -> None:
    answer = call("dashboard", "--tokens", str(tmp_path / "none.toml"))
    assert answer.code == 2
    assert f"could not read the token file {tmp_path / 'none.toml'}: No such file or directory" in answer.err


@pytest.mark.parametrize("package", extra.PACKAGES)
def test_a_missing_package_is_named_with_its_extra(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extra, "find_spec", lambda name: None if name == package else find_spec(name))
    answer = call("dashboard")
    shown = package.replace("_", "-")
    assert (answer.code, answer.err) == (
        1,
        f"perdure: the dashboard needs the package {shown}: pip install 'perdure[web]'\n",
    )
