"""The supervisor's end of the line to one child; the other end, and what is said, is worker/runtime/link.py."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import orjson

__all__ = ["Line"]

_LONGEST: Final = 1 << 20
"""Bytes of one line. A child that says more at once has gone mad, and is not listened to."""


class Line:
    """Two pipes. Saying and hearing never wait."""

    def __init__(self) -> None:
        self._on_said: Callable[[str, dict[str, Any]], None] = lambda what, told: None
        self._rest = b""
        child_reads, self._write = os.pipe()
        self._read, child_writes = os.pipe()
        self.theirs = (child_reads, child_writes)
        """The child's file descriptors: to be passed on, then `give_away`."""
        for own in (self._read, self._write):
            os.set_blocking(own, False)
        self._open = True

    def give_away(self) -> None:
        """The child has its ends, or there is none: close them here, so that its end can be noticed."""
        for descriptor in self.theirs:
            os.close(descriptor)

    def listen(self, on_said: Callable[[str, dict[str, Any]], None]) -> None:
        """on_said: hears each word of the child, with what it tells besides."""
        self._on_said = on_said
        asyncio.get_running_loop().add_reader(self._read, self.hear)

    def say(self, what: str) -> None:
        """A child that is gone hears nothing, and one that has not listened for long either."""
        with suppress(OSError):
            os.write(self._write, orjson.dumps({"say": what}) + b"\n")

    def hear(self) -> None:
        """Take what has been said since."""
        while True:
            try:
                data = os.read(self._read, 65_536)
            except BlockingIOError:
                return
            if not data:  # it has closed its end, which its death alone need not do: others may have inherited it
                asyncio.get_running_loop().remove_reader(self._read)
                return
            *lines, self._rest = (self._rest + data).split(b"\n")
            if len(self._rest) > _LONGEST:
                self._rest = b""
            for line in lines:
                self._take(line)

    def _take(self, line: bytes) -> None:
        try:
            told = orjson.loads(line)
            what = told.pop("say")
        except (ValueError, TypeError, AttributeError, KeyError):
            return  # the user's code has the descriptor too, and may write into it what it likes
        if isinstance(what, str):
            self._on_said(what, told)

    def close(self) -> None:
        if self._open:
            self._open = False
            asyncio.get_running_loop().remove_reader(self._read)
            os.close(self._read)
            os.close(self._write)
