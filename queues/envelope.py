"""Wire format of a message: the envelope, its options, and a pre-encoded template for many tasks.

A message has two fields. `env` is the envelope as JSON, with a format version. `args` is the JSON object of the task's
arguments, kept apart so that it is parsed once, by the task's validator, or not at all.

A field that this version does not know is ignored, so that a newer producer may add one. A task that an older worker
would misread names the data format that it needs (`requires`), and older workers leave it to newer ones. A change of
the envelope itself gets a new format version, which every version of Perdure finds in `v`, next to `id` and `requires`:
older workers leave such a task to newer ones as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, Final, Literal, NamedTuple

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .defaults import MAX_SECONDS, Seconds
from .durations import Duration, Moment, seconds_until, to_seconds
from .errors import PayloadTooLarge, UnreadableEnvelope
from .json_form import encodable, named_numbers
from .keys import DATA_FORMAT, NAME_PATTERN, TENANT_PREFIX, gate_of, tenant_of, with_tenant, without_tenant
from .lanes import NORMAL, Lane, lane_in
from .partitions.route import spread
from .runtime import RUNTIME
from .security.encryption import TaskCipher, argument_chunks, arguments_field
from .security.secret_arguments import DEEPEST, MAX_SECRET_PATHS, SECRET, SecretPaths, unwrap_secrets
from .transport.large_values import LARGE_ARGUMENTS, LargeArguments, cut_arguments
from .transport.value_store import ValueStore

FORMAT_VERSION: Final = 1

DEFAULT_PAYLOAD_LIMIT: Final = 1024 * 1024
"""Largest size of envelope and arguments together, of a result, and of a step record, in bytes."""

DEFAULT_LARGE_LIMIT: Final = 64 * 1024 * 1024
"""Largest size of arguments and of results that are stored in chunks, in bytes."""

TURN_PREFIX: Final = "turn-"
"""Beginning of the ids of the tasks that are turns of sessions."""

_OF_A_TURN: Final = re.compile(TENANT_PREFIX + r"turn-[0-9a-f]{32}-[0-9]+\.[0-9]+(?:[A-Za-z_-]|\.(?!h[0-9]+$)).*")
"""The id of a turn, and more; `.hN` is that of a successor."""

TASK_ID_PATTERN: Final = f"^{TENANT_PREFIX}[A-Za-z0-9][A-Za-z0-9._-]{{0,127}}$"
"""Pattern of a task id, with its tenant in front if it has one."""

_TASK_ID = re.compile(TASK_ID_PATTERN[1:-1])


def is_task_id(task_id: str) -> bool:
    """Return whether a text is a valid task id."""
    return _TASK_ID.fullmatch(task_id) is not None


def is_turn_id(task_id: str) -> bool:
    """Return whether an id begins as those of the tasks that are turns of sessions."""
    return without_tenant(task_id).startswith(TURN_PREFIX)


def check_task_id(task_id: object) -> str:
    """Return a valid task id. Raises `ValueError` with the rule for any other."""
    if not isinstance(task_id, str) or not is_task_id(task_id):
        raise ValueError(
            "task id must be 1 to 128 letters, digits, '.', '_' or '-', and start with a letter or digit, "
            f"got {task_id!r}"
        )
    return task_id


def check_own_id(task_id: object, tenant: str | None = None) -> str:
    """Return an id that a caller has chosen for a task, with its tenant.

    A task may use ids that it makes of its own one, such as `f"{ctx.task_id}-mail"`.

    Raises `ValueError` for an id of another tenant, and for one that a turn of a session may have.
    """
    known = check_task_id(task_id)
    if tenant is None and tenant_of(known) is not None:
        raise ValueError(f"task id must have no '~', which separates a tenant from it; name a tenant, got {known!r}")
    known = with_tenant(tenant, known)
    if is_turn_id(known) and _OF_A_TURN.fullmatch(known) is None:
        raise ValueError(
            f"task id must not start with {TURN_PREFIX!r}, as the tasks of sessions' turns do, got {known!r}"
        )
    return known


def new_task_id() -> str:
    """Return a UUIDv7 (RFC 9562): unique, and sorted by the time of its creation."""
    return RUNTIME.task_id()


MAX_TIME: Final = 1e12
"""Latest deadline of a task, in seconds since the epoch."""


class Options(BaseModel):
    """Options of a run that the producer sets. For None, the definition of the task decides.

    timeout: seconds that one run may take. max_attempts: attempts before the task is given up. result_ttl: seconds for
    which the outcome is kept. expires: time by which the task must have started, in seconds since the epoch.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    timeout: Seconds | None = None
    max_attempts: Annotated[int, Field(ge=1)] | None = None
    result_ttl: Seconds | None = None
    expires: Annotated[float, Field(gt=0, le=MAX_TIME)] | None = None


