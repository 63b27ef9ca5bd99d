"""The packages of the extras of adapters. This module imports none of them."""

from __future__ import annotations

from importlib.util import find_spec

from ...queues.errors import ConfigurationError


def check_package(what: str, module: str, *, package: str = "", extra: str) -> None:
    """Raise `ConfigurationError` if a package of an extra is missing.

    Args:
        what: what needs it, such as "perdure.integrations.langgraph".
        module: name by which it is imported.
        package: name by which pip installs it; as the extra by default.
    """
    if find_spec(module) is None:
        raise ConfigurationError(f"{what} needs the package {package or extra}: pip install 'perdure[{extra}]'")
