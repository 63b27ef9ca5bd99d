"""The append-only file of a real server, cut as a power cut leaves it under `appendfsync everysec`."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from pathlib import Path
from typing import Final

from tests.support.servers.redis import RedisServer

__all__ = ["EVERYSEC", "AppendOnlyHistory"]

EVERYSEC: Final = (
    *("--save", "", "--appendonly", "yes", "--appendfsync", "everysec"),
    *("--auto-aof-rewrite-percentage", "0"),  # a rewrite would replace the file
)
"""Options of a server whose last second may be lost."""

_INTERVAL: Final = 0.05
_KEPT: Final = 200
"""Seconds between two samples, and their number: ten seconds."""


class AppendOnlyHistory:
    """Sizes of a server's append-only files during the last ten seconds."""

    def __init__(self, server: RedisServer) -> None:
        self._server = server
        self._samples: deque[tuple[float, dict[Path, int]]] = deque(maxlen=_KEPT)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="append-only sizes", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def position(self, seconds: float = 0.0) -> int:
        """Return how many bytes the server had written so many seconds ago; 0 if that is unknown."""
        return sum((self._sizes_at(time.monotonic() - seconds) or {}).values())

    def _sizes_at(self, at: float) -> dict[Path, int] | None:
        return next((sizes for sampled, sizes in reversed(list(self._samples)) if sampled <= at), None)

    def lose_tail(self, seconds: float) -> int:
        """Kill the server, and cut what it appended during the last seconds. Return the number of bytes.

        Raises LookupError if the history is shorter. The caller starts the server again.
        """
        cut_at = time.monotonic() - seconds
        self._server.kill()
        sizes = self._sizes_at(cut_at)
        if sizes is None:
            raise LookupError(f"the sizes of the append-only file {seconds:g} s ago are unknown")
        lost = 0
        for path, size in self._sizes().items():
            kept = min(size, sizes.get(path, size))
            lost += size - kept
            os.truncate(path, kept)
        self._samples.clear()
        return lost

    def _sample(self) -> None:
        while not self._stop.wait(_INTERVAL):
            self._samples.append((time.monotonic(), self._sizes()))

    def _sizes(self) -> dict[Path, int]:
        """Return the sizes by file: one file up to Redis 6.2, increments in a folder from 7.0 on."""
        folder = self._server.folder
        found = [*folder.glob("*.aof"), *folder.glob("appendonlydir/*.incr.aof")]
        return {path: path.stat().st_size for path in found}
