"""Command line of a child process that runs a worker."""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Final

WORKER_COMMAND: Final = (sys.executable, "-P", "-X", "faulthandler", "-m", "perdure.worker.cli", "worker", "run")
"""-P: the working directory is not on the import path, as for the installed program."""

_REDIS_URL: Final = "PERDURE_SUPERVISED_REDIS_URL"
"""Environment variable by which a command passes --redis-url on: all users would see its password on a command line."""


@dataclass(frozen=True, slots=True)
class ChildCommand:
    """Command line of a child, and environment variables in addition to those of this process."""

    arguments: Sequence[str]
    environment: MutableMapping[str, str] = field(default_factory=dict, repr=False)


def pass_redis_url(url: str | None) -> dict[str, str]:
    """Return the environment by which the children of a command get its option --redis-url."""
    return {} if url is None else {_REDIS_URL: url}


def passed_redis_url(environment: MutableMapping[str, str] = os.environ) -> str | None:
    """Return the option --redis-url of the command that started this process, and remove it from the environment."""
    return environment.pop(_REDIS_URL, None)
