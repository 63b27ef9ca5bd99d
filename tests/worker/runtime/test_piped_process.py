"""Pipes of child processes: what a child writes without end does not hold the loop of its supervisor."""

from __future__ import annotations

import os

from perdure.worker.runtime.children.child import ChildPipe

CHUNK = 65_536
MOST = 16 * CHUNK


async def test_what_a_child_writes_without_end_is_read_in_parts() -> None:
    pipe = ChildPipe()
    received = 0

    def on_data(data: bytes) -> None:
        """Write more before the next read, up to four times the limit."""
        nonlocal received
        received += len(data)
        if received < 4 * MOST:
            os.write(pipe.child_ends[1], b"x" * len(data))

    os.write(pipe.child_ends[1], b"x" * CHUNK)
    pipe.start_reading(on_data)
    try:
        pipe.read_available()
        assert received == MOST
    finally:
        pipe.close_child_ends()
        pipe.close()
