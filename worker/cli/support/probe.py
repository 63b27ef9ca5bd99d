"""Options of the health probe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ....queues.errors import ConfigurationError
from ...log import logger
from .errors import Failed, Misuse, cause_of

if TYPE_CHECKING:
    from ...runtime.health.probe_server import HealthSource, ProbePage
    from ...runtime.metrics.families import Measurements


@dataclass(frozen=True, slots=True)
class ProbeOptions:
    """Options of the health probe. Without a port there is no probe."""

    host: str | None
    port: int | None

    @property
    def metrics(self) -> bool:
        """Whether there are metrics: there is a port, and the extra is installed."""
        return self.port is not None and find_spec("prometheus_client") is not None

    @contextmanager
    def serving(self, report: Callable[[], HealthSource], measure: Callable[[], Measurements]) -> Iterator[None]:
        """Answer probes within the block. measure: called for each request of metrics, if they are wanted.

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
            probes = ProbeServer(report, host, self.port, _page(measure) if self.metrics else _missing)
        except (OSError, UnicodeError) as error:
            raise Failed(
                f"--health-port: could not listen on {host}:{self.port}: {cause_of(error)}; choose another port "
                "(0: any free one) or another --health-host"
            ) from error
        with probes:
            logger.info("serving health at {0}/livez and {0}/readyz, and metrics at {0}/metrics", probes.address)
            yield


def _page(measure: Callable[[], Measurements]) -> Callable[[], ProbePage]:
    """Return the function that makes the page of metrics."""
    from ...runtime.health.probe_server import ProbePage
    from ...runtime.metrics.exposition import CONTENT_TYPE, exposition

    return lambda: ProbePage(CONTENT_TYPE, exposition(measure))


def _missing() -> ProbePage:
    raise ConfigurationError("metrics need the package prometheus-client: pip install 'perdure[metrics]'")
