"""What a peer's environment says of itself: `python -m programs.facts MODULE DISTRIBUTION...`."""

from __future__ import annotations

import importlib
import platform
import sys
from importlib.metadata import version

from .told import tell

if __name__ == "__main__":
    found = importlib.import_module(f".{sys.argv[1]}", __package__)
    seconds, where = found.recovery() if hasattr(found, "recovery") else (None, "")
    tell(
        python=platform.python_version(),
        versions={name: version(name) for name in sys.argv[2:]},
        recovery={"seconds": seconds, "where": where},
    )
