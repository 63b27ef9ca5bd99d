"""Command of a process that imports the app which a worker of this process runs."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import orjson
from pydantic import SecretStr

from ...errors import ConfigurationError

if TYPE_CHECKING:
    from ...app import App

__all__ = [
    "WORKER_COMMAND",
    "ChildCommand",
    "app_command",
    "app_digest",
    "pass_redis_url",
    "passed_redis_url",
    "use_import_path",
]

WORKER_COMMAND: Final = (sys.executable, "-P", "-X", "faulthandler", "-m", "perdure.worker.cli", "worker", "run")
"""-P: the working directory is not on the import path, as for the installed program."""

_IMPORT_PATH: Final = "PERDURE_IMPORT_PATH"
"""Environment variable by which a program passes its import path to its children, and to no process of theirs."""

_REDIS_URL: Final = "PERDURE_SUPERVISED_REDIS_URL"
"""Environment variable by which a command passes --redis-url on: all users would see its password on a command line."""


@dataclass(frozen=True, slots=True)
class ChildCommand:
    """Command line of a child, and environment variables in addition to those of this process."""

    arguments: Sequence[str]
    environment: MutableMapping[str, str] = field(default_factory=dict, repr=False)


def app_command(import_path: str, queues: Sequence[str], name: str | None) -> ChildCommand:
    """Return the command of a process that runs tasks of an app.

    Args:
        import_path: `module:attribute` or `path/to/file.py:attribute`, from which the process imports the app.
        queues: Queues to read.
        name: First part of the worker's id; None for the app's name.

    Raises:
        ConfigurationError: `import_path` does not have this form.
    """
    if not all(import_path.rpartition(":")):
        raise ConfigurationError(
            f"import_path must be 'module:attribute' or 'path/to/file.py:attribute', got {import_path!r}"
        )
    options = ["--queues", ",".join(queues), *(() if name is None else ("--name", name))]
    paths = [str(Path(entry).absolute()) for entry in sys.path]
    return ChildCommand([*WORKER_COMMAND, *options, "--", import_path], {_IMPORT_PATH: orjson.dumps(paths).decode()})


def use_import_path(environment: MutableMapping[str, str] = os.environ) -> None:
    """Use the import path of the program that started this process, if it passed one."""
    if paths := environment.pop(_IMPORT_PATH, ""):
        given: list[str] = orjson.loads(paths)
        sys.path[:] = [*given, *(entry for entry in sys.path if entry not in given)]


def pass_redis_url(url: str | None) -> dict[str, str]:
    """Return the environment by which the children of a command get its option --redis-url."""
    return {} if url is None else {_REDIS_URL: url}


def passed_redis_url(environment: MutableMapping[str, str] = os.environ) -> str | None:
    """Return the option --redis-url of the command that started this process, and remove it from the environment."""
    return environment.pop(_REDIS_URL, None)


def app_digest(app: App) -> str:
    """Return a digest of an app's name, tasks and settings: equal where two processes run the same app."""
    settings, address = app.settings, app.settings.address
    found = [(name, getattr(settings, name)) for name in sorted(type(settings).model_fields) if name != "redis_url"]
    found.append(("redis_url", address.url or str(address.directory)))
    values = [(name, one.get_secret_value() if isinstance(one, SecretStr) else one) for name, one in found]
    return hashlib.sha256(repr((app.name, sorted(app.tasks), values)).encode()).hexdigest()
