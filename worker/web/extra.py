"""The packages of the extra `web`. This module imports none of them."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

from ...queues.errors import ConfigurationError

PACKAGES: Final = ("starlette", "uvicorn", "sse_starlette", "jinja2", "itsdangerous")


def check_packages(what: str) -> None:
    """Raise `ConfigurationError` if a package of the extra is missing. what: what needs them."""
    for package in PACKAGES:
        if find_spec(package) is None:
            raise ConfigurationError(
                f"{what} needs the package {package.replace('_', '-')}: pip install 'perdure[web]'"
            )
