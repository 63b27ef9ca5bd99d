"""Settings of a worker: small frozen objects, read once."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import NoDecode

from ..deadletter import DEFAULT_RETENTION, Retry
from ..queues import DEFAULT_PAYLOAD_LIMIT, ConnectionSettings, Seconds, read_settings

__all__ = ["Settings", "load_settings"]

Delay = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Settings(ConnectionSettings):
    """Settings of a worker, in addition to those of the connection. Times in seconds.

    lease: how long a delivery stays a silent worker's; all workers of a namespace must have the same.
    grace: how long running tasks have to reach a step boundary when the worker is stopped.
    note_interval: between notes that a long step lives.
    probation: how long a worker without supervisor takes nothing new while it runs a task whose worker died, unless
        that is cleared before.
    result_ttl, dead_letter_ttl: how long outcomes and dead letters are kept.
    partitions: whether a worker takes from all partitions of its queues, or from its share of them, the rest being
        other workers' who share.
    payload_limit: bytes.
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
    memory: where long-term memories are: a file, or postgresql://...; empty for memory.sqlite3 in data_dir. embedder:
        what makes vectors of them, as module:attribute; empty for search by words only.
    webhook_url: where notices are posted of runs that were resumed, buried, or wait for somebody; empty for nowhere.
        webhook_secret: signs them. webhook_timeout: for one try.
    check_state: whether the state of an agent is compared, after each step, with what its log comes to.
    unknown_task: how often, and how long apart, a task of unknown name, or sealed with an unknown key, is handed to
        others.
    """

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
    artifacts: str = ""
    artifact_limit: Annotated[int, Field(ge=1)] = 1 << 30
    log_level: Literal["TRACE", "DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    log_json: bool = False
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

    @property
    def artifact_place(self) -> str:
        """Where artifacts are kept."""
        folder = self.address.directory or self.data_folder
        return self.artifacts or str(folder / "artifacts")


def load_settings(**overrides: object) -> Settings:
    """Return a worker's settings from the environment; the arguments that are not None take precedence.

    Raises `ConfigurationError`, which names the setting and what is wrong with it.
    """
    return read_settings(Settings, overrides)
