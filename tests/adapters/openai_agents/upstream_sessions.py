"""Tests of sessions from the source distribution of openai-agents, with a `PerdureSession` in place of theirs.

`test_upstream.py` runs this file in a process of its own, whose `tests` is the folder of the source distribution.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Generator
from types import ModuleType
from typing import Any

import pytest
import pytest_asyncio
import tests.extensions.memory.test_redis_session as redis_tests
import tests.memory.test_session as session_tests
import tests.memory.test_session_limit as limit_tests
from agents import set_tracing_disabled
from perdure import App
from perdure.integrations.openai_agents import PerdureSession

set_tracing_disabled(True)
pytestmark = pytest.mark.asyncio

app = App("sessions")

LEFT_OUT = {
    "sends transactions of a Redis client, which a store does not have": (
        "test_redis_session_rejects_cluster_transactions_before_pipeline",
        "test_mutation_cancellation_waits_for_authoritative_outcome",
    ),
    "calls a method or reads a key that RedisSession has beside the protocol": (
        "test_redis_connectivity",
        "test_from_url_constructor",
        "test_internal_client_ownership",
        "test_real_redis_decode_responses_compatibility",
        "test_get_next_id_method",
        "test_add_items_preserves_created_at_metadata",
        "test_session_settings_from_url",
    ),
    "replaces a history by a private method of RedisSession": (
        "test_compaction_replaces_redis_history_atomically",
        "test_atomic_replacement_preserves_clear_add_metadata",
        "test_atomic_replacement_serializes_before_deleting_history",
        "test_compaction_subclass_retains_overridden_storage_methods",
        "test_compaction_cancel_after_redis_commit_invalidates_cached_history",
        "test_atomic_replacement_rejects_colliding_counter_key",
        "test_cancelled_redis_compaction_handoff_remains_resumable",
    ),
    "is about connections, locks and threads of SQLiteSession": (
        "test_sqlite_session_close_closes_worker_thread_connections",
        "test_sqlite_session_reaps_connections_from_exited_worker_threads",
        "test_sqlite_session_closes_retired_connections_before_the_next_allocation",
        "test_sqlite_session_keeps_connections_of_live_worker_threads",
        "test_sqlite_session_closed_rejects_empty_add_items",
        "test_sqlite_session_file_lock_is_shared_across_instances",
        "test_sqlite_session_failed_add_items_releases_write_lock",
        "test_sqlite_session_failed_clear_session_rolls_back",
        "test_sqlite_session_failed_pop_item_releases_write_lock",
        "test_sqlite_session_rollback_failure_evicts_connection",
        "test_sqlite_session_close_retries_quarantined_connection",
        "test_sqlite_session_post_commit_cancellation_propagates_after_known_outcome",
    ),
    "writes rows that are no JSON into the table of SQLiteSession": (
        "test_sqlite_session_pop_item_skips_corrupt_most_recent",
        "test_sqlite_session_pop_item_returns_none_after_dropping_only_corrupt_rows",
        "test_sqlite_session_get_items_limit_skips_corrupt_newest_rows",
        "test_sqlite_session_get_items_session_settings_limit_skips_corrupt_rows",
    ),
    "calls the session in event loops of threads, and an app is open on one loop": (
        "test_sqlite_session_concurrent_access",
    ),
}
"""Tests that are left out, by the reason. `-k "not run_sync"` leaves out variants of others by the last one."""


class Closed:
    """Result of `close`, which some tests await."""

    def __await__(self) -> Generator[None, None, None]:
        return
        yield


class SessionOfTests(PerdureSession):
    """A session as the tests make it."""

    def __init__(self, session_id: str, db_path: Any = None, session_settings: Any = None) -> None:
        place = uuid.uuid4().hex if db_path in (None, ":memory:") else str(db_path)
        super().__init__(app, f"{place[-180:]}/{session_id}"[-256:], session_settings=session_settings)

    def close(self) -> Closed:
        return Closed()


class RedisSessionOfTests(SessionOfTests):
    """A session as the tests of RedisSession make it."""

    def __init__(
        self,
        session_id: str,
        *,
        redis_client: Any = None,
        key_prefix: str = "agents:session",
        ttl: int | None = None,
        session_settings: Any = None,
    ) -> None:
        super().__init__(session_id, key_prefix, session_settings)

    @classmethod
    def from_url(cls, session_id: str, *, url: str, **options: Any) -> RedisSessionOfTests:
        return cls(session_id, **options)


async def create(session_id: str | None = None, key_prefix: str = "", ttl: int | None = None) -> SessionOfTests:
    return SessionOfTests(session_id or "session", key_prefix or None)


session_tests.SQLiteSession = SessionOfTests  # type: ignore[attr-defined]
limit_tests.SQLiteSession = SessionOfTests  # type: ignore[attr-defined]
redis_tests.RedisSession = RedisSessionOfTests  # type: ignore[misc]
redis_tests._create_redis_session = create  # type: ignore[attr-defined]
redis_tests._create_test_session = create  # type: ignore[attr-defined]
agent = redis_tests.agent

MODULES: dict[str, ModuleType] = {"redis": redis_tests, "session": session_tests, "limit": limit_tests}
excluded = {name for names in LEFT_OUT.values() for name in names}
for prefix, module in MODULES.items():
    for name, function in list(vars(module).items()):
        if name.startswith("test_") and name not in excluded:
            globals()[f"test_{prefix}_{name.removeprefix('test_')}"] = function


@pytest_asyncio.fixture(autouse=True)
async def open_app() -> AsyncIterator[None]:
    async with app:
        yield
