"""What the envelopes of many tasks have in common, checked and encoded once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from pydantic import ValidationError

from .envelope import Envelope, Options, check_task_id, new_task_id
from .marks import Marks
from .routes import spread
from .sending import Message

__all__ = ["Form"]

_PLACE = "0"


class Form:
    """An envelope without its id. Raises `ValueError` for a task, headers or options that no envelope can have."""

    __slots__ = ("_after", "_before")

    def __init__(self, task: str, headers: Mapping[str, str] | None = None, options: Options | None = None) -> None:
        given: dict[str, Any] = {} if options is None else {"options": options}
        try:
            blank = Envelope(id=_PLACE, task=task, headers=dict(headers or {}), **given)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}, not {first['input']!r}") from None
        self._before, _, self._after = blank.encode().partition(b'"id":"%s"' % _PLACE.encode())
        self._before += b'"id":"'
        self._after = b'"' + self._after

    def message(
        self, arguments: bytes, secrets: Marks = (), *, key: str | None = None, task_id: str | None = None
    ) -> Message:
        """One task. secrets: where its arguments hold some. task_id: the caller's own; `ValueError` for one that cannot
        be.
        """
        own_id = task_id is not None
        known = new_task_id() if task_id is None else check_task_id(task_id)
        key = task_id if key is None else key
        envelope = b"%b%b%b" % (self._before, known.encode(), self._after)
        if secrets:
            envelope = b'%b,"secrets":%b}' % (envelope[:-1], orjson.dumps(secrets))
        return Message(known, envelope, arguments, None if key is None else spread(key), own_id)
