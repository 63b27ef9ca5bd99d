"""`perdure store`: namespaces and entries of the key-value store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from perdure import App, Settings, StoreError

from tests.support.command_line import Answer, call

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("environment")]


async def tool(*args: str) -> Answer:
    return await asyncio.to_thread(call, "store", *args)


@pytest.fixture
async def app(settings: Settings) -> AsyncIterator[App]:
    async with App("stored", settings=settings) as app:
        yield app


async def test_namespaces_and_entries_are_listed_page_by_page(app: App) -> None:
    assert "the store has no entries" in (await tool("list")).err
    threads = app.store("threads", "a/b")
    for key in ("c/1", "c/2", "d"):
        await threads.put(key, {"n": 1}, ttl=3600 if key == "d" else None)
    await app.store("visits").put("n", b"\xff")
    assert (await tool("list", "--json")).json == [
        {"namespace": "threads/a%2Fb", "parts": ["threads", "a/b"]},
        {"namespace": "visits", "parts": ["visits"]},
    ]
    first = await tool("list", "--limit", "1")
    assert "threads/a%2Fb" in first.out
    assert "continue with --after threads/a%2Fb" in first.err
    assert [row["namespace"] for row in (await tool("list", "--after", "threads/a%2Fb", "--json")).json] == ["visits"]
    assert (await tool("list", "--prefix", "v", "--json")).json[0]["parts"] == ["visits"]
    rows = (await tool("list", "threads/a%2Fb", "--json")).json
    assert [(row["key"], row["form"], row["expires_at"] is None) for row in rows] == [
        ("c/1", "json", True),
        ("c/2", "json", True),
        ("d", "json", False),
    ]
    page = await tool("list", "threads/a%2Fb", "--prefix", "c/", "--after", "c/1", "--limit", "1")
    assert ("c/2" in page.out, "c/1" in page.out) == (True, False)
    assert "bytes" in (await tool("list", "visits")).out
    assert "has no such entries" in (await tool("list", "other")).err


async def test_a_value_that_is_no_json_is_an_error_with_a_remedy(app: App) -> None:
    """A value that another program has cut off, for callers and on the command line."""
    notes = app.store("notes")
    await notes.put("cut", "x" * 100)
    gateway = app.producer.gateway
    key = app.producer.namespace.store(("notes",)).entries
    stored = await gateway.command("HGET", key, "e:cut")
    await gateway.command("HSET", key, "e:cut", stored[:-20])
    damaged = "could not read entry 'cut' of namespace 'notes': another program has changed it; delete it"
    with pytest.raises(StoreError, match=f"^{damaged}$"):
        await notes.get("cut")
    found = await tool("show", "notes", "cut")
    assert (found.code, found.err) == (1, f"perdure: {damaged}\n")


async def test_show_prints_the_value_and_delete_removes_it(app: App) -> None:
    notes = app.store("notes")
    put = await notes.put("a", {"text": "x"})
    await notes.put("raw", b"\xff")
    assert '"text": "x"' in (await tool("show", "notes", "a")).out
    shown = (await tool("show", "notes", "a", "--json")).json
    assert (shown["value"], shown["version"]) == ({"text": "x"}, put.version)
    assert (await tool("show", "notes", "raw", "--json")).json["value"] == {"base64": "/w=="}
    missing = await tool("show", "notes", "b")
    assert (missing.code, "namespace 'notes' has no entry 'b'" in missing.err) == (1, True)
    assert (await tool("delete", "notes", "a")).code == 2
    assert await notes.get("a") == {"text": "x"}
    assert "deleted entry 'a' of namespace 'notes'" in (await tool("delete", "notes", "a", "--yes")).err
    assert (await tool("delete", "notes", "a", "--yes")).code == 1
    assert await notes.get_many(["a", "raw"]) == {"raw": b"\xff"}
    assert (await tool("delete", "notes", "--yes")).code == 0
    assert (await tool("delete", "notes", "--yes")).code == 1
    wrong = await tool("show", "a//b", "k")
    assert (wrong.code, "namespace of the store must be 1 to 16 texts" in wrong.err) == (2, True)
    assert (await tool("show", "a", "")).code == 2
