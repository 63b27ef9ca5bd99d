"""What a message carries: data, never code.

A message has two fields. `env` is this envelope as JSON, with a format version. `args` is the JSON object of the
task's arguments, kept apart so that it is parsed once, by the task's own validator, or not at all.

A field that this version does not know is ignored, so that a newer producer may add one; what an older worker could
not read rightly gets a new version number, and every worker refuses a version newer than its own.

What the envelopes of many tasks have in common, checked and encoded once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, NamedTuple

import orjson
import uuid_utils
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .defaults import Seconds
from .errors import PayloadTooLarge, UnreadableEnvelope
from .partitions import spread
from .security import DEEPEST, MOST_SECRET_PATHS, SECRET, SecretPaths, unwrap_secrets

__all__ = [
    "DEFAULT_PAYLOAD_LIMIT",
    "FORMAT_VERSION",
    "Envelope",
    "EnvelopeTemplate",
    "Options",
    "TaskMessage",
    "check_task_id",
    "encode_arguments",
    "new_task_id",
]

FORMAT_VERSION: Final = 1

DEFAULT_PAYLOAD_LIMIT: Final = 1024 * 1024
"""Bytes that envelope and arguments, a result, or a step's record may have."""

_TASK_ID = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"


def check_task_id(task_id: str) -> str:
    """Return an id that can name a task; `ValueError` with the rule for one that cannot."""
    if not re.fullmatch(_TASK_ID, task_id):
        raise ValueError(
            f"{task_id!r} cannot be a task's id: use 1 to 128 letters, digits, '.', '_' or '-', "
            "beginning with a letter or digit"
        )
    return task_id


def new_task_id() -> str:
    """A UUIDv7 (RFC 9562): unique, and sorted by the time of its making."""
    return str(uuid_utils.uuid7())


class Options(BaseModel):
    """What the producer asks of the run; what is None is decided by the task's definition.

    timeout: seconds one run may take. max_attempts: runs before the task is given up. result_ttl: seconds the
    outcome is kept.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    timeout: Seconds | None = None
    max_attempts: Annotated[int, Field(ge=1)] | None = None
    result_ttl: Seconds | None = None


_NO_OPTIONS: Final = Options()

_Mark = Annotated[tuple[str, ...], Field(max_length=DEEPEST)]


class Envelope(BaseModel):
    """One task as it travels: identity, name, headers for tracing and routing, options.

    secrets: where in the arguments values are that nobody is to see, see marks.py.
    """

    # No two tasks have the same id: kept for the next time (by default 16,384 strings are), it would only take room.
    model_config = ConfigDict(frozen=True, extra="ignore", cache_strings="keys")

    v: int = FORMAT_VERSION
    id: Annotated[str, Field(pattern=_TASK_ID)]
    task: Annotated[str, Field(min_length=1, max_length=256)]
    headers: dict[str, str] = Field(default_factory=dict)
    options: Options = _NO_OPTIONS
    secrets: Annotated[tuple[_Mark, ...], Field(max_length=MOST_SECRET_PATHS)] = ()

    @property
    def plain(self) -> bool:
        """Whether it says no more than the task's id and name."""
        return not self.headers and not self.secrets and (self.options is _NO_OPTIONS or self.options == _NO_OPTIONS)

    def encode(self) -> bytes:
        fields: dict[str, Any] = {"v": self.v, "id": self.id, "task": self.task}
        if self.headers:
            fields["headers"] = self.headers
        if self.options is not _NO_OPTIONS:
            options = self.options.model_dump(exclude_none=True)
            if options:
                fields["options"] = options
        if self.secrets:
            fields["secrets"] = self.secrets
        return orjson.dumps(fields)

    @classmethod
    def decode(cls, data: bytes) -> Envelope:
        """Read an envelope; `UnreadableEnvelope` says what is wrong with it."""
        try:
            envelope = cls.model_validate_json(data)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise UnreadableEnvelope(f"not an envelope: {where or 'body'}: {first['msg']}") from None
        if envelope.v > FORMAT_VERSION:
            raise UnreadableEnvelope(
                f"envelope has format version {envelope.v}, this worker reads up to {FORMAT_VERSION}: "
                "upgrade the worker, then replay"
            )
        return envelope


def encode_arguments(arguments: Mapping[str, Any]) -> tuple[bytes, SecretPaths]:
    """Arguments by name as JSON, and where secrets are among them. `TypeError` names what cannot be JSON."""
    secret = False

    def mask(value: Any) -> str:
        nonlocal secret
        if not isinstance(value, SECRET):
            raise TypeError
        secret = True
        return ""

    try:
        data = orjson.dumps(dict(arguments), default=mask)
        if not secret:
            return data, ()
        whole, marks = unwrap_secrets(dict(arguments), orjson.loads(data))
        return orjson.dumps(whole), marks
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"arguments cannot be sent as JSON: {error}; pass plain data, or enqueue through the typed task, "
            "which serialises pydantic types"
        ) from None


def check_size(what: str, size: int, limit: int) -> None:
    if size > limit:
        raise PayloadTooLarge(what, size, limit)


class TaskMessage(NamedTuple):
    """A task as it is stored. number: what its key stands for; None where it has no key. own_id: its id is the
    caller's, so it may be known from before.
    """

    id: str
    envelope: bytes
    arguments: bytes
    number: int | None
    own_id: bool


_PLACE = "0"


class EnvelopeTemplate:
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
        self, arguments: bytes, secrets: SecretPaths = (), *, key: str | None = None, task_id: str | None = None
    ) -> TaskMessage:
        """One task. secrets: where its arguments hold some. task_id: the caller's own; `ValueError` for one that cannot
        be.
        """
        own_id = task_id is not None
        known = new_task_id() if task_id is None else check_task_id(task_id)
        key = task_id if key is None else key
        envelope = b"%b%b%b" % (self._before, known.encode(), self._after)
        if secrets:
            envelope = b'%b,"secrets":%b}' % (envelope[:-1], orjson.dumps(secrets))
        return TaskMessage(known, envelope, arguments, None if key is None else spread(key), own_id)
