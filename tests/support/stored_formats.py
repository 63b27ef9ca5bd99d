"""Stored data of each format of Perdure, as JSON: written by a scripted scenario, and restored into a server by tests.

`python -m tests.support.stored_formats REDIS_URL` runs the scenario in a namespace of its own, deletes it, and writes
tests/project/formats/N.json for the format N of this version. Add `--replace` while no released version writes that
format. After a release the file is evidence of what that version has stored, and stays as it is.
"""

from __future__ import annotations

import asyncio
import base64
import socket
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar
from unittest.mock import patch

import orjson
from perdure import Agent, AgentState, App, Context, PlanStep, Retry, Settings, State, TaskHandle
from perdure.queues import Gateway, Namespace
from perdure.queues.keys import DATA_FORMAT, GROUP
from perdure.queues.runtime import RUNTIME
from perdure.queues.security.encryption import is_encrypted
from perdure.queues.transport.scripts import pairs

from tests.support.consumers import promote
from tests.support.paths import ROOT
from tests.support.stored_data import FIRST, with_keys
from tests.support.workers import FRESH, recorded_steps, running_worker, take_and_die, wait_until

__all__ = ["FORMATS", "NAMESPACE", "SECRET", "build", "dump", "restore", "scenario"]

FORMATS = ROOT / "tests" / "project" / "formats"

NAMESPACE = "stored-formats"
"""Namespace of the scenario, and of every test that restores its data: encrypted values are bound to it."""

SECRET = "nobody but the task reads this"

_NAME = "NAMESPACE"
"""Stands for the name of the namespace in the keys of a file."""

_PASSING = ("lock", "nudge", "seen", "checked", "mark", "registry")
"""Kinds of keys that no later process reads: they live for seconds, or only while a worker does."""


def build(settings: Settings, ran: list[str], *, mended: bool) -> App:
    """Return the app of the scenario, which has encryption keys once it is mended.

    Args:
        ran: Receives the name of each step that runs.
        mended: Nothing fails and nothing waits for ever.
    """
    app = App("formats", settings=with_keys(settings, FIRST) if mended else settings)

    def note(name: str) -> str:
        ran.append(name)
        return f"{name} done"

    @app.task(queue="default")
    async def succeeds(ctx: Context) -> str:
        return await ctx.step("only", note, "only")

    later = Retry(max_attempts=3, base=3600.0, jitter=0.0)

    @app.task(queue="default", retry=later)
    async def retries(ctx: Context) -> list[str]:
        await ctx.emit("begin")
        await ctx.emit("keyed", key="one")
        found = [await ctx.step("first", note, "first"), await ctx.options(risky=True).step("second", note, "second")]
        if not mended:
            raise ValueError("not yet")
        return found

    @app.task(queue="default", retry=Retry(max_attempts=1))
    async def dies(ctx: Context) -> str:
        found = await ctx.step("before", note, "before")
        if not mended:
            raise ValueError("given up")
        return found

    @app.task(queue="default")
    async def listens(ctx: Context) -> list[Any]:
        opened = await ctx.step("open", note, "open")
        first = await ctx.inbox(wait=3600)
        second = await ctx.inbox(wait=3600, sender="ada")
        return [opened, *(one.content for one in (*first, *second))]

    @app.task(queue="default")
    async def stops(ctx: Context) -> str:
        found = await ctx.step("before", note, "before stopping")
        if not mended:
            await asyncio.sleep(3600)
        return found

    @app.task(queue="default", retry=later)
    async def child(ctx: Context, name: str) -> str:
        found = await ctx.step("only", note, f"child {name}")
        if name == "two" and not mended:
            raise ValueError("not yet")
        return found

    @app.task(queue="default")
    async def gathers(ctx: Context) -> list[str]:
        return await ctx.gather(child, ["one", "two", "three"], limit=1)

    @app.task(queue="default", retry=later)
    async def keeps(ctx: Context, secret: str) -> list[str]:
        await ctx.decide("keep it", reasoning=secret)
        found = await ctx.step("keep", note, secret)
        if not mended:
            raise ValueError("not yet")
        return [secret, found]

    @app.agent(name="reads", queue="default", retry=later)
    class Reader(Agent[AgentState]):
        snapshot_every: ClassVar[int] = 3

        async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
            return [PlanStep(key=key, title=f"read {key}") for key in ("one", "two")]

        async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> str:
            await ctx.decide(f"read {step.key}")
            found = await ctx.step("read", note, f"agent {step.key}")
            step.progress["read"] = True
            await ctx.checkpoint()
            if step.key == "two" and not mended:
                raise ValueError("not yet")
            return found

        async def finish(self, ctx: Context, state: AgentState) -> dict[str, Any]:
            return {"results": state.results, "decisions": [one.choice for one in state.decisions]}

    return app


