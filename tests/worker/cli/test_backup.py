"""`perdure backup`, `restore` and `migrate`: what they print and refuse."""

from __future__ import annotations

import asyncio
import os
import stat
from pathlib import Path

import pytest
import redis.asyncio
from perdure import Producer, Settings, State

from tests.support.acl import documented_rights
from tests.support.command_line import Answer, call
from tests.support.servers import RedisServer

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("environment")]


async def run(*args: object) -> Answer:
    return await asyncio.to_thread(call, *map(str, args))


async def test_a_namespace_is_written_and_restored(settings: Settings, tmp_path: Path) -> None:
    file = tmp_path / "shop.backup"
    async with Producer(settings.redis_url, namespace=settings.namespace) as producer:
        handle = await producer.enqueue("pack", queue="shop")
        answer = await run("backup", file, "--json")
        assert (answer.code, answer.json["changed"]) == (0, [])
        assert answer.json["bytes"] == file.stat().st_size
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        again = await run("backup", file)
        assert (again.code, again.err) == (1, f"perdure: {file} exists already: choose another name, or use --force\n")
        assert (await run("backup", file, "--force")).err.startswith("perdure: wrote ")
        refused = await run("restore", file)
        assert (refused.code, "has data: --replace deletes it" in refused.err) == (1, True)
        await handle.cancel()
        restored = await run("restore", file, "--replace", "--yes", "--json")
        assert (restored.code, restored.json["keys"]) == (0, answer.json["keys"])
        assert await handle.status() is State.QUEUED


async def test_files_that_cannot_be_used_are_one_sentence(settings: Settings, tmp_path: Path) -> None:
    async with Producer(settings.redis_url, namespace=settings.namespace) as producer:
        await producer.enqueue("pack", queue="shop")
    missing = await run("restore", tmp_path / "missing")
    assert (missing.code, missing.err) == (1, f"perdure: could not use {tmp_path}/missing: No such file or directory\n")
    (tmp_path / "text").write_text("hello")
    assert "is no complete backup: Not a gzipped file" in (await run("restore", tmp_path / "text")).err
    nowhere = await run("backup", tmp_path / "nowhere" / "file")
    assert (nowhere.code, "No such file or directory" in nowhere.err) == (1, True)
    assert nowhere.err.count("\n") == 1


async def test_a_queue_that_changes_meanwhile_is_noticed(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "shop.backup"
    async with Producer(settings.redis_url, namespace=settings.namespace) as producer:
        await producer.enqueue("pack", queue="shop")
        figures = iter([{"shop": 1}, {"shop": 2}, {"shop": 1}, {"shop": 2}])

        async def signature(*_: object) -> dict[str, int]:
            return next(figures)

        monkeypatch.setattr("perdure.worker.cli.backup.signature", signature)
        answer = await run("backup", file)
        assert (answer.code, file.exists()) == (1, False)
        assert "queues shop changed while they were read: stop producers, or use --live" in answer.err
        assert await asyncio.to_thread(os.listdir, tmp_path) == []
        live = await run("backup", file, "--live")
        assert (live.code, "queues shop changed meanwhile" in live.err) == (0, True)


async def test_a_restore_that_fails_says_how_to_go_on(server_program: Path, settings: Settings, tmp_path: Path) -> None:
    file = tmp_path / "shop.backup"
    async with Producer(settings.redis_url, namespace=settings.namespace) as producer:
        await producer.enqueue_many("pack", [{"name": str(number) * 5000} for number in range(400)], queue="shop")
    assert (await run("backup", file)).code == 0
    server = await asyncio.to_thread(RedisServer(server_program, options=("--maxmemory", "3mb")).start)
    try:
        answer = await run("restore", file, "--redis-url", server.url)
        assert (answer.code, answer.err.count("perdure: the restore has not ended")) == (1, 1)
        assert "every process refuses the namespace until 'perdure restore' is given again" in answer.err
        assert "a restore of it is under way" in (await run("backup", file, "--redis-url", server.url, "--force")).err
    finally:
        await asyncio.to_thread(server.stop)


async def test_the_user_with_all_rights_may_do_it(server_program: Path, tmp_path: Path) -> None:
    server = await asyncio.to_thread(RedisServer(server_program).start)
    try:
        async with redis.asyncio.Redis(unix_socket_path=str(server.socket)) as client:
            rights = documented_rights("perdure", version=(await client.info("server"))["redis_version"])
            await client.execute_command("ACL", "SETUSER", "perdure", "on", ">secret", *rights)
        place = ("--redis-url", f"unix://perdure:secret@{server.socket}", "--namespace", "perdure")
        file = tmp_path / "shop.backup"
        assert (await run("enqueue", "pack", "--queue", "shop", *place)).code == 0
        for command in (("backup", file), ("restore", file, "--replace", "--yes"), ("migrate",)):
            answer = await run(*command, *place)
            assert answer.code == 0, answer.err
    finally:
        await asyncio.to_thread(server.stop)


async def test_there_is_nothing_to_migrate(settings: Settings) -> None:
    async with Producer(settings.redis_url, namespace=settings.namespace) as producer:
        await producer.enqueue("pack", queue="shop")
    for options in ((), ("--dry-run",)):
        answer = await run("migrate", *options, "--json")
        assert (answer.code, answer.json["migrations"], answer.json["keys"]) == (0, [], 0)
    assert "nothing to migrate in namespace" in (await run("migrate")).err
