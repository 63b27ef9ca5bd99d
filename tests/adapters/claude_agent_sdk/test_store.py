"""The store of sessions: the contracts of the SDK, and what they leave open."""

from __future__ import annotations

import asyncio
from itertools import count
from typing import Any

import pytest
from claude_agent_sdk import SessionKey, list_sessions_from_store
from claude_agent_sdk.testing import run_session_store_conformance
from perdure import App
from perdure.integrations.claude_agent_sdk import PerdureSessionStore
from perdure.testing import PerdureFixture

KEY: SessionKey = {"project_key": "project", "session_id": "5d1f3e0a-8f6e-4a77-9d3c-0d9f5a3b7c11"}


async def test_the_14_contracts_of_the_sdk(perdure: PerdureFixture) -> None:
    numbers = count()
    async with App("store") as app:
        await run_session_store_conformance(lambda: PerdureSessionStore(app, f"sessions-{next(numbers)}"))
    assert next(numbers) == 15  # one of each contract, and the one that is asked for its methods


async def test_lines_of_two_writers_are_all_kept_and_repeated_ones_are_read_once(perdure: PerdureFixture) -> None:
    async with App("store") as app:
        first, second = PerdureSessionStore(app), PerdureSessionStore(app)
        lines: list[Any] = [{"type": "user", "uuid": str(number)} for number in range(20)]
        await asyncio.gather(*((first, second)[number % 2].append(KEY, [line]) for number, line in enumerate(lines)))
        await first.append(KEY, lines[:3])
        await first.append(KEY, [{"type": "title"}, {"type": "title"}])
        found = await second.load(KEY) or []
        assert sorted(int(line["uuid"]) for line in found if "uuid" in line) == list(range(20))  # type: ignore[typeddict-item]
        assert len(found) == 22


async def test_the_sdk_lists_sessions_by_their_summaries(perdure: PerdureFixture) -> None:
    async with App("store") as app:
        store = PerdureSessionStore(app)
        line: Any = {
            "type": "user",
            "uuid": "a",
            "timestamp": "2026-01-01T00:00:00.000Z",
            "message": {"role": "user", "content": "What is a lease?"},
        }
        await store.append({**KEY, "project_key": "-tmp"}, [line])
        (found,) = await list_sessions_from_store(store, directory="/tmp")
        assert (found.session_id, found.first_prompt) == (KEY["session_id"], "What is a lease?")


def test_a_name_that_is_not_valid_is_refused(perdure: PerdureFixture) -> None:
    with pytest.raises(ValueError, match="namespace of the store"):
        PerdureSessionStore(App("store"), "")
