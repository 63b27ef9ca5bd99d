"""`python -m benchmarks.raw_reader`: a raw client that waits for messages, for the latency benchmarks."""

from __future__ import annotations

from .deployment import Deployment
from .processes import report
from .raw import RawClient
from .raw_limits import wait_for_message

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
