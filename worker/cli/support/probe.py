"""Options of the health probe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...log import logger
from .errors import Failed, Misuse

if TYPE_CHECKING:
    from ...runtime.health.probe_server import HealthSource


@dataclass(frozen=True, slots=True)
class ProbeOptions:
    """Options of the health probe. Without a port there is no probe."""

    host: str | None
    port: int | None

    @contextmanager
    def serving(self, report: Callable[[], HealthSource]) -> Iterator[None]:
        """Answer probes within the block.

        Raises:
            Misuse: A host was given without a port.
            Failed: The server cannot listen on the address.
        """
        if self.port is None:
            if self.host is not None:
                raise Misuse("--health-host needs --health-port")
            yield
            return
        from ...runtime.health.probe_server import ProbeServer  # imports an HTTP server

        host = self.host or "127.0.0.1"
        try:
            probes = ProbeServer(report, host, self.port)
        except (OSError, UnicodeError) as error:
            raise Failed(
                f"--health-port: could not listen on {host}:{self.port}: {error}; choose another port, or 0 for any"
            ) from error
        with probes:
            logger.info("serving health at {0}/livez and {0}/readyz", probes.address)
            yield
