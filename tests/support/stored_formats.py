"""Stored data of each format of Perdure, as JSON: written by a scripted scenario, and restored into a server by tests.

`python -m tests.support.stored_formats REDIS_URL` runs the scenario in a namespace of its own, deletes it, and writes
tests/project/formats/N.json for the format N of this version. Add `--replace` while no released version writes that
format. After a release the file is evidence of what that version has stored, and stays as it is.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

import orjson
from perdure import App, Context, Retry, Settings, State, TaskHandle
from perdure.queues import DATA_FORMAT, Gateway, Namespace, pairs

from tests.support.paths import ROOT
from tests.support.workers import running_worker, wait_until

__all__ = ["FORMATS", "build", "dump", "restore", "scenario"]

FORMATS = ROOT / "tests" / "project" / "formats"

_NAME = "NAMESPACE"
"""Stands for the name of the namespace in the keys of a file."""

_PASSING = ("lock", "nudge", "seen", "mark", "registry")
"""Kinds of keys that no later process reads: they live for seconds, or only while a worker does."""


def build(settings: Settings, ran: list[str], *, mended: bool) -> App:
    """Return the app of the scenario. ran: receives the name of each step that runs. mended: nothing fails any more."""
    app = App("formats", settings=settings)

    def note(name: str) -> str:
        ran.append(name)
        return f"{name} done"

    @app.task
    async def succeeds(ctx: Context) -> str:
        return await ctx.step("only", note, "only")

    @app.task(retry=Retry(max_attempts=3, base=3600.0, jitter=0.0))
    async def retries(ctx: Context) -> list[str]:
        found = [await ctx.step("first", note, "first"), await ctx.options(risky=True).step("second", note, "second")]
        if not mended:
            raise ValueError("not yet")
        return found

    @app.task(retry=Retry(max_attempts=1))
    async def dies(ctx: Context) -> str:
        found = await ctx.step("before", note, "before")
        if not mended:
            raise ValueError("given up")
        return found

    @app.task
    async def listens(ctx: Context) -> list[Any]:
        opened = await ctx.step("open", note, "open")
        first = await ctx.inbox(wait=3600)
        second = await ctx.inbox(wait=3600, sender="ada")
        return [opened, *(one.content for one in (*first, *second))]

    return app


async def scenario(settings: Settings) -> None:
    """Leave tasks in every state that data can rest in: ended, dead, parked, scheduled after a failure, queued."""
    ran: list[str] = []
    async with build(settings, ran, mended=False) as app:
        tasks = app.tasks
        handles = {name: await tasks[name].options(task_id=name).enqueue() for name in tasks}
        await handles["listens"].send("early", sender="bob", message_id="one")
        ends = {"succeeds": State.SUCCEEDED, "retries": State.SCHEDULED, "dies": State.DEAD, "listens": State.SCHEDULED}
        async with running_worker(app):
            for name, state in ends.items():
                await wait_until(partial(_is, handles[name], state), f"{name} is {state}")
        await handles["listens"].send("not hers", sender="bob", message_id="two")
        await tasks["succeeds"].options(task_id="delayed", delay=3600).enqueue()
        await tasks["succeeds"].options(task_id="queued").enqueue()


async def _is(handle: TaskHandle[Any], state: State) -> bool:
    return (await handle.record()).state is state


async def dump(gateway: Gateway, namespace: Namespace) -> dict[str, Any]:
    """Return the lasting keys of a namespace as JSON data."""
    found: dict[str, Any] = {}
    for pattern in (f"{{{namespace.name}:*", f"{{{namespace.name}}}:*"):
        cursor = b"0"
        while True:
            cursor, keys = await gateway.command("SCAN", cursor, "MATCH", pattern, "COUNT", 1000)
            for key in sorted(keys):
                name = key.decode().replace(f"{{{namespace.name}", f"{{{_NAME}")
                if name.partition("}:")[2].partition(":")[0] not in _PASSING:
                    found[name] = await _dumped(gateway, key.decode())
            if cursor == b"0":
                break
    return found


async def _dumped(gateway: Gateway, key: str) -> dict[str, Any]:
    kind = _text(await gateway.command("TYPE", key))
    match kind:
        case "hash":
            fields = pairs(await gateway.command("HGETALL", key))
            content: Any = {_text(name): _text(value) for name, value in fields.items()}
        case "zset":
            flat = await gateway.command("ZRANGE", key, 0, -1, "WITHSCORES")
            content = {_text(name): float(score) for name, score in pairs(flat).items()}
        case "stream":
            entries = await gateway.command("XRANGE", key, "-", "+")
            groups = [pairs(one) for one in await gateway.command("XINFO", "GROUPS", key)]
            content = {
                "entries": [[_text(entry), [_text(part) for part in fields]] for entry, fields in entries],
                "delivered": {_text(one[b"name"]): _text(one[b"last-delivered-id"]) for one in groups},
            }
        case _:
            raise AssertionError(f"{key} is a {kind}")
    return {"type": kind, "expires": await gateway.command("PTTL", key) > 0, "content": content}


def _text(data: Any) -> str:
    """Return stored data as text, without what only this machine has."""
    text = data.decode() if isinstance(data, bytes) else str(data)
    return text.replace(str(ROOT), "/app").replace(socket.gethostname(), "host")


async def restore(gateway: Gateway, namespace: Namespace, data: Mapping[str, Any]) -> None:
    """Store the keys of a file under a namespace."""
    for name, one in data.items():
        key, content = name.replace(f"{{{_NAME}", f"{{{namespace.name}"), one["content"]
        match one["type"]:
            case "hash":
                await gateway.command("HSET", key, *(part for field in content.items() for part in field))
            case "zset":
                scores = ((score, member) for member, score in content.items())
                await gateway.command("ZADD", key, *(part for pair in scores for part in pair))
            case "stream":
                for entry, fields in content["entries"]:
                    await gateway.command("XADD", key, entry, *fields)
                for group, delivered in content["delivered"].items():
                    await gateway.command("XGROUP", "CREATE", key, group, delivered, "MKSTREAM")
        if one["expires"]:
            await gateway.command("PEXPIRE", key, 3_600_000)


async def _stored(url: str) -> bytes:
    """Run the scenario, and return what it has stored."""
    namespace = Namespace("stored-formats")
    settings = Settings(redis_url=url, namespace=namespace.name)
    await scenario(settings)
    async with build(settings, [], mended=True) as app:
        gateway = app.producer.gateway
        found = await dump(gateway, namespace)
        for pattern in (f"{{{namespace.name}:*", f"{{{namespace.name}}}:*"):
            for key in await gateway.command("KEYS", pattern):
                await gateway.command("DEL", key)
    return orjson.dumps(found, option=orjson.OPT_INDENT_2) + b"\n"


def main() -> None:
    file = FORMATS / f"{DATA_FORMAT}.json"
    if file.exists() and "--replace" not in sys.argv:
        sys.exit(f"{file} exists; --replace writes it again, if no released version has stored such data")
    file.write_bytes(asyncio.run(_stored(sys.argv[1])))


if __name__ == "__main__":
    main()
