"""Warnings of code whose resumed run may see other values than its first run."""

from __future__ import annotations

import warnings

_given: set[str] = set()
"""Texts that this process has warned of. They name types and functions, so there are only a few."""


class ResumeWarning(RuntimeWarning):
    """A handler or a step does what a resumed run cannot repeat. The pytest plugin of Perdure makes it an error."""


def warn_once(text: str) -> None:
    """Warn of a text once per process. Raises `ResumeWarning` each time where a filter makes it an error."""
    if text not in _given:
        warnings.warn(text, ResumeWarning, stacklevel=2)
        _given.add(text)
