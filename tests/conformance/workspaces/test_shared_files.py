"""Shared workspaces: compare-and-set per file, versions that are never used again, retention."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from perdure import Settings
from perdure.queues import Gateway, Namespace
from perdure.queues.transport.scripts import Script
from perdure.worker.errors import FileConflict, WorkspaceError, WorkspaceTooLarge
from perdure.worker.workspace.shared_workspace import SharedWorkspace, shared_hashes


@pytest.fixture
def files(gateway: Gateway, namespace: Namespace, tmp_path: Path) -> SharedWorkspace:
    settings = Settings(namespace=namespace.name, artifacts=str(tmp_path), workspace_files=3)
    return SharedWorkspace(gateway, settings, "team", by="ada")


async def test_a_file_is_read_as_it_was_written(files: SharedWorkspace) -> None:
    written = await files.write("notes/a.md", "one")
    assert (await files.find("notes/a.md")) == written
    assert (await files.read("notes/a.md"), written.size, written.by) == (b"one", 3, "ada")
    assert await files.find("b.md") is None
    with pytest.raises(WorkspaceError, match="has no file"):
        await files.read("b.md")


async def test_a_write_requires_the_version_that_was_read(files: SharedWorkspace) -> None:
    first = await files.write("a.md", "one", expected=0)
    second = await files.write("a.md", "two", expected=first.version)
    assert second.version > first.version
    with pytest.raises(FileConflict, match="written by ada") as conflict:
        await files.write("a.md", "three", expected=first.version)
    assert (conflict.value.expected, conflict.value.version) == (first.version, second.version)
    with pytest.raises(FileConflict, match="has no version"):
        await files.write("b.md", "one", expected=first.version)
    with pytest.raises(FileConflict):
        await files.remove("a.md", expected=first.version)
    assert await files.read("a.md") == b"two"
    assert await files.read(first) == b"one", "the bytes of a version stay until the collector removes them"


async def test_of_concurrent_writers_one_wins(files: SharedWorkspace) -> None:
    first = await files.write("a.md", "")
    answers = await asyncio.gather(
        *[files.write("a.md", str(number), expected=first.version) for number in range(8)], return_exceptions=True
    )
    assert sum(isinstance(answer, FileConflict) for answer in answers) == 7


async def test_a_version_is_not_used_again_after_a_removal(files: SharedWorkspace) -> None:
    first = await files.write("a.md", "one")
    await files.remove("a.md", expected=first.version)
    await files.remove("a.md", expected=first.version)  # as after a lost reply
    again = await files.write("a.md", "one", expected=0)
    assert again.version > first.version
    assert [file.path for file in await files.list()] == ["a.md"]


async def test_the_number_of_files_is_limited(files: SharedWorkspace) -> None:
    for name in ("a", "b", "c", "c"):
        await files.write(name, name)
    with pytest.raises(WorkspaceTooLarge, match="PERDURE_WORKSPACE_FILES"):
        await files.write("d", "d")
    await files.remove("a")
    await files.write("d", "d")
    assert [file.path for file in await files.list()] == ["b", "c", "d"]


@pytest.mark.parametrize("act", ["write", "remove"])
async def test_a_change_that_is_repeated_after_a_lost_reply_does_not_undo_a_later_one(
    files: SharedWorkspace, gateway: Gateway, monkeypatch: pytest.MonkeyPatch, act: str
) -> None:
    await files.write("a.md", "one")
    run, sent = gateway.run, []

    async def twice(script: Script, keys: Any, args: Any) -> Any:
        sent.append(args)
        reply = await run(script, keys, args)
        if len(sent) == 1:  # its reply is lost, and another agent writes before it is sent again
            await files.write("a.md", "newer")
            assert await run(script, keys, args) == reply
        return reply

    with monkeypatch.context() as patch:
        patch.setattr(gateway, "run", twice)
        mine = await (files.write("a.md", "two") if act == "write" else files.remove("a.md"))
    assert await files.read("a.md") == b"newer"
    if mine is not None:
        with pytest.raises(FileConflict):
            await files.write("a.md", "three", expected=mine.version)


async def test_a_workspace_remembers_a_bounded_number_of_changes(
    files: SharedWorkspace, gateway: Gateway, namespace: Namespace
) -> None:
    for _ in range(103):
        await files.write("a.md", "same")
    await files.remove("a.md")
    names = await gateway.command("HKEYS", namespace.workspace("team"))
    assert sum(name.startswith((b"id:", b"n:")) for name in names) == 200


@pytest.mark.parametrize("path", ["", "/etc/passwd", "../a", "a/../../b", "a\nb", "a//b"])
async def test_a_path_that_leaves_the_workspace_is_refused(files: SharedWorkspace, path: str) -> None:
    with pytest.raises(WorkspaceError, match="cannot be used"):
        await files.write(path, "x")


async def test_a_workspace_expires_after_its_last_change(
    files: SharedWorkspace, gateway: Gateway, namespace: Namespace
) -> None:
    written = await files.write("a.md", "one")
    assert [digest async for digest in shared_hashes(gateway, namespace)] == [written.hash]
    month = 30 * 86_400 * 1000
    for key in (namespace.workspace("team"), namespace.workspaces):
        assert month - 60_000 < await gateway.command("PTTL", key) <= month


async def test_a_writer_with_a_shorter_retention_does_not_unlink_another_workspace(
    gateway: Gateway, namespace: Namespace, tmp_path: Path
) -> None:
    """The index must last as long as the workspace that lasts longest, or the collector deletes that one's files."""
    kept, brief = (Settings(namespace=namespace.name, artifacts=str(tmp_path), workspace_ttl=ttl) for ttl in (900, 60))
    written = await SharedWorkspace(gateway, kept, "kept").write("a.md", "one")
    await SharedWorkspace(gateway, brief, "brief").write("b.md", "two")
    left = int(await gateway.command("PTTL", namespace.workspaces))
    assert left > 800_000
    assert written.hash in [digest async for digest in shared_hashes(gateway, namespace)]
