"""Where the demo takes place: a folder, a server, a namespace and workers of its own, of which nothing stays behind."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread

from ....queues import Gateway, Namespace, Partition, list_workers
from ....queues.embedded import stop
from ...app import App
from ..connection import Place
from ..failures import Failed
from ..removal import remove_namespace
from .journal import Journal
from .replicas import Replicas

__all__ = ["LEASE", "REPLICAS", "Stage", "prepare_stage"]

LEASE: Final = 1.5
"""Seconds. A worker that is at work in one large file holds Python's lock for up to 0.3 s, and its beat waits."""

REPLICAS: Final = 2
_JOINED_WITHIN: Final = 30.0


@dataclass(frozen=True, slots=True)
class Stage:
    """The demo's own folder, its journal, its workers, and its part of the server."""

    folder: Path
    journal: Journal
    replicas: Replicas
    gateway: Gateway
    namespace: Namespace
    partition: Partition

    async def wait_joined(self) -> None:
        """Return once all workers wait for work. Raises `ReplicaEnded`, `Failed`."""
        deadline = time.monotonic() + _JOINED_WITHIN
        while len(await list_workers(self.gateway, self.namespace)) < REPLICAS:
            self.replicas.check()
            if time.monotonic() > deadline:
                raise Failed(f"the workers have not joined within {_JOINED_WITHIN:.0f} s")
            await anyio.sleep(0.05)


@asynccontextmanager
async def prepare_stage(app: App, queue: str, place: Place) -> AsyncIterator[Stage]:
    """Set the app up on the server named, else on a fresh embedded one, with workers that have been started.

    At the end, however it comes, the workers are gone, and so are the keys, the fresh server and the folder. Raises
    `Unavailable`, `Refused`, `BadAddress`, `EmbeddedServerError`.
    """
    named = place.overrides()
    folder = Path(tempfile.mkdtemp(prefix="perdure-demo-"))
    fresh = None if named["redis_url"] else folder / "data"
    try:
        app.configure(
            redis_url=named["redis_url"] or "embedded:",
            data_dir=named["data_dir"] or fresh,
            namespace=f"demo-{secrets.token_hex(6)}",
            lease=LEASE,
            grace=2.0,
            log_level="WARNING",
            log_json=False,
        )
        async with app:
            replicas = Replicas(_environment(app), folder / "workers.log")
            namespace = Namespace(app.settings.namespace)
            partition = namespace.partition(queue)
            gateway = app.producer.gateway
            try:
                for _ in range(REPLICAS):
                    replicas.start()
                yield Stage(folder, Journal(folder / "journal"), replicas, gateway, namespace, partition)
            finally:
                await replicas.stop()
                if fresh is None:
                    with anyio.CancelScope(shield=True):
                        await remove_namespace(gateway, namespace, [partition])
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(_remove_folder, folder, fresh)


def _environment(app: App) -> dict[str, str]:
    """The environment of the workers: the demo's settings and nobody else's."""
    settings, address = app.settings, app.settings.address
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PERDURE_")}
    return inherited | {
        "PERDURE_REDIS_URL": address.url or "embedded:",
        "PERDURE_DATA_DIR": str(address.directory or ""),
        "PERDURE_NAMESPACE": settings.namespace,
        "PERDURE_LEASE": str(settings.lease),
        "PERDURE_GRACE": str(settings.grace),
        "PERDURE_LOG_LEVEL": settings.log_level,
    }


def _remove_folder(folder: Path, fresh: Path | None) -> None:
    try:
        if fresh is not None:
            stop(fresh, force=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
