"""The server and the namespace of a benchmark round."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from perdure import App, Middleware, Settings
from perdure.queues import Partition

from ..raw.client import RawClient

__all__ = ["Deployment"]

_PURGED_AT_ONCE = 1_000


@dataclass(frozen=True, slots=True)
class Deployment:
    """A server's URL, a namespace, and the lease (seconds) of workers there; None for the default."""

    url: str
    namespace: str
    lease: float | None = None

    @classmethod
    def from_environment(cls) -> Deployment:
        """Read what `environment` passed to this process."""
        return cls(os.environ["PERDURE_REDIS_URL"], os.environ["PERDURE_NAMESPACE"])

    @property
    def environment(self) -> Mapping[str, str]:
        """Return the environment of a child process. The URL is no argument because it may hold a password."""
        variables = {"PERDURE_REDIS_URL": self.url, "PERDURE_NAMESPACE": self.namespace}
        return os.environ | variables | ({} if self.lease is None else {"PERDURE_LEASE": str(self.lease)})

    def within(self, name: str) -> Deployment:
        """A namespace of its own; `purge` of this one empties it too."""
        return replace(self, namespace=f"{self.namespace}-{name}")

    def app(self, *middleware: Middleware) -> App:
        """Return an app without tasks."""
        lease = self.lease or Settings.model_fields["lease"].default
        settings = Settings(redis_url=self.url, namespace=self.namespace, lease=lease)
        return App("bench", settings=settings, middleware=list(middleware))

    @property
    def raw(self) -> Partition:
        """Keys for the raw client."""
        return Partition(self.namespace, "limit", 0)

    def purge(self) -> None:
        """Remove every key of the namespace and of its sub-namespaces."""
        with RawClient(self.url) as client:
            cursor, pattern = b"0", f"{{{self.namespace}[-:}}]*"
            while True:
                cursor, keys = client.call("SCAN", cursor, "MATCH", pattern, "COUNT", _PURGED_AT_ONCE)
                if keys:
                    client.call("UNLINK", *keys)
                if int(cursor) == 0:
                    return
