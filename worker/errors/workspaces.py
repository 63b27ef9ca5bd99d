"""Errors of workspaces."""

from __future__ import annotations

from ...queues import PerdureError

__all__ = ["FileConflict", "WorkspaceError", "WorkspaceTooLarge"]


class WorkspaceError(PerdureError):
    """Base of errors of workspaces: a file that cannot be saved or restored, a folder that cannot be used."""


class WorkspaceTooLarge(WorkspaceError, ValueError):
    """A file or the whole workspace exceeds a limit. Retrying does not help."""


class FileConflict(WorkspaceError):
    """A file of a shared workspace has another version than the caller expected.

    Attributes:
        expected: Version that the caller expected; 0 for a file that should not exist.
        version: Version that the file has; 0 if it does not exist.
    """

    def __init__(self, workspace: str, path: str, expected: int, version: int, by: str) -> None:
        now = (
            f"version {version}, written by {by or 'an unnamed writer'}" if version else "no version: it does not exist"
        )
        super().__init__(
            f"file {path!r} of shared workspace {workspace!r} was expected to have version {expected} and has {now}; "
            "read it again and repeat the change"
        )
        self.expected = expected
        self.version = version
