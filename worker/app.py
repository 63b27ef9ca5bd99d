"""The application: its tasks, agents, settings, middleware and resources."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, Never, Protocol, Self, TypeAlias, overload

from ..deadletter.error_text import error_text
from ..deadletter.policy import Retry
from ..queues.durations import Duration
from ..queues.envelope import TaskMessage
from ..queues.errors import ConfigurationError, PerdureError
from ..queues.keys import Namespace, check_name
from ..queues.lanes import Priority
from ..queues.producer import Producer
from ..queues.security.encryption import Encryptor
from ..queues.unique import Unique
from .durable.steps.current import Durability
from .errors import TaskDefinitionError
from .log import logger
from .middleware import Chain, Middleware, build_chain, enqueue_innermost
from .on_demand import keep_large_values
from .registry import Registry, make_max_depth
from .settings import DEFAULT_CONCURRENCY, Settings, check_settings, load_settings
from .sync_producer import NO_LIFESPAN, AppLoops, OpenedApp, SyncProducer, open_lifespan
from .task import Handler, OnOrphan, P, R, SyncHandler, Task, TaskCall, refuse_unknown

if TYPE_CHECKING:
    from ..queues.argument_keys import By
    from ..queues.budgets.definition import Budget
    from ..queues.depth import MaxDepth, WhenFull
    from ..queues.limits.definition import Breaker, Limit, LimitCost, Over, Rate
    from ..queues.schedules.definition import Cron, Every, Missed
    from ..queues.schedules.store import ScheduleDefinition
    from ..queues.security.approvers import ApproverKey
    from ..queues.waits import AnswerReceipt
    from .agent_task import AgentTask
    from .agents.agent import Agent, S
    from .agents.coherence.findings import Coherence
    from .agents.incoming import OnMessage
    from .agents.resume_notice import OnResume
    from .durable.prices import Prices
    from .outbox import NewRow, Outbox
    from .session import Session
    from .store import Stores
    from .workspace.shared_workspace import SharedWorkspace

_MONTH: Final = 30 * 86_400.0
"""Seconds for which the result of an agent is kept by default."""

Lifespan: TypeAlias = "Callable[[App], AbstractAsyncContextManager[Any]]"


class TaskDecorator(Protocol):
    """Registers a function as a task: `@app.task(...)`."""

    @overload
    def __call__(self, handler: Handler[P, R], /) -> Task[P, R]: ...
    @overload
    def __call__(self, handler: SyncHandler[P, R], /) -> Task[P, R]: ...


class App:
    """A set of tasks that are enqueued and run under one configuration.

    app = App("audit")

    @app.task(retry=Retry(max_attempts=5), timeout=3600)
    async def audit(ctx: Context, root: str) -> Report: ...

    async with app:
        handle = await audit.enqueue("src")
    """

    overrides: ClassVar[Mapping[str, object]] = {}
    """Settings of all apps of this process, in place of their own; `perdure.testing` sets them during a test."""
    default_concurrency: int = DEFAULT_CONCURRENCY
    """Tasks that a worker of `perdure worker run` runs at once without `--concurrency`."""
    _loading: ClassVar[App | None] = None
    """The app whose modules are being imported."""

    def __init__(
        self,
        name: str,
        *,
        include: Sequence[str] = (),
        redis_url: str | None = None,
        namespace: str | None = None,
        settings: Settings | None = None,
        aliases: Collection[str] = (),
        middleware: Sequence[Middleware] = (),
        lifespan: Lifespan | None = None,
        prices: Prices | None = None,
        outbox: Outbox | None = None,
    ) -> None:
        """Create an app without tasks; nothing is connected yet.

        Args:
            name: name of the app in its tasks, logs and worker ids, and of the queue of its tasks. Workers run only the
                tasks of their app.
            include: names of the modules that register tasks with the app, such as `["shop.orders", "shop.mail"]`.
                They may import the app: workers import them, see `load_modules`.
            redis_url: else PERDURE_REDIS_URL, else the embedded server.
            namespace: prefix of all keys, else PERDURE_NAMESPACE.
            settings: all settings, in place of those of the environment.
            aliases: former names of the app, whose tasks its workers run, too.
            middleware: hooks around enqueue, run, step and settle; the first is outermost.
            lifespan: `lifespan(app)` returns an async context manager, which is open while the app is; what it yields
                is `ctx.resources`.
            prices: `prices(model, usage)` returns the dollars that a call of a model costs, or None for an unknown
                model; usage has `input_tokens` and `output_tokens`. For `ctx.spend(model=...)`.
            outbox: table of tasks that transactions of a database enqueue, `task.enqueue_in(session, ...)`; the app
                sends them while it is open. See `perdure.integrations.sqlalchemy` and `perdure.integrations.django`.
        """
        self.name = check_name("app name (also the name of its queue)", name)
        if (loading := App._loading) is not None and loading.name == name:
            raise ConfigurationError(
                f"app {name!r} exists twice, since its module was imported under two names: keep the app in a module "
                "that others import under one name, and start workers with that name, such as shop.app:app"
            )
        self.include = _check_modules(name, include)
        if isinstance(aliases, str) or not isinstance(aliases, Iterable):
            raise ConfigurationError(f"aliases of app {name!r} must be a list of names, got {aliases!r}")
        self.aliases = frozenset(check_name("alias of an app", alias) for alias in aliases)
        self._settings = check_settings(settings)
        self._redis_url = redis_url
        self._namespace = namespace
        self.tasks = Registry(self)
        self.agents: dict[str, AgentTask[Any]] = {}
        self.limits: dict[str, Limit] = {}
        self.schedules: dict[str, ScheduleDefinition] = {}
        if not isinstance(middleware, Iterable):
            raise ConfigurationError(f"middleware of app {name!r} must be a list, got {middleware!r}")
        self._max_depths: dict[str, MaxDepth] = {}
        self.middleware = tuple(middleware)
        for one in self.middleware:
            if not isinstance(one, Middleware):
                raise ConfigurationError(f"middleware of app {name!r} must be instances of Middleware, got {one!r}")
        self._enqueue_chain = build_chain(self.middleware, "enqueue", enqueue_innermost, shown=1, must_call=True)
        self._lifespan = lifespan
        if prices is not None and not callable(prices):
            raise ConfigurationError(f"prices of app {name!r} must be a function, got {prices!r}")
        self.prices = prices
        if outbox is not None:
            from .outbox import check_outbox

            outbox = check_outbox(outbox)
        self._outbox = outbox
        self._encryptor: Encryptor | None = None
        self._warned = False
        self._loops = AppLoops(name)
        self._sync = SyncProducer(self._loops, self._open_producer)

    @property
    def settings(self) -> Settings:
        """The settings in force; the environment is read at their first use."""
        own = self._own_settings()
        return own.model_copy(update=self.overrides) if self.overrides else own

    def _own_settings(self) -> Settings:
        if self._settings is None:
            self._settings = load_settings(redis_url=self._redis_url, namespace=self._namespace)
        return self._settings

    def configure(self, **settings: object) -> None:
        """Override settings, before the app is used; options of the command line do."""
        given = {name: value for name, value in settings.items() if value is not None}
        self._settings = load_settings(**(self._own_settings().model_dump(exclude_unset=True) | given))
        self._encryptor = None

    def load_modules(self) -> None:
        """Import the modules of `include`, so that their tasks are registered.

        Each `Worker` does so when it is made. A program that only enqueues imports the modules of the tasks that it
        enqueues.

        Raises:
            ConfigurationError: A module cannot be imported; the text names it.
        """
        loading, App._loading = App._loading, self
        try:
            for module in self.include:
                try:
                    importlib.import_module(module)
                except (Exception, SystemExit) as error:
                    raise ConfigurationError(
                        f"app {self.name!r} could not import {module!r}, which it includes: "
                        f"{_import_problem(module, error)}"
                    ) from error
        finally:
            App._loading = loading

    @property
    def encryptor(self) -> Encryptor:
        """Encrypts and decrypts data of tasks; keys are read at its first use. Raises `ConfigurationError`."""
        if self._encryptor is None:
            self._encryptor = self.settings.encryptor
        return self._encryptor

    @property
    def tenant(self) -> str | None:
        """The tenant whose tasks and sessions the app makes and finds; None for those of all tenants."""
        return self.settings.tenant

    @property
    def producer(self) -> Producer:
        """The producer that enqueues the app's tasks, while the app is open on the running event loop."""
        return self._loops.producer

    def sync(self) -> SyncProducer:
        """Return the producer for synchronous code: `with app.sync() as producer:`.

        Outside of such a block the first call opens it, and the end of the process closes it. It does not open the
        lifespan.
        """
        return self._sync

    async def answer(
        self,
        token: str,
        value: Any,
        *,
        by: str = "",
        answer_id: str | None = None,
        shows: str | None = None,
        approver: ApproverKey | Path | str | None = None,
    ) -> AnswerReceipt:
        """Answer the open wait with a token, `ctx.wait_for(..., token=...)`. See `TaskHandle.answer`.

        Raises `WaitNotFound` if no open wait has the token.
        """
        options: dict[str, Any] = {"by": by, "answer_id": answer_id, "shows": shows}
        return await self.producer.answer(token, value, approver=approver, **options)

    def shared_workspace(self, name: str, *, by: str = "") -> SharedWorkspace:
        """Return files that several tasks and programs change, while the app is open. by: writer that they name."""
        from .workspace.shared_workspace import SharedWorkspace

        return SharedWorkspace(self.producer.gateway, self.settings, name, by=by)

    @property
    def store(self) -> Stores:
        """The key-value store: `app.store("threads", "user-42")` returns a namespace, see `Store`."""
        from .store import StoreHost, Stores

        def call(function: Callable[[], Coroutine[Any, Any, Any]], instead: str) -> Any:
            return self._sync.call(lambda _: function(), instead)

        return Stores(StoreHost(lambda: (self.producer.gateway, self.settings), call))

    @property
    def enqueue_chain(self) -> Chain | None:
        """The middleware around enqueue; None where no middleware overrides the hook."""
        return self._enqueue_chain

    @property
    def outbox(self) -> Outbox | None:
        """The table of tasks that transactions of a database enqueue."""
        return self._outbox

    def outbox_row(self, call: TaskCall[..., Any], message: TaskMessage) -> NewRow:
        """Return the row of a call in the outbox. Raises `PayloadTooLarge`, `ValueError`."""
        from .outbox import encode_row

        message.check(self.settings.payload_limit, self.settings.max_value_size)
        return encode_row(call, message, self.encryptor, Namespace(self.settings.namespace))

    @property
    def resources(self) -> Any:
        """The value that the lifespan yielded on this event loop, while the app is open; None without a lifespan."""
        return None if self._lifespan is None else self._loops.resources()

    async def __aenter__(self) -> Self:
        await self._loops.enter(self._open)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._loops.leave()

    async def _open(self, opened: OpenedApp) -> AsyncExitStack:
        """Open the producer, then the lifespan, which may enqueue tasks, and the relay of the outbox."""
        async with await self._open_producer(opened) as stack:
            if (lifespan := self._lifespan) is not None:
                opened.resources = await stack.enter_async_context(open_lifespan(self.name, lambda: lifespan(self)))
            if self._outbox is not None:
                await stack.enter_async_context(self._outbox.relaying(self))
            return stack.pop_all()

    async def _open_producer(self, opened: OpenedApp) -> AsyncExitStack:
        async with AsyncExitStack() as stack:
            producer = Producer(
                address=self.settings.address,
                namespace=self.settings.namespace,
                tenant=self.settings.tenant,
                payload_limit=self.settings.payload_limit,
                large_limit=self.settings.max_value_size,
                result_ttl=self.settings.result_ttl,
                encryptor=self.encryptor,
                answer_keys=self.settings.answer_keys,
                replication=self.settings.replication,
                requirements=self.settings.requirements,
            )
            keep_large_values(producer.gateway, self.settings)
            self._warn_of_open_secrets()
            stack.callback(_forget, opened)
            opened.producer = await stack.enter_async_context(producer)
            return stack.pop_all()

    def _warn_of_open_secrets(self) -> None:
        """Log once that secret arguments are stored in plain text, since there is no encryption key."""
        tasks = sorted(name for name, task in self.tasks.items() if task.arguments.has_secrets)
        if tasks and not self.encryptor.active and not self._warned:
            self._warned = True
            logger.warning(
                "secret arguments of {} are stored in plain text in Redis: set PERDURE_ENCRYPTION_KEYS "
                "('perdure keys generate' makes one)",
                ", ".join(tasks),
            )

    @overload
    def task(self, handler: Handler[P, R], /) -> Task[P, R]: ...
    @overload
    def task(self, handler: SyncHandler[P, R], /) -> Task[P, R]: ...
    @overload
    def task(
        self,
        *,
        name: str | None = None,
        queue: str | None = None,
        retry: Retry | None = None,
        timeout: Duration | None = None,
        idle_timeout: Duration | None = None,
        durability: Durability = "sync",
        result_ttl: Duration | None = None,
        on_orphan: OnOrphan = "warn",
        version: int = 1,
        strict_order: bool = False,
        coherence: Coherence | Literal["warn"] | None = "warn",
        on_end: Task[[str], Any] | None = None,
        unique: Unique | None = None,
        limits: Sequence[Limit | LimitCost] = (),
        budget: Budget | Sequence[Budget] = (),
        priority: Priority | None = None,
        idle: bool = False,
        slots: int = 1,
        max_depth: int | None = None,
        when_full: WhenFull | None = None,
        wait_limit: Duration | None = None,
        schedule: Cron | Every | None = None,
    ) -> TaskDecorator: ...
    def task(
        self,
        handler: Any = None,
        *,
        name: str | None = None,
        queue: str | None = None,
        retry: Retry | None = None,
        timeout: Duration | None = None,
        idle_timeout: Duration | None = None,
        durability: Durability = "sync",
        result_ttl: Duration | None = None,
        on_orphan: OnOrphan = "warn",
        version: int = 1,
        strict_order: bool = False,
        coherence: Coherence | Literal["warn"] | None = "warn",
        on_end: Task[[str], Any] | None = None,
        unique: Unique | None = None,
        limits: Sequence[Limit | LimitCost] = (),
        budget: Budget | Sequence[Budget] = (),
        priority: Priority | None = None,
        idle: bool = False,
        slots: int = 1,
        max_depth: int | None = None,
        when_full: WhenFull | None = None,
        wait_limit: Duration | None = None,
        schedule: Cron | Every | None = None,
        **unknown: Never,
    ) -> Any:
        """Register a function as a task. Raises `TaskDefinitionError`.

        An `async def` gets a `Context` and runs in the event loop; a `def` gets a `SyncContext` and runs in a thread.

        Args:
            handler: the function, where the decorator is used without arguments.
            name: else the function's.
            queue: the queue that the task goes to, else the one with the app's name.
            retry: see `Retry`.
            timeout: seconds for one run, else the worker's time limit.
            idle_timeout: seconds in which a step must begin or end, or something must be saved, else the worker's idle
                limit; `math.inf` for no such limit.
            durability: how steps are recorded unless they say otherwise, see `StepOptions`.
            result_ttl: seconds for which the outcome is kept, else the setting.
            on_orphan: what follows if a resumed run returns without asking for recorded steps: `warn` stores the
                result, `fail` makes the task a dead letter `orphaned_steps`.
            version: version of the task's code, raised when its steps change; `ctx.version` is the one that a task
                began with. A worker leaves a task that began with a later one to newer workers.
            strict_order: refuse a new step that comes before recorded ones of its scope, before it runs
                (`StepOutOfOrder`). Concurrent branches need a scope each.
            coherence: checks while the task runs, see `Coherence`. `"warn"` warns of repeated calls and of no progress
                from the first `ctx.tool` of a run on, and costs nothing without one; None for no checks.
            on_end: a clean-up task, which gets the id of this one. The act that ends this one enqueues it on the same
                queue: with a result, as a dead letter, or cancelled, whether it was running or not.
            unique: which tasks must not be there twice, see `Unique`. It does not apply to children and to the tasks of
                a group.
            limits: what the task must get before it starts, at most four limits of `app.limit`, with what it costs
                there where they have costs: `[openai.costs(1200), session]`.
            budget: what a task may spend in all, with everything that it spawns: a `Budget`, or at most four.
            priority: "high", "normal" or "low". Of the tasks that wait, workers start those of a higher priority first;
                of 8 starts in a row at least one goes to a lower priority that waits.
            idle: start the task on spare slots only: if no other task waits, and at least half of the worker's slots
                are free.
            slots: slots of its worker that a run takes, all of them if the worker has fewer.
            max_depth: number of tasks waiting in the queue from which on this one is not enqueued, else that of
                `App.queue`. With a delay, scheduled tasks count too. It does not apply to children and groups.
            when_full: "refuse" lets the enqueue raise `QueueFull` then, "wait" lets it wait for room. A handler never
                waits for a queue that its own worker serves.
            wait_limit: seconds without room after which a waiting call raises `QueueFull`; 60 by default.
            schedule: `Cron("0 2 * * *", tz="Europe/Berlin")` or `Every(300)`: enqueue the task at these times, without
                arguments, under a schedule of its name. `App.schedule` has further options.
        """
        refuse_unknown(App.task, unknown)
        queue = self._queue(queue)

        around = None
        if coherence is not None and coherence != "warn":
            from .agents.coherence.monitor import watched

            around = partial(watched, coherence=coherence)

        def register(function: Any) -> Task[Any, Any]:
            task = self.tasks.add(
                function,
                name=name,
                queue=queue,
                retry=retry or Retry(),
                timeout=timeout,
                idle_timeout=idle_timeout,
                durability=durability,
                result_ttl=result_ttl,
                on_orphan=on_orphan,
                version=version,
                strict_order=strict_order,
                watches_tools=coherence == "warn",
                around=around,
                on_end=on_end,
                unique=unique,
                limits=limits,
                budget=budget,
                priority=priority,
                idle=idle,
                slots=slots,
                max_depth=max_depth,
                when_full=when_full,
                wait_limit=wait_limit,
            )
            if schedule is not None:
                try:
                    self.schedule(task.name, task, schedule)
                except Exception:
                    self.tasks.remove(task.name)
                    raise
            return task

        return register if handler is None else register(handler)

    @overload
    def agent(
        self,
        kind: type[Agent[S]],
        /,
        *,
        name: str | None = None,
        queue: str | None = None,
        retry: Retry | None = None,
        timeout: Duration | None = None,
        idle_timeout: Duration | None = None,
        durability: Durability = "sync",
        result_ttl: Duration | None = _MONTH,
        on_message: OnMessage = "next_step",
        on_resume: OnResume = None,
        version: int = 1,
        limits: Sequence[Limit | LimitCost] = (),
        budget: Budget | Sequence[Budget] = (),
        priority: Priority | None = None,
        idle: bool = False,
        slots: int = 1,
        max_depth: int | None = None,
        when_full: WhenFull | None = None,
        wait_limit: Duration | None = None,
    ) -> AgentTask[S]: ...
    @overload
    def agent(
        self,
        *,
        name: str | None = None,
        queue: str | None = None,
        retry: Retry | None = None,
        timeout: Duration | None = None,
        idle_timeout: Duration | None = None,
        durability: Durability = "sync",
        result_ttl: Duration | None = _MONTH,
        on_message: OnMessage = "next_step",
        on_resume: OnResume = None,
        version: int = 1,
        limits: Sequence[Limit | LimitCost] = (),
        budget: Budget | Sequence[Budget] = (),
        priority: Priority | None = None,
        idle: bool = False,
        slots: int = 1,
        max_depth: int | None = None,
        when_full: WhenFull | None = None,
        wait_limit: Duration | None = None,
    ) -> Callable[[type[Agent[S]]], AgentTask[S]]: ...
    def agent(
        self,
        kind: Any = None,
        *,
        name: str | None = None,
        queue: str | None = None,
        retry: Retry | None = None,
        timeout: Duration | None = None,
        idle_timeout: Duration | None = None,
        durability: Durability = "sync",
        result_ttl: Duration | None = _MONTH,
        on_message: OnMessage = "next_step",
        on_resume: OnResume = None,
        version: int = 1,
        limits: Sequence[Limit | LimitCost] = (),
        budget: Budget | Sequence[Budget] = (),
        priority: Priority | None = None,
        idle: bool = False,
        slots: int = 1,
        max_depth: int | None = None,
        when_full: WhenFull | None = None,
        wait_limit: Duration | None = None,
        **unknown: Never,
    ) -> Any:
        """Register a subclass of `Agent` as a task: `research = app.agent(Research)`, or as a decorator.

        Raises `TaskDefinitionError`.

        Args:
            kind: the class, where the decorator is used without arguments.
            name: else the class's, in lower case.
            queue, retry, timeout, idle_timeout, priority, idle: as for `task`.
            durability: as for `task`; the steps of the plan themselves are never recorded in the background.
            result_ttl: seconds for which the outcome is kept, and with it the knowledge that the goal is reached.
            on_message: when a message enters the conversation: before the `next_step`; or at once, with an `interrupt`
                of the running step, which then runs again; or with a `restart`, which also plans again. None: only the
                agent's own code reads messages.
            version, limits, budget: as for `task`. A key is made of the goal and the inputs.
            version, slots: as for `task`.
            max_depth, when_full, wait_limit: as for `task`. They do not apply to turns of sessions.
            on_resume: "ask" lets it wait after a crash, a failure or a replay until a person confirms that it may
                continue, for at most `Agent.resume_timeout`.
        """
        from .agent_task import AgentTask
        from .agents.handler import make_handler
        from .agents.journal.state import AgentState
        from .agents.state_type import StateType

        refuse_unknown(App.agent, unknown)
        queue = self._queue(queue)

        def register(agent: type[Agent[Any]]) -> AgentTask[Any]:
            called = name or getattr(agent, "__name__", repr(agent)).lower()
            form = StateType(called, getattr(agent, "state_type", AgentState))
            handler = make_handler(
                agent,
                form,
                on_message=on_message,
                on_resume=on_resume,
                replicated=durability == "replicated",
                check=lambda: self.settings.check_state,
                notifications=lambda: self.producer.notifications,
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
                on_orphan=None,
                version=version,
                limits=limits,
                budget=budget,
                priority=priority,
                idle=idle,
                slots=slots,
                max_depth=max_depth,
                when_full=when_full,
                wait_limit=wait_limit,
                call_options=(),
            )
            found = self.agents[called] = AgentTask(agent, form, task)
            return found

        return register if kind is None else register(kind)

    def limit(
        self,
        name: str,
        *,
        total: int | None = None,
        running: int | None = None,
        by: By = None,
        rate: str | Rate | None = None,
        cost: str | Rate | None = None,
        burst: int | None = None,
        over: Over = "wait",
        ordered: bool = False,
        while_parked: bool = False,
        breaker: Breaker | None = None,
    ) -> Limit:
        """Define a limit of the namespace: `openai = app.limit("openai", running=2, by="tenant", rate="500/m")`.

        Tasks get it with `@app.task(limits=[openai])`. The workers of the app publish it when they start; apps that use
        the same name share it, and the worker that started last decides. For the arguments see `Limit`.

        Raises:
            ValueError, TypeError: an argument is wrong.
            ConfigurationError: the app has a limit of this name.
        """
        from ..queues.limits.definition import Limit
        from .limit_owner import LimitedApp

        given: dict[str, Any] = {"total": total, "running": running, "by": by, "rate": rate, "cost": cost}
        given |= {"burst": burst, "over": over, "ordered": ordered, "while_parked": while_parked, "breaker": breaker}
        limit = Limit(name, **given, owner=LimitedApp(self))
        if name in self.limits:
            raise ConfigurationError(f"app {self.name!r} has a limit {name!r} already: use it, or another name")
        self.limits[name] = limit
        return limit

    def schedule(
        self,
        name: str,
        task: Task[..., Any] | TaskCall[..., Any] | AgentTask[Any] | str,
        when: Cron | Every,
        *,
        args: Mapping[str, Any] | None = None,
        jitter: Duration = 0.0,
        missed: Missed = "once",
        expires: Duration | None = None,
    ) -> None:
        """Let a task be enqueued at planned times: `app.schedule("report", report, Cron("0 2 * * *"))`.

        The workers of the app publish the schedule when they start, and any worker of the namespace fires it. Each
        planned time is fired once, by the clock of Redis.

        Args:
            name: name of the schedule in the namespace. The task of a planned time has the id `NAME-20260329T010000Z`.
            task: a task of the app, `task.options(...)`, or its name.
            when: `Cron` or `Every`.
            args: arguments of the task, by name.
            jitter: seconds by which a firing may be late, less than the time between two firings. The delay follows
                from the name and the planned time.
            missed: what is fired if planned times passed by more than a minute, since no worker ran: `once` enqueues
                one task, for the last of them; `all` one for each, at most the last 100; `skip` none.
            expires: seconds after the planned time; a task that has not started by then becomes a dead letter
                `expired`.

        Raises:
            ConfigurationError: an argument is wrong, the app has a schedule of this name, or no such task.
            InvalidArguments: the arguments do not fit the task.
            PayloadTooLarge: the arguments are over the limit of one message.
        """
        from .schedules import declare

        self.schedules[name] = declare(
            self, self.tasks, self.schedules, name, task, when, args=args, jitter=jitter, missed=missed, expires=expires
        )

    def queue(
        self,
        name: str | None = None,
        *,
        max_depth: int,
        when_full: WhenFull | None = None,
        wait_limit: Duration | None = None,
    ) -> str:
        """Limit the depth of a queue for all tasks of the app that go there, and return its name.

        Args:
            name: else that of the app.
            max_depth, when_full, wait_limit: as for `task`; those of a task take precedence.

        Raises `TaskDefinitionError`.
        """
        queue = self._queue(name)
        limit = make_max_depth(f"queue {queue!r}", max_depth, when_full, wait_limit)
        if limit is None:
            raise TaskDefinitionError(f"queue {queue!r}: max_depth must be a whole number, got None")
        self._max_depths[queue] = limit
        return queue

    @property
    def max_depths(self) -> Mapping[str, MaxDepth]:
        """The limits of the depth of queues that `queue` has set, by the names of the queues."""
        return self._max_depths

    def session(self, agent: AgentTask[S] | type[Agent[S]], session_id: str, /, **inputs: Any) -> Session[S]:
        """Return a session, a conversation with an agent that outlives the tasks of its turns. Nothing is sent.

        Args:
            agent: the registered agent, or its class.
            session_id: id of the session among those of the agent, such as the name of a user.
            inputs: fields of the state. Stored ones are used in the first turn, ephemeral ones in each turn.

        Raises:
            ConfigurationError: the class is not registered with this app, or under several names.
            ValueError: the id is not 1 to 256 printable characters.
        """
        from ..queues.sessions.record import check_session_id
        from .agent_task import AgentTask
        from .session import Session

        found = [agent] if isinstance(agent, AgentTask) else [one for one in self.agents.values() if one.kind is agent]
        if len(found) != 1:
            what = "is not registered" if not found else f"is registered as {', '.join(one.name for one in found)}"
            raise ConfigurationError(f"agent {agent!r} {what}: pass what app.agent(...) returned")
        check_session_id(session_id)
        return Session(found[0], session_id, inputs)

    def _queue(self, name: str | None) -> str:
        return self.name if name is None else check_name("queue", name)

    def __repr__(self) -> str:
        return f"App({self.name!r}, tasks={sorted(self.tasks)})"


