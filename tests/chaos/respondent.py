"""Answers of a producer: by id, by token, by name and too early; twice, as an impatient sender does."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any, Final

from perdure import Producer, TaskHandle, Unavailable
from perdure.queues import QueueError

from .journal import JournalWriter
from .waiting import token_of_order

__all__ = ["Respondent"]

_LOOKS: Final = 40
"""Times that a task is asked for its open waits."""


class Respondent:
    """Answers the waits of tasks. A nonce names an answer; each call is repeated until its reply is known."""

    def __init__(self, producer: Producer, name: str, dice: random.Random, journal: JournalWriter) -> None:
        """name: of the sender, which no other process has."""
        self._producer = producer
        self._name = name
        self._dice = dice
        self._journal = journal
        self._number = 0

    async def attend(self, handle: TaskHandle[Any], kind: str, pause: float) -> None:
        """Answer what a task asks for a while. What is left then is answered by the clerk."""
        if kind == "early":
            await self._by_name(handle, "early")
            if self._dice.random() < 0.5:
                await self._by_name(handle, "early")
        if kind == "branches":
            await self._tell(handle)
        for _ in range(_LOOKS):
            await asyncio.sleep(self._dice.uniform(0.5, 2.0) * pause)
            try:
                waits = [wait for wait in await handle.waits() if not wait.answered]
            except Unavailable:
                await asyncio.sleep(0.2)
                continue
            except QueueError:  # it has ended, or Redis has lost it
                return
            for wait in waits:
                await self._answer(handle, kind, wait.id, wait.name)

    async def _answer(self, handle: TaskHandle[Any], kind: str, wait: str, name: str) -> None:
        if kind == "orders":
            await self._by_token(handle)
        elif self._dice.random() < 0.4:
            await self._by_name(handle, name)
        else:
            await self._by_id(handle, wait)
        if self._dice.random() < 0.3:
            await self._by_name(handle, name)

    async def _by_id(self, handle: TaskHandle[Any], wait: str) -> None:
        await self._send(handle.id, "id", wait, lambda value, **options: handle.answer(wait, value, **options))

    async def _by_name(self, handle: TaskHandle[Any], name: str) -> None:
        await self._send(handle.id, "name", name, lambda value, **options: handle.answer(name, value, **options))

    async def _by_token(self, handle: TaskHandle[Any]) -> None:
        token = token_of_order(handle.id)
        answer = self._producer.answer
        await self._send(handle.id, "token", token, lambda value, **options: answer(token, value, **options))

    async def _send(self, task: str, by: str, to: str, call: Callable[..., Coroutine[Any, Any, Any]]) -> None:
        """Answer until the reply is known, sometimes once more with the same id."""
        self._number += 1
        nonce = f"{self._name}:{self._number}"
        again = self._dice.random() < 0.2
        self._journal.write("answering", task=task, by=by, to=to, nonce=nonce)
        while True:
            try:
                await call({"nonce": nonce}, by=self._name, answer_id=nonce)
            except Unavailable:
                self._journal.write("unsure", task=task, nonce=nonce)
                await asyncio.sleep(0.2)
            except QueueError as error:
                self._journal.write("refused", task=task, nonce=nonce, error=f"{type(error).__name__}: {error}"[:200])
                return
            else:
                self._journal.write("answered", task=task, by=by, to=to, nonce=nonce)
                if not again:
                    return
                again = False

    async def _tell(self, handle: TaskHandle[Any]) -> None:
        """Send the message that a task waits for."""
        text = f"({handle.id}/heard)"
        while True:
            try:
                await handle.send(text, sender=self._name, message_id=text)
            except Unavailable:
                await asyncio.sleep(0.2)
            except QueueError:
                return
            else:
                return