_NO_OPTIONS: Final = Options()


def make_options(
    timeout: Duration | None, max_attempts: int | None, result_ttl: Duration | None, expires: Moment | None = None
) -> Options:
    """Return the options of a run, with durations in seconds. Raises `ValueError`, `TypeError`."""
    return Options(
        timeout=None if timeout is None else to_seconds(timeout, "timeout"),
        max_attempts=max_attempts,
        result_ttl=None if result_ttl is None else to_seconds(result_ttl, "result_ttl"),
        expires=None if expires is None else _deadline(expires),
    )


def _deadline(expires: Moment) -> float:
    seconds = seconds_until(expires, "expires")
    if not 0 < seconds <= MAX_SECONDS:
        raise ValueError(f"expires must be more than 0 seconds and at most {MAX_SECONDS:.0e}, got {expires!r}")
    return RUNTIME.wall_clock() + seconds


MAX_TAGS: Final = 16
MAX_TAG_LENGTH: Final = 64
MAX_KEY_LENGTH: Final = 256
"""Tags of a task, and characters of a tag and of a key. Each is a part of the message."""

_MAX_FORMATS: Final = 1_000_000
"""Largest number of a data format."""

_MAX_DEPTH: Final = 1_000
_MAX_VERSION: Final = 2**53
"""Largest depth of a child, and number of a version, in an envelope."""

MAX_LIMITS: Final = 4
"""Limits of a task, which one script takes together."""

MAX_COST: Final = 2**53
"""Largest cost of a use of a limit; a script counts in doubles."""

NO_KEY: Final = "-"
"""Key of the use of a limit or of a budget that has no keys."""

MAX_BUDGETS: Final = 32
"""Budgets that a task is charged to, with those of its parents."""

MAX_AMOUNT: Final = 2**53
"""Largest amount of a unit of a budget; a script counts in doubles."""


class LimitUse(NamedTuple):
    """Use of a limit by a task: the limit's name, its key, what the use costs, and letters for what the limit says.

    key: 16 hexadecimal digits, the digest of the values that make it (see limits/definition.py), or `-`.
    flags: `o` ordered, `p` kept while the task is parked, `d` dropped or `r` in place of the others if it had to wait.
    """

    name: Annotated[str, Field(pattern=NAME_PATTERN)]
    key: Annotated[str, Field(pattern=r"^(?:[0-9a-f]{16}|-)$")]
    cost: Annotated[int, Field(ge=0, le=MAX_COST)] = 1
    flags: Annotated[str, Field(pattern=r"^[odpr]{0,4}$")] = ""


_Unit = Annotated[str, Field(pattern=r"^(tokens|usd|steps|seconds)$")]
_Amount = Annotated[int, Field(ge=1, le=MAX_AMOUNT)]


