"""Import path of an app: how another process imports the app that a worker of this process runs."""

from __future__ import annotations

import ast
import hashlib
import os
import sys
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Final

import orjson
from pydantic import SecretStr

from ...app import App
from ...errors import ConfigurationError

__all__ = ["WORKER_COMMAND", "ChildCommand", "app_command", "app_digest", "app_path", "use_import_path"]

WORKER_COMMAND: Final = (sys.executable, "-P", "-X", "faulthandler", "-m", "perdure.worker.cli", "worker", "run")
"""-P: the working directory is not on the import path, as for the installed program."""

_IMPORT_PATH: Final = "PERDURE_IMPORT_PATH"
"""Environment variable by which a program passes its import path to its children, and to no process of theirs."""


@dataclass(frozen=True, slots=True)
class ChildCommand:
    """Command line of a child, and environment variables in addition to those of this process."""

    arguments: Sequence[str]
    environment: MutableMapping[str, str] = field(default_factory=dict)


def app_command(app: App, queues: Sequence[str], name: str | None) -> ChildCommand:
    """Return the command of a process that runs tasks of an app.

    Args:
        queues: Queues to read.
        name: First part of the worker's id; None for the app's name.

    Raises:
        ConfigurationError: See `app_path`.
    """
    options = ["--queues", ",".join(queues), *(() if name is None else ("--name", name))]
    paths = [str(Path(entry).absolute()) for entry in sys.path]
    return ChildCommand([*WORKER_COMMAND, *options, "--", app_path(app)], {_IMPORT_PATH: orjson.dumps(paths).decode()})


def use_import_path(environment: MutableMapping[str, str] = os.environ) -> None:
    """Use the import path of the program that started this process, if it passed one."""
    if paths := environment.pop(_IMPORT_PATH, ""):
        given: list[str] = orjson.loads(paths)
        sys.path[:] = [*given, *(entry for entry in sys.path if entry not in given)]


def app_digest(app: App) -> str:
    """Return a digest of an app's name, tasks and settings: equal where two processes run the same app."""
    found = [(name, getattr(app.settings, name)) for name in sorted(type(app.settings).model_fields)]
    values = [(name, one.get_secret_value() if isinstance(one, SecretStr) else one) for name, one in found]
    return hashlib.sha256(repr((app.name, sorted(app.tasks), values)).encode()).hexdigest()


def app_path(app: App) -> str:
    """Return the path of an app in the syntax of the command line: `module:attribute` or `path/to/file.py:attribute`.

    The module is imported once more in the other process. So it must not run the worker when it is imported: the file
    that Python was started with is imported only if the worker runs under its `if __name__ == "__main__":`.

    Raises:
        ConfigurationError: No other process can import it. The text is the cause.
    """
    why = "it is not an attribute of a module"
    lines = dict(_running_modules())
    for name, module in list(sys.modules.items()):
        attribute = _attribute_of(module, app)
        if attribute is None:
            continue
        if module is sys.modules["__main__"]:  # multiprocessing gives it another name as well
            cause = _cause_against_main(module, lines.get(id(vars(module))))
        else:
            parents = [name.rsplit(".", dots)[0] for dots in range(name.count(".") + 1)]
            running = [one for one in parents if one in sys.modules and id(vars(sys.modules[one])) in lines]
            cause = f"the worker runs while the module {running[0]} is imported" if running else ""
        if not cause:
            return f"{_target(module)}:{attribute}"
        why = cause
    raise ConfigurationError(why)


def _attribute_of(module: object, app: App) -> str | None:
    if not isinstance(module, ModuleType):
        return None
    return next((name for name, value in list(vars(module).items()) if value is app), None)


def _target(module: ModuleType) -> str:
    """Return the module's name if it is in a package, else its file."""
    name = module.__name__ if module.__spec__ is None else module.__spec__.name  # with python -m, they differ
    file = getattr(module, "__file__", None) or ""
    inside = "." in name or hasattr(module, "__path__") or not file.endswith(".py")
    return name if inside else str(Path(file).absolute())


def _running_modules() -> Iterator[tuple[int, int]]:
    """Return the modules whose top level is running in any thread: identity of the namespace, and the line."""
    for innermost in sys._current_frames().values():
        frame = innermost
        while frame is not None:
            if frame.f_code.co_name == "<module>":
                yield id(frame.f_globals), frame.f_lineno
            frame = frame.f_back  # type: ignore[assignment]


def _cause_against_main(module: ModuleType, line: int | None) -> str:
    """Return why the file that Python was started with cannot be imported; empty if it can. line: that runs now."""
    try:
        source = Path(module.__file__ or "").read_text("utf-8")
        statements = ast.parse(source).body
    except (AttributeError, OSError, SyntaxError, ValueError):
        return "the program that defines it is not a file"
    for one in statements:
        last = isinstance(one, ast.If) and _compares_name(one.test) and one.body[-1].end_lineno
        if last and line is not None and one.lineno <= line <= last:
            return ""
    return 'the worker does not run under the if __name__ == "__main__": of the file that defines it'


def _compares_name(test: ast.expr) -> bool:
    return ast.unparse(test) in ("__name__ == '__main__'", "'__main__' == __name__")
