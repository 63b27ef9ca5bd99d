"""Constants in the arguments of steps: text that differs between runs or copies of a task, and means the same.

The workspace of each run is a new folder, and a fork or an imported copy of a task has another id. In the digest of a
step's arguments they count as constants, so that the records of earlier runs are found.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import orjson

from ...workspace import FOLDER_PREFIX, folder_names
from ..run import Run

__all__ = ["Constants", "add_folder", "constants_of"]

_FOLDER: Final = "\0folder\0"
_ID: Final = "\0id\0"
"""In place of a text. JSON has no such characters, so no other arguments have the same digest."""

_BEFORE_ID: Final = r"(?:(?<![A-Za-z0-9])|(?<=\\[bfnrt]))"
"""An id may be as short as a letter, and is not a part of a word. In JSON, an escape ends with a letter."""


class Constants:
    """Texts that count as constants in the arguments of a run's steps.

    Attributes:
        texts: Arguments without any of them have no constants.
        shortest: Bytes of the shortest one.
        ids: The task's own id, that of the task that it is a copy of, and so on.
    """

    __slots__ = ("_places", "_replacing", "ids", "shortest", "texts")

    def __init__(self, ids: Sequence[str], folder: Path | None = None) -> None:
        """folder: of the run, if it has a workspace. Recorded results may have the folders of earlier runs."""
        self.ids = tuple(ids)
        self._places: tuple[str, ...] = ()
        self._replacing: re.Pattern[str] | None = None
        if folder is not None:
            place = str(folder.parent.parent)
            names = {place, str(Path.cwd() / place), os.path.realpath(place)}
            self._places = tuple([name.removesuffix("/") for name in sorted(names, key=len, reverse=True)])
        places = [orjson.dumps(f"{place}/{FOLDER_PREFIX}")[1:-1] for place in self._places]
        self.texts = (*places, *(task_id.encode() for task_id in ids))
        self.shortest = min(map(len, self.texts))

    def older(self) -> Constants | None:
        """Return the constants of the task that this one is a copy of, in the folder of this run; None without one."""
        if len(self.ids) == 1:
            return None
        found = Constants(self.ids[1:])
        found._places = self._places
        found.texts, found.shortest = self.texts, self.shortest
        return found

    def replace(self, text: str) -> str:
        """Return a text, or the JSON of it, with the same words in place of the constants."""
        if self._replacing is None:
            places = {place for name in self._places for place in (name, orjson.dumps(name)[1:-1].decode())}
            folders = "|".join(map(re.escape, sorted(places, key=len, reverse=True)))
            own = "|".join(map(re.escape, sorted(self.ids, key=len, reverse=True)))
            folder = f"(?:{folders})/{folder_names(self.ids)}" if folders else "(?!)"
            self._replacing = re.compile(rf"(?P<folder>{folder})|{_BEFORE_ID}(?:{own})(?![A-Za-z0-9])")
        return self._replacing.sub(lambda found: _FOLDER if found["folder"] else _ID, text)


def constants_of(run: Run) -> Constants:
    """Return the constants of a run."""
    if run.constants is None:
        run.constants = Constants((run.id, *run.envelope.copy_of))
    found: Constants = run.constants
    return found


def add_folder(run: Run, folder: Path) -> None:
    """Let the folder of a run's workspace, with all its files, count as a constant."""
    run.constants = Constants(constants_of(run).ids, folder)