class BudgetUse(NamedTuple):
    """A budget that a task is charged to.

    ledger: id of what is spent: that of the task whose budget it is, or `NAME:KEY`. name: empty for that of a task.
    limits: amounts by unit, as Redis counts them. window_ms: milliseconds of its window, None for ever. then, to: what
    follows when it is used up, see `Budget`. label: text of its key for people, which no envelope has.
    """

    ledger: Annotated[str, Field(pattern=rf"{TASK_ID_PATTERN[:-1]}(?::(?:[0-9a-f]{{16}}|-))?$")]
    name: Annotated[str, Field(max_length=64)]
    limits: dict[_Unit, _Amount]
    window_ms: Annotated[int, Field(ge=1, le=MAX_AMOUNT)] | None = None
    then: Literal["ask", "hand_off", "bury"] = "ask"
    to: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    label: str = ""

    def encode(self) -> list[Any]:
        """Return it as JSON data, for an envelope."""
        return list(self[:-1])


_Tag = Annotated[str, Field(min_length=1, max_length=MAX_TAG_LENGTH)]
_Mark = Annotated[tuple[str, ...], Field(max_length=DEEPEST)]


class Envelope(BaseModel):
    """A task on the wire: id, name, headers for tracing and routing, options.

    app: name of the app whose workers run the task; None if any app with a task of this name may.
    secrets: paths of secret values in the arguments, see security/secret_arguments.py.
    requires: oldest data format that a worker must know to run the task; older workers park it.
    key: the ordering key that the producer named. tags: words by which people find the task. copy_of: ids of the task
    that it is a fork or an imported copy of, of the task that this one is a copy of, and so on. on_end: whether the act
    that ends it enqueues a clean-up task; then a worker must cancel it. parent: id of the task that has spawned it.
    depth: number of parents above it. group: whether its arguments hold a group, see groups.py. version: of its code in
    the worker that spawned it, which its first run keeps. unique: digest of its unique key, see unique.py. limits: uses
    of the limits whose tokens it must have to run, by name. lane: of its queue, see lanes.py; None for the normal one.
    """

    # Keys only: ids are unique, so caching them (16,384 strings by default) would only use memory.
    model_config = ConfigDict(frozen=True, extra="ignore", cache_strings="keys")

    v: int = FORMAT_VERSION
    id: Annotated[str, Field(pattern=TASK_ID_PATTERN)]
    task: Annotated[str, Field(min_length=1, max_length=256)]
    app: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    headers: dict[str, str] = Field(default_factory=dict)
    options: Options = _NO_OPTIONS
    secrets: Annotated[tuple[_Mark, ...], Field(max_length=MAX_SECRET_PATHS)] = ()
    requires: Annotated[int, Field(ge=0, le=_MAX_FORMATS)] = 0
    key: Annotated[str, Field(max_length=MAX_KEY_LENGTH)] | None = None
    tags: Annotated[tuple[_Tag, ...], Field(max_length=MAX_TAGS)] = ()
    copy_of: tuple[Annotated[str, Field(pattern=TASK_ID_PATTERN)], ...] = ()
    on_end: bool = False
    parent: Annotated[str, Field(pattern=TASK_ID_PATTERN)] | None = None
    depth: Annotated[int, Field(ge=0, le=_MAX_DEPTH)] = 0
    version: Annotated[int, Field(ge=1, le=_MAX_VERSION)] | None = None
    group: bool = False
    unique: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")] | None = None
    limits: Annotated[tuple[LimitUse, ...], Field(max_length=MAX_LIMITS)] = ()
    lane: Annotated[str, Field(min_length=1, max_length=16)] | None = None
    budgets: tuple[BudgetUse, ...] = ()

    @property
    def tenant(self) -> str | None:
        """The tenant that the task belongs to, which is a part of its id; None without one."""
        return tenant_of(self.id)

    @property
    def session(self) -> str:
        """Id of the session that the task is a turn of; empty for another task, whatever its headers say."""
        is_turn = is_turn_id(self.id) and _OF_A_TURN.fullmatch(self.id) is None
        return self.headers.get("session", "") if is_turn else ""

    @property
    def plain(self) -> bool:
        """Whether it holds only the id, and the names of the task and its app."""
        special = self.headers or self.secrets or self.requires or self.tags or self.copy_of
        special = special or self.on_end or self.parent is not None or self.group or self.unique is not None
        return (
            not (special or self.limits or self.lane is not None or self.budgets)
            and self.key is None
            and (self.options is _NO_OPTIONS or self.options == _NO_OPTIONS)
        )

    def encode(self) -> bytes:
        fields: dict[str, Any] = {"v": self.v, "id": self.id, "task": self.task}
        if self.app is not None:
            fields["app"] = self.app
        if self.headers:
            fields["headers"] = self.headers
        if self.options is not _NO_OPTIONS:
            options = self.options.model_dump(exclude_none=True)
            if options:
                fields["options"] = options
        if self.secrets:
            fields["secrets"] = self.secrets
        if self.requires:
            fields["requires"] = self.requires
        if self.key is not None:
            fields["key"] = self.key
        if self.tags:
            fields["tags"] = self.tags
        if self.copy_of:
            fields["copy_of"] = self.copy_of
        if self.on_end:
            fields["on_end"] = True
        if self.unique or self.limits or self.group or self.lane is not None or self.parent is not None or self.budgets:
            fields |= self._further()
        return orjson.dumps(fields)

    def _further(self) -> dict[str, Any]:
        """Return the fields of a unique or limited task, of a lane, of a child, and of the callback of a group."""
        fields: dict[str, Any] = {
            "unique": self.unique,
            "parent": self.parent,
            "depth": self.depth,
            "version": self.version,
        }
        fields |= {"group": self.group, "limits": [list(use) for use in self.limits], "lane": self.lane}
        fields["budgets"] = [use.encode() for use in self.budgets]
        return {name: value for name, value in fields.items() if value}

    @classmethod
    def decode(cls, data: bytes) -> Envelope:
        """Decode an envelope. Raises `UnreadableEnvelope` with the first problem."""
        try:
            envelope: Envelope = cls.__pydantic_validator__.validate_json(data)
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


