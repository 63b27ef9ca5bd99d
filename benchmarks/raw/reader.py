"""`python -m benchmarks.raw.reader`: a raw client that waits for messages, for the latency benchmarks."""

from __future__ import annotations

from ..support.deployment import Deployment
from ..support.processes import report
from .client import RawClient
from .limits import wait_for_message

__all__: list[str] = []


def _read() -> None:
    deployment = Deployment.from_environment()
    with RawClient(deployment.url) as client:
        report()
        while True:
            wait_for_message(client, deployment)
            report()


if __name__ == "__main__":
    _read()
