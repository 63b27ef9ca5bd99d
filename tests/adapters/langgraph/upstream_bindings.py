"""The conftest of tests of savers and stores, in place of theirs: what they open as one of SQLite is one of Perdure."""

import contextlib
import inspect
import itertools
import os

import langgraph.checkpoint.sqlite
import langgraph.checkpoint.sqlite.aio
import langgraph.store.memory
import langgraph.store.sqlite
import perdure
import pytest
from perdure.integrations.langgraph import PerdureSaver, PerdureStore

app = perdure.App("upstream")
numbers = itertools.count()


class Store(PerdureStore):
    def __init__(self, *, index=None, ttl=None):
        super().__init__(app, name=f"items-{os.getpid()}-{next(numbers)}", index=index, ttl=ttl)

    def setup(self):
        """SQLite needs tables."""

    @classmethod
    @contextlib.contextmanager
    def from_conn_string(cls, address, *, index=None, ttl=None):
        yield cls(index=index, ttl=ttl)


class Saver(PerdureSaver):
    def __init__(self):
        super().__init__(app, name=f"threads-{os.getpid()}-{next(numbers)}")

    @classmethod
    @contextlib.contextmanager
    def from_conn_string(cls, address):
        yield cls()


class AsyncSaver(Saver):
    @classmethod
    @contextlib.asynccontextmanager
    async def from_conn_string(cls, address):
        async with app:
            yield cls()


langgraph.store.memory.InMemoryStore = Store
langgraph.store.sqlite.SqliteStore = Store
langgraph.checkpoint.sqlite.SqliteSaver = Saver
langgraph.checkpoint.sqlite.aio.AsyncSqliteSaver = AsyncSaver


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture
async def opened_app():
    async with app:
        yield


@pytest.fixture(autouse=True)
def open_app(request, monkeypatch):
    """Open the app for tests that are coroutines."""
    if inspect.iscoroutinefunction(getattr(request, "function", None)):
        request.getfixturevalue("opened_app")
    batched = getattr(request.module, "MockAsyncBatchedStore", None)
    if batched is not None:  # it calls the synchronous batch() of its store on the event loop

        async def abatch(self, ops):
            return await self._store.abatch(ops)

        monkeypatch.setattr(batched, "abatch", abatch)