_MAX_LINE_LENGTH: Final = 16
"""Ids that a copy of a copy of a copy keeps."""


def copied_envelope(envelope: Mapping[str, Any], task_id: str) -> bytes:
    """Return a stored envelope for a copy of its task. A copy with the same id is the same task."""
    if envelope["id"] == task_id:
        return orjson.dumps(envelope)
    former = [envelope["id"], *envelope.get("copy_of", ())]
    return orjson.dumps({**envelope, "id": task_id, "copy_of": former[:_MAX_LINE_LENGTH]})


def readable_envelope(data: bytes | None) -> Envelope | None:
    """Return a stored envelope, None without one or if this version cannot read it."""
    try:
        return None if data is None else Envelope.decode(data)
    except UnreadableEnvelope:
        return None


def newer_envelope(data: bytes) -> Envelope | None:
    """Return what is known of an envelope of a newer version: id, data format that it needs, name of its task ("?" if
    it is not a text any more). None for any other data.
    """
    try:
        found = orjson.loads(data)
        version, task, needed = found["v"], found.get("task"), found.get("requires")
        if type(version) is not int or version <= FORMAT_VERSION:
            return None
        return Envelope(
            v=version,
            id=found["id"],
            task=task if isinstance(task, str) else "?",
            requires=max(DATA_FORMAT + 1, needed if type(needed) is int else 0),
        )
    except (orjson.JSONDecodeError, LookupError, TypeError, AttributeError, ValidationError):
        return None


def encode_arguments(arguments: Mapping[str, Any]) -> tuple[bytes, SecretPaths]:
    """Return arguments as JSON, and the paths of their secrets. Raises `TypeError` for values that are not JSON."""
    secret = False

    def mask(value: Any) -> str:
        nonlocal secret
        if not isinstance(value, SECRET):
            raise TypeError
        secret = True
        return ""

    try:
        data = _dump(dict(arguments), mask)
        if not secret:
            return data, ()
        whole, marks = unwrap_secrets(dict(arguments), orjson.loads(data))
        return orjson.dumps(whole), marks
    except (TypeError, ValueError) as error:
        given: object = arguments
        if not isinstance(given, Mapping):
            raise TypeError(f"arguments must be a dict by name, got {given!r}") from None
        raise TypeError(
            f"could not encode the arguments as JSON: {error}; pass plain data, or enqueue through the typed task, "
            "which serialises pydantic types"
        ) from None


