"""Settings of a worker: small frozen objects, read once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from ..deadletter import DEFAULT_RETENTION, Retry
from ..queues import DEFAULT_PAYLOAD_LIMIT, LONGEST, Address, check_name, default_data_dir
from .errors import ConfigurationError

__all__ = ["Settings", "load_settings"]

Seconds = Annotated[float, Field(gt=0, le=LONGEST, allow_inf_nan=False)]


class Settings(BaseSettings):
    """Everything a worker can be told, from arguments or from PERDURE_* variables of the environment.

    redis_url: where the queues are; empty for the embedded server in data_dir. namespace: the deployment's keys.
    lease: seconds a delivery stays a silent worker's; all workers of a namespace must have the same. grace: seconds
    that running tasks have to reach a step boundary when the worker is stopped. note_interval: seconds between notes
    that a long step lives. probation: seconds for which a worker without supervisor takes nothing new while it runs a
    task whose worker died, unless that is cleared before. result_ttl, dead_letter_ttl: seconds that outcomes and dead
    letters are kept. partitions: whether a worker takes from all partitions of its queues, or from its share of them,
    the rest being other workers' who share. payload_limit: bytes. unknown_task: how often, and how long apart, a task
    of unknown name is handed to
    others.
    """

    model_config = SettingsConfigDict(env_prefix="PERDURE_", frozen=True, extra="ignore", env_ignore_empty=True)

    redis_url: str = ""
    namespace: str = "perdure"
    data_dir: Path | None = None
    lease: Annotated[float, Field(ge=0.3, le=3600)] = 15.0
    grace: Annotated[float, Field(ge=0)] = 30.0
    note_interval: Seconds = 60.0
    probation: Seconds = 30.0
    result_ttl: Seconds = 86_400.0
    dead_letter_ttl: Seconds = DEFAULT_RETENTION
    partitions: Literal["all", "share"] = "all"
    payload_limit: Annotated[int, Field(ge=1024)] = DEFAULT_PAYLOAD_LIMIT
    log_level: Literal["TRACE", "DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    log_json: bool = False
    unknown_task: Retry = Retry(max_attempts=10, base=1.0, factor=2.0, cap=60.0)

    @field_validator("namespace")
    @classmethod
    def _check_namespace(cls, name: str) -> str:
        return check_name("namespace", name)

    @property
    def address(self) -> Address:
        """The server's address. Raises `BadAddress`."""
        return Address.parse(self.redis_url or "embedded:", data_dir=lambda: self.data_dir or default_data_dir())


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
        got = "" if name == "redis_url" else f" (got {first['input']!r})"  # a URL may hold a password
        raise ConfigurationError(f"{where}: {first['msg']}{got}") from None
