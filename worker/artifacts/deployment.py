"""Artifact store of a deployment, for artifacts and for values that are too large for Redis."""

from __future__ import annotations

from functools import partial
from weakref import WeakKeyDictionary

from ...queues.keys import Namespace
from ...queues.presence import deployment_id
from ...queues.transport.backoff import retry_while_unavailable
from ...queues.transport.gateway import Gateway
from ..settings import Settings
from .store import ArtifactStore, open_store, shown_place

_stores: WeakKeyDictionary[Gateway, ArtifactStore] = WeakKeyDictionary()
"""Artifact store by gateway; a worker has one."""


async def artifact_store(gateway: Gateway, settings: Settings) -> ArtifactStore:
    """Return the artifact store of this deployment. Raises `ConfigurationError`."""
    store = _stores.get(gateway)
    if store is None:
        namespace = Namespace(settings.namespace)
        folder = f"{namespace.name}-{await deployment_id(gateway, namespace)}"
        store = _stores[gateway] = open_store(settings.artifact_place, folder, limit=settings.artifact_limit)
    return store


def keep_large_values(gateway: Gateway, settings: Settings) -> Gateway:
    """Let a gateway store the largest values in the artifact store, if every worker reaches that; return it."""
    if settings.shared_artifacts:
        gateway.value_store = _LargeValues(gateway, settings)
    return gateway


class _LargeValues:
    """The artifact store as the value store of a gateway. Its errors are those of artifacts."""

    def __init__(self, gateway: Gateway, settings: Settings) -> None:
        self._gateway = gateway
        self._settings = settings
        self.above = max(settings.large_limit, settings.payload_limit)
        self.shown = shown_place(settings.artifacts)

    async def save(self, what: str, data: bytes) -> None:
        await (await self._store()).save(what, data)

    async def read(self, what: str, digest: str, size: int) -> bytes:
        return await (await self._store()).read(what, digest, size)

    async def _store(self) -> ArtifactStore:
        return await retry_while_unavailable(partial(artifact_store, self._gateway, self._settings))
