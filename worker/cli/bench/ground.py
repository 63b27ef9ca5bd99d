"""Where is measured: a namespace of its own on the server, of which nothing stays behind."""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import anyio
import hiredis

from ....queues import Gateway, Namespace, Partition, Refused
from ....queues.connection import translated
from ...app import App
from ..connection import Place
from ..removal import remove_namespace
from .dialling import dial
from .raw import RawClient

__all__ = ["Ground", "prepare_ground"]

_KEPT_FOR = 600.0
"""Seconds that outcomes are kept, should this process be killed before it cleans up."""


@dataclass(frozen=True, slots=True)
class Ground:
    """An open application on a namespace of its own. raw: where the raw client works."""

    app: App
    gateway: Gateway
    namespace: Namespace
    partition: Partition
    raw: Partition

    @contextmanager
    def raw_client(self) -> Iterator[RawClient]:
        """A raw client for a while. Raises `Unavailable`, `Refused`."""
        address = self.gateway.address
        with translated(address.shown):
            try:
                with dial(self.gateway, self.raw.ready) as client:
                    yield client
            except hiredis.HiredisError as error:
                raise Refused(f"{address.shown} refused a command of the raw client: {error}") from error

    def environment(self) -> Mapping[str, str]:
        """For a worker process on this ground: its settings and nobody else's."""
        settings = self.app.settings
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PERDURE_")}
        return inherited | {
            "PERDURE_REDIS_URL": settings.redis_url or "embedded:",
            "PERDURE_DATA_DIR": str(settings.data_dir or ""),
            "PERDURE_NAMESPACE": settings.namespace,
            "PERDURE_RESULT_TTL": str(_KEPT_FOR),
            "PERDURE_LOG_LEVEL": "ERROR",
        }


@asynccontextmanager
async def prepare_ground(app: App, place: Place) -> AsyncIterator[Ground]:
    """Open the app on a namespace of its own; at the end, however it comes, its keys are removed.

    Raises `Unavailable`, `Refused`, `BadAddress`, `EmbeddedServerError`.
    """
    named = place.overrides() | {"namespace": f"bench-{secrets.token_hex(6)}"}
    app.configure(**named, result_ttl=_KEPT_FOR, dead_letter_ttl=_KEPT_FOR)
    namespace = Namespace(app.settings.namespace)
    async with app:
        ground = Ground(
            app, app.producer.gateway, namespace, namespace.partition("default"), namespace.partition("limit")
        )
        try:
            yield ground
        finally:
            with anyio.CancelScope(shield=True):
                await remove_namespace(ground.gateway, namespace, [ground.partition, ground.raw])
