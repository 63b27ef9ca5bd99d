"""Options that select dead letters, which all commands of `perdure dlq` share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Concatenate, ParamSpec

import typer

from ....deadletter.letters import Filter
from ....deadletter.policy import Reason
from ....queues.producer import Producer
from .connection import redis_now
from .options import AppOption, PointInTime, QueueOption, ReasonOption, TaskNameOption, read_time, with_options

P = ParamSpec("P")

_OPTIONS = {
    "queue": QueueOption,
    "reason": ReasonOption,
    "task": TaskNameOption,
    "app": AppOption,
    "since": Annotated[
        PointInTime | None,
        typer.Option(metavar="TIME", parser=read_time, help="Only those that died since then: 2h ago, or an ISO time."),
    ],
    "until": Annotated[
        PointInTime | None, typer.Option(metavar="TIME", parser=read_time, help="Only those that died until then.")
    ],
    "error": Annotated[
        str | None, typer.Option(metavar="TEXT", help="Only those with this text in their reason or error.")
    ],
    "key": Annotated[str | None, typer.Option(metavar="KEY", help="Only those with this ordering key.")],
    "tag": Annotated[list[str] | None, typer.Option(metavar="TAG", help="Only those with this tag. Repeatable.")],
}


@dataclass(frozen=True, slots=True)
class LetterOptions:
    """The options of one call; None for each that is not given."""

    queue: str | None
    reason: Reason | None
    task: str | None
    app: str | None
    since: PointInTime | None
    until: PointInTime | None
    error: str | None
    key: str | None
    tag: Sequence[str] | None

    async def filter(self, producer: Producer) -> Filter:
        """Return the filter, which the queue is no part of."""
        now = 0 if self.since is self.until is None else await redis_now(producer)
        return Filter(
            self.reason,
            self.task,
            since=None if self.since is None else self.since.at(now),
            until=None if self.until is None else self.until.at(now),
            error=self.error,
            key=self.key,
            tags=tuple(self.tag or ()),
            app=self.app,
        )


def selecting(
    command: Callable[Concatenate[Producer, LetterOptions, P], Coroutine[Any, Any, None]],
) -> Callable[..., Coroutine[Any, Any, None]]:
    """Add the options to an async command, which receives them after the producer. Stands within `connected`."""

    @functools.wraps(command)
    def called(wanted: LetterOptions, producer: Producer, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        return command(producer, wanted, *args, **kwargs)

    return with_options(called, _OPTIONS, LetterOptions)
