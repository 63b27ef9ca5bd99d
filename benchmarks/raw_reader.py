"""A raw client that waits for messages: `python -m benchmarks.raw_reader`, the other side of pick-up and hand-over."""

from __future__ import annotations

from .limits import wait_for_message
from .place import Place
from .processes import tell
from .raw import RawClient

__all__: list[str] = []


def _read() -> None:
    place = Place.from_environment()
    with RawClient(place.url) as client:
        tell()
        while True:
            wait_for_message(client, place)
            tell()


if __name__ == "__main__":
    _read()
