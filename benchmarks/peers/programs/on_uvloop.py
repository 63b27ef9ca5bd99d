"""`python -m programs.on_uvloop COMMAND ARGUMENT...`: a command of this environment, with uvloop as its event loop."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points

import uvloop

if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    (command,) = {each.value: each for each in entry_points(group="console_scripts", name=sys.argv[0])}.values()
    uvloop.install()
    command.load()()
