"""Files that commands read: pipes, devices, folders and huge lines are refused at once, with the reason."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from perdure.worker.cli.support import options

from tests.support.command_line import call

pytestmark = [pytest.mark.integration, pytest.mark.timeout(60)]

COMMANDS = (
    ("enqueue", "t", "--queue", "q", "--file"),
    ("task", "import"),
    ("memory", "add", "--file"),
    ("identity", "set", "agent"),
)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: None) -> None:
    monkeypatch.setenv("PERDURE_MEMORY", str(tmp_path / "memory.sqlite3"))


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
@pytest.mark.parametrize(("kind", "problem"), [("pipe", "a pipe"), ("folder", "a folder"), ("device", "a device")])
def test_only_regular_files_are_read(command: tuple[str, ...], kind: str, problem: str, tmp_path: Path) -> None:
    file = tmp_path / kind
    match kind:
        case "pipe":
            os.mkfifo(file)
        case "folder":
            file.mkdir()
        case "device":
            file.symlink_to("/dev/zero")
    refused = call(*command, str(file))
    assert refused.code == 2
    assert f"could not read {file}: it must be a regular file, and is {problem}" in refused.err


def test_a_line_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "MAX_LINE", 1_000)
    file = tmp_path / "tasks.jsonl"
    file.write_bytes(b'{"args": {}}\n' + b"x" * 2_000)
    refused = call("enqueue", "t", "--queue", "q", "--file", str(file))
    assert refused.code == 2
    assert "line 2: it has more than 1,000 bytes" in refused.err


def test_an_identity_is_bounded_text(tmp_path: Path) -> None:
    file = tmp_path / "identity.json"
    for data, problem in ((b"\xff", "it must be UTF-8"), (b" " * 2_000_000, "it has more than 1,048,576 bytes")):
        file.write_bytes(data)
        refused = call("identity", "set", "agent", str(file))
        assert refused.code == 2
        assert problem in refused.err
