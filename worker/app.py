"""The application: its tasks, and its way to the queues."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Self, overload

from ..deadletter import Retry
from ..queues import Encryptor, Producer, Unavailable, check_name
from .agent import Agent, S, StateType, make_handler
from .agent_task import AgentTask
from .durable import Durability
from .journal import AgentState
from .log import logger
from .registry import Handler, P, R, Registry, Task
from .settings import Settings, load_settings

__all__ = ["App"]

_MONTH: Final = 30 * 86_400.0
"""Seconds for which what an agent has come to is kept, where nothing else is said."""


class App:
    """A set of tasks that are enqueued and worked on under one configuration.

    app = App("audit")

    @app.task(queue="default", retry=Retry(max_attempts=5), timeout=3600)
    async def audit(ctx: Context, root: str) -> Report: ...

    async with app:
        handle = await audit.enqueue("src")
    """

    def __init__(
        self,
        name: str,
        *,
        redis_url: str | None = None,
        namespace: str | None = None,
        settings: Settings | None = None,
    ) -> None:
        """name: stands in logs and worker names. redis_url: else PERDURE_REDIS_URL, else the embedded server.
        settings: all of them, in place of the environment's.
        """
        self.name = check_name("app name", name)
        self._settings = settings
        self._redis_url = redis_url
        self._namespace = namespace
        self.tasks = Registry(self)
        self.agents: dict[str, AgentTask[Any]] = {}
        self._producer: Producer | None = None
        self._sealer: Encryptor | None = None
        self._warned = False
        self._users = 0

    @property
    def settings(self) -> Settings:
        """The settings in force; the environment is read when they are first needed."""
        if self._settings is None:
            self._settings = load_settings(redis_url=self._redis_url, namespace=self._namespace)
        return self._settings

    def configure(self, **settings: object) -> None:
        """Put settings on top of those in force, before the app is used: what a command line says."""
        given = {name: value for name, value in settings.items() if value is not None}
        self._settings = load_settings(**(self.settings.model_dump() | given))
        self._sealer = None

    @property
    def encryptor(self) -> Encryptor:
        """What data of tasks is sealed with; keys are read when they are first needed. Raises `InvalidKey`."""
        if self._sealer is None:
            self._sealer = self.settings.encryptor
        return self._sealer

    @property
    def producer(self) -> Producer:
        """The app's way to the queues, while it is open."""
        if self._producer is None:
            raise Unavailable(f"app {self.name!r} is not open: enqueue inside 'async with app:'")
        return self._producer

    async def __aenter__(self) -> Self:
        if self._users == 0:
            producer = Producer(
                address=self.settings.address,
                namespace=self.settings.namespace,
                payload_limit=self.settings.payload_limit,
                result_ttl=self.settings.result_ttl,
                encryptor=self.encryptor,
                replication=self.settings.replication,
            )
            self._warn_of_open_secrets()
            self._producer = await producer.__aenter__()
        self._users += 1
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._users -= 1
        if self._users == 0 and self._producer is not None:
            producer, self._producer = self._producer, None
            await producer.__aexit__(kind, error, trace)

    def _warn_of_open_secrets(self) -> None:
        """Secrets are never shown, but without a key whoever can read Redis can read them: said once."""
        tasks = sorted(name for name, task in self.tasks.items() if task.arguments.has_secrets)
        if tasks and not self.encryptor.active and not self._warned:
            self._warned = True
            logger.warning(
                "secret arguments of {} are stored readably in Redis: set PERDURE_ENCRYPTION_KEYS "
                "('perdure keys generate' makes one; docs/security.md)",
                ", ".join(tasks),
            )

    @overload
    def task(self, handler: Handler[P, R], /) -> Task[P, R]: ...
    @overload
    def task(
        self,
        *,
        name: str | None = None,
        queue: str = "default",
        retry: Retry | None = None,
        timeout: float | None = None,
        idle_timeout: float | None = None,
        durability: Durability = "sync",
        result_ttl: float | None = None,
    ) -> Callable[[Handler[P, R]], Task[P, R]]: ...
    def task(
        self,
        handler: Any = None,
        *,
        name: str | None = None,
        queue: str = "default",
        retry: Retry | None = None,
        timeout: float | None = None,
        idle_timeout: float | None = None,
        durability: Durability = "sync",
        result_ttl: float | None = None,
    ) -> Any:
        """Register an async function as a task.

        name: else the function's. queue: where it is put. retry: see `Retry`. timeout: seconds one run may take, else
        the worker's time limit. idle_timeout: seconds a run may go without a step that begins or ends and without a
        save, else the worker's idle limit; `math.inf` for no such limit. durability: how steps are recorded unless they
        say otherwise. result_ttl: seconds the outcome is kept, else the setting. Raises `TaskDefinitionError`.
        """
        check_name("queue", queue)

        def register(function: Any) -> Task[Any, Any]:
            return self.tasks.add(
                function,
                name=name,
                queue=queue,
                retry=retry or Retry(),
                timeout=timeout,
                idle_timeout=idle_timeout,
                durability=durability,
                result_ttl=result_ttl,
            )

        return register if handler is None else register(handler)

    @overload
    def agent(
        self,
        kind: type[Agent[S]],
        /,
        *,
        name: str | None = None,
        queue: str = "default",
        retry: Retry | None = None,
        timeout: float | None = None,
        idle_timeout: float | None = None,
        durability: Durability = "sync",
        result_ttl: float | None = _MONTH,
    ) -> AgentTask[S]: ...
    @overload
    def agent(
        self,
        *,
        name: str | None = None,
        queue: str = "default",
        retry: Retry | None = None,
        timeout: float | None = None,
        idle_timeout: float | None = None,
        durability: Durability = "sync",
        result_ttl: float | None = _MONTH,
    ) -> Callable[[type[Agent[S]]], AgentTask[S]]: ...
    def agent(
        self,
        kind: Any = None,
        *,
        name: str | None = None,
        queue: str = "default",
        retry: Retry | None = None,
        timeout: float | None = None,
        idle_timeout: float | None = None,
        durability: Durability = "sync",
        result_ttl: float | None = _MONTH,
    ) -> Any:
        """Register an agent, a subclass of `Agent`, as a task: `research = app.agent(Research)`, or as a decorator.

        name: else the class's, in lower case. durability: as for `task`; but the steps of the plan themselves are never
        recorded in the background. result_ttl: seconds for which its
        outcome is kept, and with it the knowledge that its goal is reached; 30 days. The others as for `task`. Raises
        `TaskDefinitionError`.
        """
        check_name("queue", queue)

        def register(agent: type[Agent[Any]]) -> AgentTask[Any]:
            called = name or getattr(agent, "__name__", repr(agent)).lower()
            form = StateType(called, getattr(agent, "state_type", AgentState))
            handler = make_handler(
                agent, form, replicated=durability == "replicated", check=lambda: self.settings.check_state
            )
            task = self.tasks.add(
                handler,
                name=called,
                queue=queue,
                retry=retry or Retry(),
                timeout=timeout,
                idle_timeout=idle_timeout,
                durability=durability,
                result_ttl=result_ttl,
            )
            found = self.agents[called] = AgentTask(agent, form, task)
            return found

        return register if kind is None else register(kind)

    def __repr__(self) -> str:
        return f"App({self.name!r}, tasks={sorted(self.tasks)})"
