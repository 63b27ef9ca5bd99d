"""Files of a step, as its record sees them: `ctx.workspace` keeps them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from typing import Annotated, Final, NamedTuple, Protocol

from pydantic import BaseModel, ConfigDict, Field

from ...queues.delivery.checkpoint import Entry
from ...queues.keys import TENANT_PREFIX
from ...queues.transport.value_store import Sha256
from ..errors import RunStopped

FOLDER_PREFIX: Final = "perdure-workspaces-"


_TURN: Final = re.compile(TENANT_PREFIX + r"(turn-[0-9a-f]{32}-[0-9]+)\.[0-9]+")


def folder_name(task_id: str) -> str:
    """Return the start of the names of a task's folders; all turns of a session have the same."""
    if (turn := _TURN.fullmatch(task_id)) is not None:
        task_id = turn[1]
    return re.sub(r"[^A-Za-z0-9._-]", "_", task_id)[:60].lstrip(".")


_FOLDER = re.compile(rf"{FOLDER_PREFIX}[a-z0-9_]{{1,16}}/([A-Za-z0-9._-]{{0,60}})-[a-z0-9_]{{8}}(?!-[a-z0-9_]{{8}})")


def folder_end(text: str, start: int, task_ids: Iterable[str]) -> int:
    """Return where the path of a run's folder of one of these tasks ends, from the name in its place; -1 for others."""
    found = _FOLDER.match(text, start)
    return -1 if found is None or found[1] not in map(folder_name, task_ids) else found.end()


class WorkspaceLink(BaseModel):
    """Link of a task to its manifest. hash, size: of the manifest. files, bytes: of the workspace."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    v: int = 1
    hash: Sha256
    size: Annotated[int, Field(ge=0)]
    files: Annotated[int, Field(ge=0)] = 0
    bytes: Annotated[int, Field(ge=0)] = 0


class Change(NamedTuple):
    """Files that were saved since the last change."""

    link: WorkspaceLink
    changed: tuple[str, ...]
    removed: tuple[str, ...]


class Found(NamedTuple):
    """Outcome of a scan whose changed files were saved, or could not be.

    Attributes:
        number: Order of the scans; 0 without a folder.
        change: None if nothing has changed.
        problem: Why the files could not be saved; `CancelledError` if the run was stopped meanwhile.
    """

    number: int
    change: Change | None = None
    problem: BaseException | None = None

    @property
    def cut_off(self) -> bool:
        """Whether the run was stopped."""
        return isinstance(self.problem, (RunStopped, asyncio.CancelledError))


class StepFiles(Protocol):
    """The files that are saved with the steps of a run."""

    async def find_step_change(self) -> Found:
        """Save the files that a step has changed. Its record must be put whatever the outcome, with `entries`."""
        ...

    def entries(self, found: Found, step: str | None) -> list[Entry]:
        """Return the entries of a change, which must be put."""
        ...

    async def catch_up(self, found: Found, *, nested: bool = False) -> None:
        """Save the files of recorded steps that were not saved with them, before the handler continues."""
        ...

    async def close(self, *, keep: bool = False) -> None:
        """End with the run. keep: the files that are not saved, for another run."""
        ...
