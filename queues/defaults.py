"""Settings of the connection, with their defaults from the PERDURE_* variables of the environment.

`read_settings` is the one reader of these variables: a producer reads `ConnectionSettings`, a worker a subclass of it.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from .durations import parse_duration, to_seconds
from .errors import ConfigurationError
from .keys import check_name
from .security.encryption import Encryptor, make_encryptor
from .security.urls import shown_url
from .transport.address import Address
from .transport.gateway import Gateway
from .transport.replication import Replication
from .transport.server_check import ServerRequirements

if TYPE_CHECKING:
    from .security.approvers import AnswerKeys

MAX_SECONDS: Final = 1e10
"""Upper limit of a duration in seconds (three centuries); a script would fail halfway on one that Redis cannot count"""

MAX_TURNS: Final = 10_000
"""Most turns in the history of a session; up to some 100 more, since Redis trims whole nodes of a stream."""

Seconds = Annotated[float, Field(gt=0, le=MAX_SECONDS, allow_inf_nan=False)]


class ConnectionSettings(BaseModel):
    """Settings of one deployment's server and data, from arguments or from PERDURE_* variables.

    Args:
        redis_url: URL of the server; empty for the embedded server in `data_dir`.
        namespace: prefix of the deployment's keys.
        tenant: whose tasks and sessions this process sees and makes; None for those of all tenants.
        data_dir: directory of the embedded server.
        replicas: number of replicas that must have a write of `durability="replicated"`.
        replication_timeout: seconds that such a write waits for them.
        allow_eviction: use a server whose eviction policy is `allkeys-*`, which deletes tasks when its memory is full.
        require_durable: use only a server that evicts no keys and has each write on its disk before it replies.
        encryption_keys, encryption_key_file: keys as text or in a file; the first one encrypts, all decrypt.
        encryption_required: refuse arguments, results and checkpoints that are not encrypted.
        sign_only: sign the data with the key instead of encrypting it: it stays readable, and no change goes unnoticed.
        approvers, approvers_file: public keys of those whose signature an answer needs, as text or in a file, and
            groups of them; without any, a process that has the deployment's key can answer.
        approver_key_file: private key with which this process signs its answers; workers must not have one.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", hide_input_in_errors=True)

    redis_url: str = ""
    namespace: str = "perdure"
    tenant: str | None = None
    data_dir: Path | None = None
    replicas: Annotated[int, Field(ge=1)] = 1
    replication_timeout: Seconds = 5.0
    allow_eviction: bool = False
    require_durable: bool = False
    encryption_keys: SecretStr = SecretStr("")
    encryption_key_file: Path | None = None
    encryption_required: bool = False
    sign_only: bool = False
    approvers: str = ""
    approvers_file: Path | None = None
    approver_key_file: Path | None = None

    @model_validator(mode="before")
    @classmethod
    def _read_environment(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Add the settings that were not given and have a variable that is not empty. Raises `ConfigurationError`."""
        _check_names(cls, given)
        read = {name: os.environ.get(f"PERDURE_{name.upper()}") for name in cls.model_fields}
        return {name: text for name, text in read.items() if text} | given

    @field_validator("*", mode="before")
    @classmethod
    def _read_duration(cls, value: object, info: ValidationInfo) -> object:
        """Read a timedelta, and the form of the environment: 90, 15m, 2h. All settings that are floats are times."""
        if isinstance(value, str) and cls.model_fields[str(info.field_name)].annotation is float:
            try:
                return parse_duration(value)
            except ValueError:
                raise ValueError("must be a number of seconds, or a duration such as 90s, 15m, 1h30m or 7d") from None
        return to_seconds(value) if isinstance(value, timedelta) else value

    @field_validator("namespace")
    @classmethod
    def _check_namespace(cls, name: str) -> str:
        return check_name("namespace", name)

    @field_validator("tenant")
    @classmethod
    def _check_tenant(cls, name: str | None) -> str | None:
        return None if name is None else check_name("tenant", name)

    @field_validator("data_dir", mode="before")
    @classmethod
    def _check_data_dir(cls, place: object) -> object:
        check_no_url(str(place), "a folder of this host")
        return place

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Yield names and values for `repr` and `str`, URLs without their passwords."""
        for name, value in super().__repr_args__():
            yield name, shown_url(value) if isinstance(value, str) else value

    @property
    def data_folder(self) -> Path:
        """The data directory, else `perdure` in the user's data folder (XDG Base Directory Specification)."""
        if self.data_dir is not None:
            return self.data_dir.expanduser()
        home = os.environ.get("XDG_DATA_HOME")
        return (Path(home) if home else Path.home() / ".local" / "share") / "perdure"

    @property
    def address(self) -> Address:
        """The server's address. Raises `ConfigurationError`."""
        address = Address.parse(self.redis_url or "embedded:", data_dir=lambda: self.data_folder)
        return address if self.redis_url else replace(address, assumed=True)

    @property
    def replication(self) -> Replication:
        """The meaning of `durability="replicated"`."""
        return Replication(self.replicas, self.replication_timeout)

    @property
    def requirements(self) -> ServerRequirements:
        """The conditions under which the server is used."""
        return ServerRequirements(self.allow_eviction, self.require_durable)

    @property
    def encryptor(self) -> Encryptor:
        """The encryptor of the tasks' data; without keys, data stays plain. Raises `ConfigurationError`."""
        file = self.encryption_key_file
        return make_encryptor(
            self.encryption_keys.get_secret_value(),
            None if file is None else file.expanduser(),
            required=self.encryption_required,
            sign_only=self.sign_only,
        )

    @property
    def answer_keys(self) -> AnswerKeys | None:
        """The keys of approvers that this process knows; None without any. Raises `ConfigurationError`."""
        if not (self.approvers or self.approvers_file or self.approver_key_file):
            return None
        from .security.approvers import make_answer_keys

        file = None if self.approvers_file is None else self.approvers_file.expanduser()
        return make_answer_keys(self.approvers, file, self.approver_key_file)

    def make_gateway(self, encryptor: Encryptor) -> Gateway:
        """Return a gateway to the server that is not open yet."""
        return Gateway(
            self.address,
            replication=self.replication,
            encryptor=encryptor,
            answer_keys=self.answer_keys,
            requirements=self.requirements,
        )


def check_no_url(place: str, allowed: str) -> None:
    """Raise `ValueError` for a URL where a path is expected; it may hold a password, so only its scheme is shown.

    allowed: what the place may be.
    """
    scheme, mark, _ = place.partition("://")
    if mark:
        raise ValueError(f"must be {allowed}, got a URL with {scheme}://")


S = TypeVar("S", bound=ConnectionSettings)

_PLACES: Final = ("redis_url", "memory", "artifacts")
"""Settings that may be URLs with a password."""


def read_settings(kind: type[S], given: Mapping[str, object]) -> S:
    """Return settings from the environment; those given that are not None take precedence.

    Raises `ConfigurationError`, which names the argument or the variable and what is wrong with it.
    """
    given = {name: value for name, value in given.items() if value is not None}
    fields = kind.model_fields
    _check_names(kind, given)
    try:
        return kind(**given)  # type: ignore[arg-type]  # pydantic checks each against its own field
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(str(part) for part in first["loc"])
        where = name if name in given else f"PERDURE_{name.upper()}"
        secret = name in _PLACES or fields[str(first["loc"][0])].annotation is SecretStr
        problem = first["msg"].removeprefix("Value error, ")
        got = "" if secret or ", got " in problem else f" (got {first['input']!r})"
        raise ConfigurationError(f"{where}: {problem}{got}") from None


def _check_names(kind: type[ConnectionSettings], given: Mapping[str, object]) -> None:
    """Raise `ConfigurationError` for names that are not those of settings."""
    known = kind.model_fields
    if unknown := sorted(given.keys() - known.keys()):
        hint = nearest(unknown[0], known)
        raise ConfigurationError(f"no setting is called {', '.join(unknown)}; help(perdure.Settings) lists them{hint}")


_MAX_NAMES: Final = 1_000
_MAX_NAME_LENGTH: Final = 100
"""Limits of the search for a similar name, which is slow, and whose names may be from Redis."""


def nearest(name: str, known: Collection[str]) -> str:
    """Return a question for the end of a sentence about an unknown name; empty without a similar one."""
    near = difflib.get_close_matches(name[:_MAX_NAME_LENGTH], islice(known, _MAX_NAMES), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


_PREFIX: Final = "PERDURE_"
_FOREIGN: Final = ("PERDURE_TEST_", "PERDURE_LLM_", "PERDURE_SUPERVISED", "PERDURE_IMPORT_PATH")
"""Beginnings of variables that are no settings: of tests, of examples, and those by which Perdure starts a process."""

_CLOSE: Final = 0.8
"""Similarity (0 to 1) of a name to a setting of the connection from which on that one must be meant."""

_reported: set[str] = set()
"""Variables that this process has reported."""


def unknown_variables() -> Iterator[str]:
    """Yield a text for each PERDURE_* variable that no setting has, with the nearest name; once per process.

    A process that has not loaded the settings of workers does not know their names: only what looks like a setting of
    the connection is reported there.
    """
    kinds: list[type[ConnectionSettings]] = [ConnectionSettings]
    for kind in kinds:
        kinds += kind.__subclasses__()
    known = [name.upper() for name in dict.fromkeys(name for kind in kinds for name in kind.model_fields)]
    for variable, value in sorted(os.environ.items()):
        name = variable.removeprefix(_PREFIX)
        if not value or name == variable or variable in _reported or name in known or variable.startswith(_FOREIGN):
            continue
        near = difflib.get_close_matches(name, known, n=1, cutoff=_CLOSE if len(kinds) == 1 else 0.6)
        if near or len(kinds) > 1:
            _reported.add(variable)
            hint = f"; did you mean {_PREFIX}{near[0]}?" if near else "; help(perdure.Settings) lists them"
            yield f"the environment variable {variable} is not a setting of Perdure{hint}"


def unknown_option(
    what: str, unknown: Collection[str], known: Collection[str], meant: Mapping[str, str] | None = None
) -> str:
    """Return the text of an error about options that do not exist.

    Args:
        what: kind of the options, such as "option of a step".
        meant: what to use instead, by the name that another project or another function has for it.
    """
    first = next(iter(unknown))
    remedy = (meant or {}).get(first)
    hint = nearest(first, known) if remedy is None else f"; use {remedy}"
    return f"no {what} is called {', '.join(unknown)}; there are {', '.join(known)}{hint}"