def _dump(arguments: dict[str, Any], mask: Callable[[Any], str]) -> bytes:
    try:
        data = orjson.dumps(arguments, default=mask)
    except TypeError:
        arguments = encodable(arguments)
        data = orjson.dumps(arguments, default=mask)
    return orjson.dumps(named_numbers(arguments), default=mask) if b"null" in data else data  # as which it writes NaN


def plain_data(data: bytes) -> Any:
    """Decode stored JSON that can be shown inside a document. Raises `ValueError` for anything else.

    The decoder accepts deeper nesting than the encoder (254 levels); two levels are kept for the document around it.
    """
    found = orjson.loads(data)
    try:
        orjson.dumps([[found]])
    except orjson.JSONEncodeError as error:
        raise ValueError(str(error)) from None
    return found


def shown_data(stored: bytes | None) -> Any:
    """Return stored JSON as data for display; as text if it is not JSON, and None if it is missing or empty."""
    if not stored:
        return None
    try:
        return plain_data(stored)
    except ValueError:
        return stored.decode("utf-8", "replace")


def check_size(what: str, size: int, limit: int, setting: str = "payload_limit") -> None:
    """Raise `PayloadTooLarge` if a size is over its limit."""
    if size > limit:
        raise PayloadTooLarge(what, size, limit, setting)


class TaskMessage(NamedTuple):
    """An encoded task. number: hash of its key, None for a task without a key. own_id: whether the caller chose the id,
    so that the task may be stored already. large: its arguments, if `arguments` is a reference to chunks. names: task
    and app ('' for none) if the envelope holds no more than the id and these: then its record keeps only the names.
    limits: those of its envelope.
    """

    id: str
    envelope: bytes
    arguments: bytes
    number: int | None
    own_id: bool
    large: LargeArguments | None = None
    names: tuple[str, str] | None = None
    limits: tuple[LimitUse, ...] = ()

    @property
    def lane(self) -> Lane:
        """The lane of the queue that the task goes to."""
        return NORMAL if self.names is not None else lane_in(self.envelope)

    def check(self, payload_limit: int, large_limit: int) -> None:
        """Raise `PayloadTooLarge` if the task is too large, also with its arguments in chunks."""
        size = len(self.envelope) + len(self.arguments)
        if size > payload_limit:
            if large_limit <= payload_limit:
                raise PayloadTooLarge("the task's envelope and arguments", size, payload_limit)
            check_size("the task's envelope", len(self.envelope), payload_limit)
            check_size("the task's arguments", len(self.arguments), large_limit, "large_limit")

    def encrypted(
        self, cipher: TaskCipher, limit: int = DEFAULT_PAYLOAD_LIMIT, *, store: ValueStore | None
    ) -> TaskMessage:
        """Return the message as it is stored: encrypted if keys are set, and arguments over the limit in chunks, or in
        the store if they are too large for Redis.
        """
        form = orjson.loads(self.envelope)
        task, secrets = form["task"], form.get("secrets", ())
        if len(self.envelope) + len(self.arguments) <= limit:
            return self._replace(arguments=cipher.encrypt(arguments_field(task, secrets), self.arguments))
        large = cut_arguments(cipher, self.id, task, secrets, self.arguments, store)
        form["requires"] = max(form.get("requires", 0), LARGE_ARGUMENTS)
        return self._replace(envelope=orjson.dumps(form), arguments=large.reference.encode(), large=large, names=None)

    def plain_arguments(self, cipher: TaskCipher, task: str, secrets: SecretPaths) -> bytes:
        """Return the arguments of an encrypted message as JSON. Raises `DecryptionError`."""
        if self.large is not None:
            return cipher.decrypt(argument_chunks(task, secrets), self.large.stored)
        return cipher.decrypt(arguments_field(task, secrets), self.arguments)

    def with_unique(self, digest: str) -> TaskMessage:
        """Return the message with the digest of its unique key."""
        return self._replace(envelope=b'%b,"unique":"%b"}' % (self.envelope[:-1], digest.encode()), names=None)

    @property
    def ordered(self) -> bool:
        """Whether no later task of its key may overtake it."""
        return any("o" in use.flags for use in self.limits)

    def with_limits(self, uses: tuple[LimitUse, ...]) -> TaskMessage:
        """Return the message with the limits that its task uses.

        Tasks of one key are in one partition. Without an order of the limit, an ordering key or an id that the caller
        has chosen decides about the partition.
        """
        if not uses:
            return self
        envelope = b'%b,"limits":%b}' % (self.envelope[:-1], orjson.dumps([list(use) for use in uses]))
        together = any(flag in use.flags for use in uses for flag in "or")
        number = spread(gate_of(uses).key_id) if together or self.number is None else self.number
        return self._replace(envelope=envelope, names=None, limits=uses, number=number)

    def placed_by_id(self) -> TaskMessage:
        """Return the message with a number from its id, so that an unconfirmed task is found when it is sent again."""
        return self._replace(number=spread(self.id) if self.number is None else self.number, own_id=True)


