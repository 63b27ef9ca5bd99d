"""Store for the sessions of the Claude Agent SDK: `PerdureSessionStore`.

A session is a namespace of the key-value store. Each call of `append` is one entry, with the transcript lines of the
call; the head of a transcript has the number of the next entry and the summary that the SDK keeps. Both are stored in
one batch, which requires the version of the head that was read: of two processes that append to one transcript, each
finds what the other has stored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

from claude_agent_sdk import (
    SessionKey,
    SessionListSubkeysKey,
    SessionStore,
    SessionStoreEntry,
    SessionStoreListEntry,
    SessionSummaryEntry,
    fold_session_summary,
)

from ...queues.errors import StoreConflict
from ..app import App
from ..store import Store, StoreEntry

_HEAD: Final = "head/"
"""Beginning of the key of the head of a transcript, which the path of the transcript follows."""

_LINES: Final = "lines/"
"""Beginning of the keys of its lines: the path of the transcript, a zero byte, a number."""

_TOGETHER: Final = 100
"""Sessions of a project whose heads are read at the same time."""


class PerdureSessionStore(SessionStore):
    """Keeps transcripts in Redis: `ClaudeAgentOptions(session_store=PerdureSessionStore(app))`.

    Within a task it is fenced: what a worker sends that was frozen, and whose task another one has continued, changes
    no transcript. The app must be open.
    """

    def __init__(self, app: App, name: str = "claude-sessions") -> None:
        """Name the store; nothing is sent.

        Args:
            app: app whose key-value store it uses.
            name: first part of the names of the namespaces.

        Raises `ValueError` if the name is not valid.
        """
        app.store(name)
        self._app = app
        self._name = name

    async def append(self, key: SessionKey, entries: list[SessionStoreEntry]) -> None:
        """Add lines to a transcript, in one act. A line whose id the transcript has is not read."""
        if not entries:
            return
        store, path = self._session(key), _path(key)
        while True:
            head = await store.entry(_HEAD + path)
            known: dict[str, Any] = {"next": 0, "summary": None} if head is None else head.value
            changed = {"next": known["next"] + 1, "summary": known["summary"]}
            if not path:
                changed["summary"] = fold_session_summary(_summary(key["session_id"], head), key, entries)["data"]
            try:
                async with store.batch() as batch:
                    batch.put(_HEAD + path, changed, expected=0 if head is None else head.version)
                    batch.put(f"{_lines(path)}{known['next']:012}", entries)
            except StoreConflict:
                continue  # another process has appended meanwhile
            return

    async def load(self, key: SessionKey) -> list[SessionStoreEntry] | None:
        """Return the lines of a transcript, None if nothing was appended to it."""
        found: list[SessionStoreEntry] = []
        known: set[object] = set()
        async for entry in self._session(key).list(_lines(_path(key))):
            for line in entry.value:
                name = line.get("uuid")
                if name is None or name not in known:
                    found.append(line)
                    known.add(name)
        return found or None

    async def list_sessions(self, project_key: str) -> list[SessionStoreListEntry]:
        """Return the sessions of a project, with the time of their last change in milliseconds."""
        return [{"session_id": session, "mtime": head.version} for session, head in await self._heads(project_key)]

    async def list_session_summaries(self, project_key: str) -> list[SessionSummaryEntry]:
        """Return the summaries of the sessions of a project."""
        found = [_summary(session, head) for session, head in await self._heads(project_key)]
        return [summary for summary in found if summary is not None]

    async def delete(self, key: SessionKey) -> None:
        """Delete a session with the transcripts of its subagents, or with a `subpath` that transcript."""
        store, path = self._session(key), _path(key)
        if not path:
            await store.clear()
            return
        async with store.batch() as batch:
            batch.delete_prefix(_lines(path))
            batch.delete(_HEAD + path)

    async def list_subkeys(self, key: SessionListSubkeysKey) -> list[str]:
        """Return the paths of the transcripts of a session's subagents."""
        found = self._session(key).list(_HEAD, values=False)
        return [path async for entry in found if (path := entry.key.removeprefix(_HEAD))]

    async def _heads(self, project: str) -> list[tuple[str, StoreEntry]]:
        """Return the ids of the sessions of a project, and the heads of their transcripts."""
        names = [name async for name in self._app.store.namespaces((self._name, project)) if len(name) == 3]
        found: list[tuple[str, StoreEntry]] = []
        for start in range(0, len(names), _TOGETHER):
            page = names[start : start + _TOGETHER]
            heads = await asyncio.gather(*(self._app.store(name).entry(_HEAD) for name in page))
            found += [(name[2], head) for name, head in zip(page, heads, strict=True) if head is not None]
        return found

    def _session(self, key: Mapping[str, Any]) -> Store:
        return self._app.store(self._name, key["project_key"], key["session_id"])


def _path(key: SessionKey) -> str:
    """Return the path of a transcript within its session; empty for the main one."""
    return key.get("subpath") or ""


def _lines(path: str) -> str:
    return f"{_LINES}{path}\0"


def _summary(session: str, head: StoreEntry | None) -> SessionSummaryEntry | None:
    """Return the summary in a head, None without one."""
    data = None if head is None else head.value["summary"]
    return None if head is None or data is None else {"session_id": session, "mtime": head.version, "data": data}
