"""Settings of a worker: small frozen objects, read once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from ..deadletter import DEFAULT_RETENTION, Retry
from ..queues import (
    DEFAULT_PAYLOAD_LIMIT,
    LONGEST,
    Address,
    Encryptor,
    Replication,
    check_name,
    default_data_dir,
    make_encryptor,
)
from .errors import ConfigurationError

__all__ = ["Settings", "load_settings"]

Seconds = Annotated[float, Field(gt=0, le=LONGEST, allow_inf_nan=False)]
Delay = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Settings(BaseSettings):
    """Everything a worker can be told, from arguments or from PERDURE_* variables of the environment. Times in seconds.

    redis_url: where the queues are; empty for the embedded server in data_dir.
    namespace: the deployment's keys.
    lease: how long a delivery stays a silent worker's; all workers of a namespace must have the same.
    grace: how long running tasks have to reach a step boundary when the worker is stopped.
    note_interval: between notes that a long step lives.
    probation: how long a worker without supervisor takes nothing new while it runs a task whose worker died, unless
        that is cleared before.
    result_ttl, dead_letter_ttl: how long outcomes and dead letters are kept.
    partitions: whether a worker takes from all partitions of its queues, or from its share of them, the rest being
        other workers' who share.
    payload_limit: bytes.
    replicas, replication_timeout: what `durability="replicated"` means: how many must have it, and for how long they
        are waited for.
    crash_threshold, crash_window: with more crashes of its workers than that within the window, a supervisor pauses.
    restart_delays: before what crashed is started again, after the first crash within the window, the second and so on.
    time_limit: how long one run may take where neither its task nor its producer says.
    idle_limit: how long a run may go without a step that begins or ends and without a save, where its task does
        not say.
    stall_limit: for how long the event loop may be blocked, or a handler go on after it was cancelled, before the
        worker gives the tasks up, and its supervisor replaces it.
    stall_warning: after which a blocked loop is told of, with the stacks.
    heartbeat: between two signs of life.
    artifacts: where artifacts are kept: a folder, or a URL as fsspec takes it; empty for a folder in data_dir.
    artifact_limit: bytes of one.
    encryption_keys, encryption_key_file: keys of encryption, as text or in a file; the first one seals, all open.
    encryption_required: refuse arguments, results and checkpoints that are not sealed.
    memory: where long-term memories are: a file, or postgresql://...; empty for memory.sqlite3 in data_dir. embedder:
        what makes vectors of them, as module:attribute; empty for search by words only.
    webhook_url: where notices are posted of runs that were resumed, buried, or wait for somebody; empty for nowhere.
        webhook_secret: signs them. webhook_timeout: for one try.
    check_state: whether the state of an agent is compared, after each step, with what its log comes to.
    unknown_task: how often, and how long apart, a task of unknown name, or sealed with an unknown key, is handed to
        others.
    """

    model_config = SettingsConfigDict(env_prefix="PERDURE_", frozen=True, extra="ignore", env_ignore_empty=True)

    redis_url: str = ""
    namespace: str = "perdure"
    data_dir: Path | None = None
    lease: Annotated[float, Field(ge=0.3, le=3600)] = 15.0
    grace: Annotated[float, Field(ge=0)] = 30.0
    note_interval: Seconds = 60.0
    time_limit: Seconds = 7 * 86_400.0
    idle_limit: Seconds = 3600.0
    stall_limit: Seconds = 60.0
    stall_warning: Seconds = 5.0
    heartbeat: Seconds = 5.0
    quarantine_window: Seconds = 30.0
    result_ttl: Seconds = 86_400.0
    dead_letter_ttl: Seconds = DEFAULT_RETENTION
    partitions: Literal["all", "share"] = "all"
    payload_limit: Annotated[int, Field(ge=1024)] = DEFAULT_PAYLOAD_LIMIT
    replicas: Annotated[int, Field(ge=1)] = 1
    replication_timeout: Seconds = 5.0
    artifacts: str = ""
    artifact_limit: Annotated[int, Field(ge=1)] = 1 << 30
    log_level: Literal["TRACE", "DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    log_json: bool = False
    encryption_keys: SecretStr = SecretStr("")
    encryption_key_file: Path | None = None
    encryption_required: bool = False
    crash_threshold: Annotated[int, Field(ge=0)] = 3
    crash_window: Seconds = 3600.0
    restart_delays: Annotated[tuple[Delay, ...], NoDecode, Field(min_length=1)] = (5.0, 30.0, 120.0, 600.0)
    memory: str = ""
    embedder: str = ""
    check_state: bool = False
    webhook_url: SecretStr = SecretStr("")
    webhook_secret: SecretStr = SecretStr("")
    webhook_timeout: Seconds = 5.0
    unknown_task: Retry = Retry(max_attempts=10, base=1.0, factor=2.0, cap=60.0)

    @field_validator("restart_delays", mode="before")
    @classmethod
    def _split(cls, delays: object) -> object:
        """In the environment: 5,30,120."""
        return delays.split(",") if isinstance(delays, str) else delays

    @field_validator("webhook_url")
    @classmethod
    def _check_webhook(cls, url: SecretStr) -> SecretStr:
        parts = urlsplit(url.get_secret_value())
        if url.get_secret_value() and (parts.scheme not in ("http", "https") or not parts.hostname):
            raise ValueError("is no URL of http or https")
        return url

    @field_validator("namespace")
    @classmethod
    def _check_namespace(cls, name: str) -> str:
        return check_name("namespace", name)

    @property
    def artifact_place(self) -> str:
        """Where artifacts are kept."""
        folder = self.address.directory or self.data_dir or default_data_dir()
        return self.artifacts or str(folder / "artifacts")

    @property
    def replication(self) -> Replication:
        """What `durability="replicated"` means."""
        return Replication(self.replicas, self.replication_timeout)

    @property
    def address(self) -> Address:
        """The server's address. Raises `BadAddress`."""
        return Address.parse(self.redis_url or "embedded:", data_dir=lambda: self.data_dir or default_data_dir())

    @property
    def encryptor(self) -> Encryptor:
        """What data of tasks is sealed with; without keys, nothing. Reads the key file. Raises `InvalidKey`."""
        file = self.encryption_key_file
        return make_encryptor(
            self.encryption_keys.get_secret_value(),
            None if file is None else file.expanduser(),
            required=self.encryption_required,
        )


_SECRET = ("redis_url", "encryption_keys", "webhook_url", "webhook_secret")
"""Settings that may hold a password, and are not shown."""


def load_settings(**overrides: object) -> Settings:
    """Settings from the environment, with what is given (and is not None) on top.

    Raises `ConfigurationError` naming the setting and what is wrong with it.
    """
    given = {name: value for name, value in overrides.items() if value is not None}
    unknown = given.keys() - Settings.model_fields.keys()
    if unknown:
        raise ConfigurationError(f"no setting is called {', '.join(sorted(unknown))}")
    try:
        return Settings(**given)  # type: ignore[arg-type]  # pydantic checks each against its own field
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(str(part) for part in first["loc"])
        where = name if name in given else f"PERDURE_{name.upper()}"
        got = "" if name in _SECRET else f" (got {first['input']!r})"  # a URL may hold a password
        raise ConfigurationError(f"{where}: {first['msg']}{got}") from None
