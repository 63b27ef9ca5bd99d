"""Constants in the arguments of steps: text that differs between runs or copies of a task, and means the same.

The workspace of each run is a new folder, and a fork or an imported copy of a task has another id. In the digest of a
step's arguments they count as constants, so that the records of earlier runs are found.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import orjson

from ...workspace.folders import FOLDER_PREFIX, folder_end
from ..run import Run

_FOLDER: Final = "\0\1"
_ID: Final = "\0\2"
"""In place of a text. JSON has no such characters, so no other arguments have the same digest."""


class Constants:
    """Texts that count as constants in the arguments of a run's steps.

    Attributes:
        texts: Arguments without any of them have no constants.
        shortest: Bytes of the shortest one.
        ids: The task's own id, that of the task that it is a copy of, and so on.
    """

    __slots__ = ("_places", "ids", "shortest", "texts")

    def __init__(self, ids: Sequence[str], folder: Path | None = None) -> None:
        """folder: of the run, if it has a workspace. Recorded results may have the folders of earlier runs."""
        self.ids = tuple(ids)
        self._places: tuple[str, ...] = ()
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
        """Return a text, or the JSON of it, with the same characters in place of the constants."""
        for place in self._places:
            for written in dict.fromkeys((place, orjson.dumps(place)[1:-1].decode())):
                text = self._without_folders(text, f"{written}/")
        for task_id in sorted(self.ids, key=len, reverse=True):
            text = _without_id(text, task_id)
        return text

    def _without_folders(self, text: str, place: str) -> str:
        parts, start = [], 0
        while (at := text.find(place + FOLDER_PREFIX, start)) >= 0:
            end = folder_end(text, at + len(place), self.ids)
            parts += [text[start:at], _FOLDER] if end > 0 else [text[start : at + len(place)]]
            start = end if end > 0 else at + len(place)
        return "".join([*parts, text[start:]])


def _without_id(text: str, task_id: str) -> str:
    """Replace an id, which may be as short as a letter, where it is not a part of a word."""
    parts, start = [], 0
    while (at := text.find(task_id, start)) >= 0:
        end = at + len(task_id)
        escape = text[at - 2 : at] in _ESCAPES  # which ends with a letter
        inside = (text[at - 1 : at].isalnum() and not escape) or text[end : end + 1].isalnum()
        parts += [text[start:end]] if inside else [text[start:at], _ID]
        start = end
    return "".join([*parts, text[start:]])


_ESCAPES: Final = frozenset((r"\b", r"\f", r"\n", r"\r", r"\t"))


def constants_of(run: Run) -> Constants:
    """Return the constants of a run."""
    if run.constants is None:
        run.constants = Constants((run.id, *run.envelope.copy_of))
    found: Constants = run.constants
    return found


def add_folder(run: Run, folder: Path) -> None:
    """Let the folder of a run's workspace, with all its files, count as a constant."""
    run.constants = Constants(constants_of(run).ids, folder)
