"""Settings of a worker: small frozen objects, read once."""

from __future__ import annotations

import re
from typing import Annotated, Final, Literal

from pydantic import Field, SecretStr, field_validator
from pydantic_core import from_json

from ..deadletter.burial import DEFAULT_RETENTION
from ..deadletter.policy import Retry
from ..queues.defaults import MAX_TURNS, ConnectionSettings, Seconds, check_no_url, read_settings
from ..queues.durations import parse_duration
from ..queues.envelope import DEFAULT_LARGE_LIMIT, DEFAULT_PAYLOAD_LIMIT
from ..queues.errors import ConfigurationError
from ..queues.security.urls import has_credentials

POSTGRES = ("postgresql://", "postgres://")
"""Beginnings of the URL of a memory store in PostgreSQL."""

DEFAULT_CONCURRENCY: Final = 16
"""Tasks that a worker runs at once by default."""

_WEBHOOK_URL: Final = re.compile(
    r"(?i:https?)://(?:\[[0-9a-fA-F:.]+\]|[0-9a-zA-Z._-]+)(?::(?P<port>[0-9]{1,5}))?(?:[/?#][!-~]*)?"
)
_LARGEST_PORT: Final = 65_535

Delay = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Settings(ConnectionSettings):
    """Settings of a worker, in addition to those of the connection. Times are in seconds.

    Args:
        lease: Time after which a delivery of a silent worker may be claimed; the same for all workers of a namespace.
        strict: Refuse to start if the lease, the result TTL or the dead-letter TTL that this worker is given differs
            from the one that is stored for the namespace (`perdure config set`).
        grace: Time that running tasks have to reach a step boundary when the worker stops.
        time_limit: Longest run, if neither the task nor the producer sets a limit.
        idle_limit: Longest time without a step that starts or ends and without a save, if the task sets no limit.
        stall_limit: Longest time that the event loop may be blocked, or a handler ignore its cancellation, before the
            worker abandons the tasks and its supervisor replaces it.
        stall_warning: Time after which a blocked event loop is logged with the stacks.
        lag_limit: Lag of the event loop above which the worker fills fewer slots; 0 for none.
        memory_limit: Limit of the memory of a worker process in bytes, near which it reads no new tasks; 0 for the
            limits that the system sets: control groups, RLIMIT_AS.
        heartbeat: Interval of the worker's registration.
        quarantine_window: Probation time: how long a quarantined task runs in a process of its own before it continues
            as an ordinary task.
        result_ttl: Retention of outcomes.
        dead_letter_ttl: Retention of dead letters.
        session_ttl: Retention of sessions after their last message.
        session_turns: Turns that the history of a session keeps.
        partitions: Read all partitions of the queues ("all"), or share them with other workers ("share").
        payload_limit: Limit of messages and records in bytes; larger arguments and results are stored in chunks.
        large_limit: Limit of arguments and results that are stored in chunks, in bytes; 0 for none. Larger ones are
            stored in the artifact store, if that is one that every worker reaches.
        artifacts: Artifact store: a folder or an fsspec URL; empty for a folder in data_dir.
        artifact_limit: Limit of one artifact in bytes, and of one file of a workspace.
        workspaces: Folder of the workspaces of running tasks; empty for the system's temporary folder.
        workspace_limit: Limit of the saved files of one workspace in bytes.
        workspace_files: Limit of their number, and of the files of a shared workspace.
        workspace_ttl: Retention of a shared workspace after its last change.
        log_level: Lowest level that is logged.
        log_json: Log as JSON.
        log_tasks: Log the start and the end of each run.
        crash_threshold: A supervisor pauses after more crashes than this within crash_window.
        crash_window: Window of crash_threshold.
        restart_delays: Delays before a crashed worker is restarted: after the first crash in the window, the second...
            A spare of the supervisor takes over at once after the first one.
        memory: Memory store: a file or a postgresql:// URL; empty for memory.sqlite3 in data_dir.
        embedder: Embedder of memories: wordllama, or module:attribute; empty for search by words only.
        check_state: Compare the state of an agent with the reduction of its log, and with what a later run reads, after
            each step.
        webhook_url: URL for events of runs that were resumed, buried, or wait for a person; empty for none.
        webhook_secret: Key of the signature.
        webhook_timeout: Limit of one request, from the connection to the status of the reply.
        version_wait: How long a task waits for a worker of a newer version before it becomes a dead letter.
        unknown_task: Retries of tasks without a handler or without the encryption key on this worker;
            `max_attempts` counts deliveries.
    """

    lease: Annotated[float, Field(ge=0.3, le=3600)] = 15.0
    strict: bool = False
    grace: Annotated[float, Field(ge=0)] = 30.0
    time_limit: Seconds = 7 * 86_400.0
    idle_limit: Seconds = 3600.0
    stall_limit: Seconds = 60.0
    stall_warning: Seconds = 5.0
    lag_limit: Delay = 1.0
    memory_limit: Annotated[int, Field(ge=0)] = 0
    heartbeat: Seconds = 5.0
    quarantine_window: Seconds = 30.0
    result_ttl: Seconds = 86_400.0
    dead_letter_ttl: Seconds = DEFAULT_RETENTION
    session_ttl: Seconds = 365 * 86_400.0
    session_turns: Annotated[int, Field(ge=1, le=MAX_TURNS)] = 250
    partitions: Literal["all", "share"] = "all"
    payload_limit: Annotated[int, Field(ge=1024)] = DEFAULT_PAYLOAD_LIMIT
    large_limit: Annotated[int, Field(ge=0)] = DEFAULT_LARGE_LIMIT
    artifacts: str = ""
    artifact_limit: Annotated[int, Field(ge=1)] = 1 << 30
    workspaces: str = ""
    workspace_limit: Annotated[int, Field(ge=1)] = 1 << 30
    workspace_files: Annotated[int, Field(ge=1)] = 10_000
    workspace_ttl: Seconds = 30 * 86_400.0
    log_level: Literal["TRACE", "DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    log_json: bool = False
    log_tasks: bool = False
    crash_threshold: Annotated[int, Field(ge=0)] = 5
    crash_window: Seconds = 3600.0
    restart_delays: Annotated[tuple[Delay, ...], Field(min_length=1)] = (5.0, 30.0, 120.0, 600.0)
    memory: str = ""
    embedder: str = ""
    check_state: bool = False
    webhook_url: SecretStr = SecretStr("")
    webhook_secret: SecretStr = SecretStr("")
    webhook_timeout: Seconds = 5.0
    version_wait: Seconds = 86_400.0
    unknown_task: Retry = Retry(max_attempts=10, base=1.0, factor=2.0, cap=60.0)

    @field_validator("restart_delays", mode="before")
    @classmethod
    def _split(cls, delays: object) -> object:
        """Split the form of the environment: 5,30,2m."""
        return [parse_duration(delay) for delay in delays.split(",")] if isinstance(delays, str) else delays

    @field_validator("unknown_task", mode="before")
    @classmethod
    def _decode(cls, policy: object) -> object:
        """Decode the form of the environment: JSON."""
        return from_json(policy) if isinstance(policy, str) else policy

    @field_validator("webhook_url")
    @classmethod
    def _check_webhook(cls, url: SecretStr) -> SecretStr:
        text = url.get_secret_value()
        if text and not text.lower().startswith(("http://", "https://")):
            raise ValueError("must be an http or https URL")
        found = _WEBHOOK_URL.fullmatch(text)
        if text and (found is None or int(found["port"] or 80) > _LARGEST_PORT):
            raise ValueError("must be an http or https URL of ASCII characters, without spaces and without a user")
        return url

    @field_validator("memory")
    @classmethod
    def _check_memory(cls, place: str) -> str:
        if not place.startswith(POSTGRES):
            check_no_url(place, "a file or a postgresql:// URL")
            if has_credentials(place):
                raise ValueError("must be a file or a postgresql:// URL, got a connection string with a password")
        return place

    @field_validator("workspaces")
    @classmethod
    def _check_workspaces(cls, place: str) -> str:
        check_no_url(place, "a folder of this host")
        return place

    @property
    def shared_artifacts(self) -> bool:
        """Whether every worker reaches the artifact store: its URL is not that of a folder of this host."""
        scheme = self.artifacts.rpartition("::")[2].partition("://")[0]
        return "://" in self.artifacts and scheme not in ("file", "local", "memory")

    @property
    def max_value_size(self) -> int:
        """Limit of arguments and results in bytes: in Redis, or in an artifact store that every worker reaches."""
        return max(self.large_limit, self.artifact_limit) if self.shared_artifacts else self.large_limit

    @property
    def artifact_place(self) -> str:
        """Folder or URL of the artifact store."""
        folder = self.address.directory or self.data_folder
        return self.artifacts or str(folder / "artifacts")


def load_settings(**overrides: object) -> Settings:
    """Return a worker's settings from the environment; the arguments that are not None take precedence.

    Raises `ConfigurationError`, which names the setting and what is wrong with it.
    """
    return read_settings(Settings, overrides)


def check_settings(settings: object) -> Settings | None:
    """Return the settings that an app is given. Raises `ConfigurationError` for anything else, such as a dict."""
    if settings is None or isinstance(settings, Settings):
        return settings
    raise ConfigurationError(
        f"settings must be perdure.Settings, such as Settings(lease=30), got {type(settings).__name__}"
    )
