"""The object that the fixture `perdure` gives to a test: a server and a namespace of the test."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Self
from urllib.parse import quote

from ...queues.durations import Duration
from ...queues.embedded.control import stop
from ...queues.embedded.server import EmbeddedServer
from ...queues.inspection.views import queue_partitions
from ...queues.keys import Namespace
from ...queues.transport.address import Address
from ...queues.transport.gateway import Gateway
from ..app import App
from ..sync_producer import close_sync_producers
from .enqueued import assert_enqueued, refute_enqueued
from .idle import drain, run_until_idle, run_worker

_PAGE = 1000


class PerdureFixture:
    """A namespace for one test. While it is open, all apps of the process use it, whatever their settings say.

    Attributes:
        redis_url: URL of the server.
        namespace: prefix of the test's keys, which are removed at the end.
        data_dir: folder of artifacts and memories.
    """

    assert_enqueued = staticmethod(assert_enqueued)
    refute_enqueued = staticmethod(refute_enqueued)
    run_worker = staticmethod(run_worker)
    drain = staticmethod(drain)

    def __init__(self, redis_url: str, data_dir: Path) -> None:
        self.redis_url = redis_url
        self.namespace = f"test-{uuid.uuid4().hex[:12]}"
        self.data_dir = data_dir

    @property
    def settings(self) -> dict[str, str]:
        """Settings that apps get, and subprocesses from PERDURE_* variables."""
        return {"redis_url": self.redis_url, "namespace": self.namespace, "data_dir": str(self.data_dir)}

    async def run_until_idle(
        self,
        app: App,
        *,
        wait_due: bool = False,
        allow_failures: bool = False,
        timeout: Duration = 30.0,
        concurrency: int = 16,
        queues: Sequence[str] | None = None,
    ) -> Counter[str]:
        """Run a worker until nothing is left to do, as `perdure.testing.run_until_idle` does."""
        __tracebackhide__ = True
        return await run_until_idle(
            app,
            wait_due=wait_due,
            allow_failures=allow_failures,
            timeout=timeout,
            concurrency=concurrency,
            queues=queues,
        )

    def __enter__(self) -> Self:
        close_sync_producers()  # one that stays open until the end of the process would keep its namespace
        self._outer, App.overrides = App.overrides, {**self.settings, "data_dir": self.data_dir}
        return self

    def __exit__(self, *raised: object) -> None:
        close_sync_producers()
        App.overrides = self._outer
        self._remove_keys()

    def _remove_keys(self) -> None:
        with ThreadPoolExecutor(1) as thread:  # the thread of the test may have an event loop that pytest keeps
            thread.submit(asyncio.run, _remove_keys(self.redis_url, self.namespace)).result()


@contextmanager
def embedded_server(folder: Path) -> Iterator[str]:
    """Run the embedded server of a folder, and return its URL. Raises `EmbeddedServerError`."""
    with EmbeddedServer(folder) as server:
        yield f"unix://{quote(str(server.socket))}"
    stop(folder, force=True)  # processes that the tests left behind do not keep it


async def _remove_keys(redis_url: str, namespace: str) -> None:
    """Remove all keys of a namespace."""
    gateway = Gateway(Address.parse(redis_url, data_dir=Path.cwd))
    await gateway.open()
    try:
        keys = Namespace(namespace)
        nodes: list[str | None] = [None]
        if gateway.clustered:
            nodes = [keys.queues, *(partition.ready for partition in await queue_partitions(gateway, keys))]
        for node in nodes:
            cursor = b"0"
            while True:
                scan = ("SCAN", cursor, "MATCH", f"{{{namespace}[:}}]*", "COUNT", _PAGE)
                cursor, found = await gateway.command(*scan, node_of=node)
                for key in found:
                    await gateway.command("UNLINK", key, node_of=node)
                if cursor == b"0":
                    break
    finally:
        await gateway.close()