_PLACEHOLDER = "0"


class EnvelopeTemplate:
    """An encoded envelope without its id. Raises `ValueError` for an invalid task, headers, options, tags or app."""

    __slots__ = ("_after", "_before", "_names")

    def __init__(
        self,
        task: str,
        headers: Mapping[str, str] | None = None,
        options: Options | None = None,
        tags: Collection[str] = (),
        *,
        app: str | None = None,
        on_end: bool = False,
        lane: Lane | None = None,
        **inherited: Any,
    ) -> None:
        """inherited: parent, depth and version of a spawned task."""
        given: dict[str, Any] = inherited if options is None else {**inherited, "options": options}
        if lane is not None and lane != NORMAL:
            given = {**given, "lane": lane}
        if isinstance(tags, str):
            raise ValueError(f"tags must be a list of texts, got {tags!r}")
        try:
            given["tags"] = tuple(dict.fromkeys(tags))
            blank = Envelope(id=_PLACEHOLDER, task=task, app=app, headers=dict(headers or {}), on_end=on_end, **given)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}, got {first['input']!r}") from None
        self._before, _, self._after = blank.encode().partition(b'"id":"%s"' % _PLACEHOLDER.encode())
        self._before += b'"id":"'
        self._after = b'"' + self._after
        self._names = (task, app or "") if blank.plain else None

    def message(
        self,
        arguments: bytes,
        secrets: SecretPaths = (),
        *,
        key: str | None = None,
        task_id: str | None = None,
        tenant: str | None = None,
        reserved: bool = False,
    ) -> TaskMessage:
        """Return the message of one task.

        Args:
            secrets: Paths of secrets in the arguments.
            task_id: Id that the caller has chosen.
            tenant: Tenant that the task belongs to, a part of its id.
            reserved: Whether it is that of a turn of a session.
        """
        own_id = task_id is not None
        known = new_task_id() if task_id is None else task_id
        if own_id and not reserved:
            known = check_own_id(known, tenant)
        elif tenant is not None:
            known = with_tenant(tenant, known)
        envelope = b"%b%b%b" % (self._before, known.encode(), self._after)
        names = self._names if key is None and not secrets else None
        if key is not None:
            if not isinstance(key, str):
                raise TypeError(f"key must be a string, got {key!r}")
            if len(key) > MAX_KEY_LENGTH:
                raise ValueError(f"key must have at most {MAX_KEY_LENGTH} characters, got {len(key)}")
            envelope = b'%b,"key":%b}' % (envelope[:-1], orjson.dumps(key))
        key = known if key is None and own_id else key
        if secrets:
            envelope = b'%b,"secrets":%b}' % (envelope[:-1], orjson.dumps(secrets))
        return TaskMessage(known, envelope, arguments, None if key is None else spread(key), own_id, names=names)