async def scenario(settings: Settings) -> None:
    """Leave tasks in every state that data can rest in.

    Ended, dead, parked for a message, parked for children (one ended, one failed, one not launched), scheduled after a
    failure (a function, an agent, an encrypted function), released by a stopping worker, pending at a dead one, queued.
    """
    async with build(with_keys(settings, FIRST), [], mended=False) as app:
        keeps = await app.tasks["keeps"].options(task_id="keeps").enqueue(SECRET)
        async with running_worker(app):
            await wait_until(partial(_is, keeps, State.SCHEDULED), "keeps has failed")
    with patch.object(RUNTIME, "task_id", lambda: "child"):  # else the ids of children differ from run to run
        await _plain_tasks(settings)


async def _plain_tasks(settings: Settings) -> None:
    async with build(settings, [], mended=False) as app:
        tasks = app.tasks
        handles = {
            name: await tasks[name].options(task_id=name).enqueue()
            for name in ("succeeds", "retries", "dies", "listens", "gathers", "stops")
        }
        handles["reads"] = await tasks["reads"].options(task_id="reads").enqueue(goal="read it all")
        handles["pending"] = await tasks["retries"].options(task_id="pending").enqueue()
        await handles["listens"].send("early", sender="bob", message_id="one")
        ends = {"succeeds": State.SUCCEEDED, "dies": State.DEAD}
        ends |= dict.fromkeys(("retries", "reads", "pending"), State.SCHEDULED)
        ends |= dict.fromkeys(("listens", "gathers"), State.WAITING)
        async with running_worker(app):
            for name, state in ends.items():
                await wait_until(partial(_is, handles[name], state), f"{name} is {state}")
            failing = await app.producer.find("child-1")
            assert failing is not None
            await wait_until(partial(_is, failing, State.SCHEDULED), "a child has failed")
            await wait_until(partial(recorded_steps, app, handles["stops"]), "the step before the stop is recorded")
        await promote(app.producer.gateway, handles["pending"].partition, "pending")
        await take_and_die(app, queue="default")
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
        case "set":
            content = sorted(map(_text, await gateway.command("SMEMBERS", key)))
        case "list":
            content = [*map(_text, await gateway.command("LRANGE", key, 0, -1))]
        case "stream":
            entries = await gateway.command("XRANGE", key, "-", "+")
            groups = [pairs(one) for one in await gateway.command("XINFO", "GROUPS", key)]
            pending = await gateway.command("XPENDING", key, GROUP, "-", "+", 1000) if groups else []
            content = {
                "pending": [[_text(entry), _text(consumer), count] for entry, consumer, _, count in pending],
                "entries": [[_text(entry), [_text(part) for part in fields]] for entry, fields in entries],
                "delivered": {_text(one[b"name"]): _text(one[b"last-delivered-id"]) for one in groups},
            }
        case _:
            raise AssertionError(f"{key} is a {kind}")
    return {"type": kind, "expires": await gateway.command("PTTL", key) > 0, "content": content}


def _text(data: Any) -> str:
    """Return stored data as text, without what only this machine has; encrypted data as it is, in base64."""
    if isinstance(data, bytes) and is_encrypted(data):
        return _BASE64 + base64.b64encode(data).decode()
    text = data.decode() if isinstance(data, bytes) else str(data)
    return text.replace(str(ROOT), "/app").replace(socket.gethostname(), "host")


_BASE64 = "base64:"


def _stored(text: str) -> str | bytes:
    return base64.b64decode(text.removeprefix(_BASE64)) if text.startswith(_BASE64) else text


async def restore(gateway: Gateway, namespace: Namespace, data: Mapping[str, Any]) -> None:
    """Store the keys of a file under a namespace."""
    for name, one in data.items():
        key, content = name.replace(f"{{{_NAME}", f"{{{namespace.name}"), one["content"]
        match one["type"]:
            case "hash":
                await gateway.command("HSET", key, *(_stored(part) for field in content.items() for part in field))
            case "zset":
                scores = ((score, member) for member, score in content.items())
                await gateway.command("ZADD", key, *(part for pair in scores for part in pair))
            case "set":
                await gateway.command("SADD", key, *map(_stored, content))
            case "list":
                await gateway.command("RPUSH", key, *map(_stored, content))
            case "stream":
                for entry, fields in content["entries"]:
                    await gateway.command("XADD", key, entry, *map(_stored, fields))
                for group, delivered in content["delivered"].items():
                    await gateway.command("XGROUP", "CREATE", key, group, delivered, "MKSTREAM")
                for entry, consumer, count in content["pending"]:
                    how = ("IDLE", FRESH, "RETRYCOUNT", count, "FORCE", "JUSTID")
                    await gateway.command("XCLAIM", key, GROUP, consumer, 0, entry, *how)
        if one["expires"]:
            await gateway.command("PEXPIRE", key, 3_600_000)


async def _written(url: str) -> bytes:
    """Run the scenario, and return what it has stored."""
    namespace = Namespace(NAMESPACE)
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
    file.write_bytes(asyncio.run(_written(sys.argv[1])))


if __name__ == "__main__":
    main()
