"""Loader of the APP argument: `module:attribute` or `path/to/file.py:attribute`.

The attribute is an `App`, or a class with the settings of a worker of arq.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType

from ....queues.errors import ConfigurationError, PerdureError
from ...app import App
from .errors import Misuse

_FORMS = "APP must be module:attribute or path/to/file.py:attribute, such as tasks:app"


def load_app(spec: str) -> App:
    """Import the application, with the modules that it includes.

    Raises:
        Misuse: The argument is malformed, the import failed (with the line of the user's code), or no `App` was found.
    """
    target, colon, attribute = spec.rpartition(":")
    if not colon or not target or not attribute:
        raise Misuse(f"{_FORMS}, got {spec!r}")
    module = _load_file(target) if target.endswith(".py") or os.sep in target else _load_module(target)
    found = vars(module).get(attribute)
    if isinstance(found, type) and (hasattr(found, "functions") or hasattr(found, "cron_jobs")):
        from ...integrations.arq.worker_settings import ArqApp

        try:
            found = ArqApp(found)
        except (PerdureError, ImportError, RuntimeError, TypeError, ValueError) as error:
            raise Misuse(f"{spec}: {error}") from error
    if isinstance(found, App):
        try:
            found.load_modules()
        except ConfigurationError as error:
            raise Misuse(f"{error}{_location(error.__cause__ or error)}") from error
        return found
    what = f"has no {attribute!r}" if attribute not in vars(module) else f"{attribute!r} is {_kind(found)}, not an App"
    raise Misuse(f"{target}: {what}; {_apps_in(target, module)}")


def _load_module(name: str) -> ModuleType:
    """Import a module, from the working directory first."""
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise Misuse(
                f"could not import {name!r}: no module {error.name!r} in {Path.cwd()} or installed; {_FORMS}"
            ) from None
        raise _broken(name, error) from error
    except (Exception, SystemExit) as error:
        raise _broken(name, error) from error


def _load_file(text: str) -> ModuleType:
    """Import a file as a module named after it, with its folder on the import path."""
    path = Path(text).absolute()
    spec = importlib.util.spec_from_file_location(_module_name(path.stem), path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise Misuse(f"could not find the Python file {text}; {_FORMS}")
    sys.path.insert(0, str(path.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pydantic look up the module of a class
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise _broken(text, error) from error
    return module


def _module_name(stem: str) -> str:
    """Return the file's name, or another one if it would hide an imported or standard module."""
    taken = stem in sys.modules or stem in sys.stdlib_module_names or not stem.isidentifier()
    return f"_app_{stem.replace('.', '_')}" if taken else stem


def _broken(target: str, error: BaseException) -> Misuse:
    if isinstance(error, PerdureError):
        return Misuse(f"could not import {target}: {error}{_location(error)}")
    last = traceback.format_exception_only(error)[-1].strip()
    circular = isinstance(error, ImportError) and "partially initialized module" in str(error)
    remedy = (
        "; do not import modules of tasks in that of the app: name them, App(..., include=[...])" if circular else ""
    )
    return Misuse(f"could not import {target}: {last}{_location(error)}{remedy}")


def _location(error: BaseException) -> str:
    """Return the last line of user code in the traceback."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({error.filename}:{error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    user = [frame for frame in frames if not _is_installed(frame.filename)]
    return f" ({user[-1].filename}:{user[-1].lineno})" if user else ""


def _is_installed(filename: str) -> bool:
    if filename.startswith("<"):
        return True
    path = Path(filename)
    package = Path(__file__).parents[2]
    return path.is_relative_to(package) or path.is_relative_to(_STDLIB) or "site-packages" in path.parts


_STDLIB = Path(os.__file__).parent


def _apps_in(target: str, module: ModuleType) -> str:
    apps = [name for name, value in vars(module).items() if isinstance(value, App)]
    if not apps:
        return "define one: app = App('name')"
    return f"Apps in it: {', '.join(f'{target}:{name}' for name in apps)}"


def _kind(value: object) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
