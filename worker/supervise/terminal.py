"""Whether the supervisor has a terminal: losing it is a SIGHUP too, and means another thing than a reload."""

from __future__ import annotations

import os

__all__ = ["has_terminal"]


def has_terminal() -> bool:
    """Whether this process has a controlling terminal that is still there."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True
