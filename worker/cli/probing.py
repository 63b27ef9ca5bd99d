"""The health probe of a worker or a supervisor: where the command line wants it, and what is wrong with that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ..observe import logger
from ..runtime.probes import Probed, Probes
from .failures import Failed, Misuse

__all__ = ["ProbePlace"]


@dataclass(frozen=True, slots=True)
class ProbePlace:
    """host, port: where the probe is to be; no port for no probe."""

    host: str | None
    port: int | None

    @contextmanager
    def serving(self, report: Callable[[], Probed]) -> Iterator[None]:
        """Answer probes within the block. Raises `Failed` where the address cannot be had."""
        if self.port is None:
            if self.host is not None:
                raise Misuse("--health-host says where the probe is: give --health-port too")
            yield
            return
        host = self.host or "127.0.0.1"
        try:
            probes = Probes(report, host, self.port)
        except (OSError, UnicodeError) as error:
            raise Failed(
                f"--health-port: cannot listen on {host}:{self.port}: {error}; choose another port, or 0 for any"
            ) from error
        with probes:
            logger.info("health at {0}/livez and {0}/readyz", probes.address)
            yield
