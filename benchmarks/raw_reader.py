"""`python -m benchmarks.raw_reader`: a raw client that waits for messages, for the latency benchmarks."""

from __future__ import annotations

from .limits import wait_for_message
from .place import Place
from .processes import report
from .raw import RawClient

__all__: list[str] = []


def _read() -> None:
    place = Place.from_environment()
    with RawClient(place.url) as client:
        report()
        while True:
            wait_for_message(client, place)
            report()


if __name__ == "__main__":
    _read()
