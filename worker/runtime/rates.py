"""How fast a worker settles tasks at present, by queue."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final

__all__ = ["WINDOW", "Rates"]

WINDOW: Final = 30.0
"""Seconds that the rate looks back: long enough for a steady figure, short enough to be of the present."""


class Rates:
    """Tasks per second over the last `WINDOW` seconds, or since the worker began where that is shorter.

    A plain window and not an average that fades: a queue on which nothing was settled for a whole window has no rate,
    and not an ever smaller one.
    """

    def __init__(self, settled: Mapping[str, int], clock: Callable[[], float] = time.monotonic) -> None:
        """settled: by queue, how many deliveries the worker has settled; somebody else goes on counting in it."""
        self._settled = settled
        self._clock = clock
        self._looks = deque([(clock(), dict(settled))])

    def look(self) -> dict[str, float]:
        """The rates now; queues on which nothing was settled are left out. To be called every few seconds."""
        now, counts = self._clock(), dict(self._settled)
        self._looks.append((now, counts))
        while self._looks[1][0] <= now - WINDOW:
            self._looks.popleft()
        began, before = self._looks[0]
        if now <= began:
            return {}
        settled = {queue: count - before.get(queue, 0) for queue, count in counts.items()}
        return {queue: count / (now - began) for queue, count in settled.items() if count}
