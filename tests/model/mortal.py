"""A gateway whose caller may die at any of its commands, and whose bytes may arrive once more."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from perdure.queues import Gateway
from perdure.queues.transport.pipelining import Argument, Command
from perdure.queues.transport.scripts import Script

__all__ = ["Died", "Mortal"]


class Died(BaseException):
    """The process of the caller died."""


class Mortal(Gateway):
    """A gateway whose caller dies at its n-th command: before it is executed, or before its reply arrives.

    calls: all scripts that were run, in order.
    """

    left: int | None = None
    executed = False
    calls: list[tuple[Script, Sequence[str], Sequence[Argument]]] | None = None

    async def _mortal(self, call: Callable[[], Awaitable[Any]]) -> Any:
        if self.left is None:
            return await call()
        self.left -= 1
        if self.left < 0 and not self.executed:
            raise Died
        reply = await call()
        if self.left < 0:
            raise Died
        return reply

    async def command(self, *command: Argument, repeatable: bool = True, node_of: str | None = None) -> Any:
        call = super().command
        return await self._mortal(lambda: call(*command, repeatable=repeatable, node_of=node_of))

    async def run(self, script: Script, keys: Sequence[str], args: Sequence[Argument], derived: Any = None) -> Any:
        call = super().run
        if self.calls is not None:
            self.calls.append((script, keys, args))
        return await self._mortal(lambda: call(script, keys, args, derived))

    async def pipeline(self, commands: Sequence[Command], *, node_of: str | None = None) -> list[Any]:
        call = super().pipeline
        found: list[Any] = await self._mortal(lambda: call(commands, node_of=node_of))
        return found