def _check_modules(app: str, include: object) -> tuple[str, ...]:
    """Return the names of modules. Raises `ConfigurationError`."""
    if isinstance(include, str) or not isinstance(include, Iterable):
        raise ConfigurationError(f"include of app {app!r} must be a list of names of modules, got {include!r}")
    modules = tuple(include)
    for module in modules:
        if not isinstance(module, str) or not all(part.isidentifier() for part in module.split(".")):
            raise ConfigurationError(
                f"include of app {app!r} must be the full names of modules, such as 'shop.orders', got {module!r}"
            )
    return modules


def _import_problem(module: str, error: BaseException) -> str:
    """Return why the import of a module failed, as one line."""
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing and f"{module}.".startswith(f"{missing}."):
        package, _, name = missing.rpartition(".")
        if package in sys.modules:
            where = ", ".join(getattr(sys.modules[package], "__path__", ("no package",)))
            return f"{package!r} ({where}) has no module {name!r}; correct the name in include, or remove it"
        return (
            f"no module {missing!r} is on the import path; install it, or start in the folder that contains it, and "
            "name the app by its module, such as shop.app:app in place of shop/app.py:app"
        )
    text = error_text(error).partition("\n")[0]
    return text if isinstance(error, PerdureError) else f"{type(error).__name__}: {text}"


def _forget(opened: OpenedApp) -> None:
    opened.producer, opened.resources = None, NO_LIFESPAN
