"""Parts of the package that a worker imports when something needs them; a plain task needs none.

The core (queues, dead letters, durable steps, the runtime) does not know agents, sessions, artifacts and workspaces.
The app, the contexts and these functions are its ways to them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..queues.envelope import is_turn_id
from ..queues.event_log import LogTail
from ..queues.keys import Namespace, Partition
from ..queues.transport.gateway import Gateway
from .settings import Settings

if TYPE_CHECKING:
    from ..queues.sessions.turns import SessionTask
    from .agent_task import AgentTask
    from .durable.journal.handoff.document import Handoff
    from .durable.run import Run
    from .durable.stop_reasons import LimitReason
    from .task import Task


def load_drafts() -> None:
    """Import what drafts a handoff document.

    A worker does so at its start: the files of the package may be replaced before it stops.
    """
    from .agents.journal import draft as _draft  # noqa: F401


def draft_handoff(tail: LogTail, **parts: Any) -> Handoff:
    """Return the handoff document of a task from the tail of its log. parts: see `handoff_of`."""
    from .agents.journal.draft import handoff_of

    return handoff_of(tail, **parts)


def burial_notes(tail: LogTail, session: str, reason: str, error: str, message: str, *, step: object) -> list[str]:
    """Return what needs attention in a dead letter. For the arguments see draft.py."""
    from .agents.journal import draft

    return list(draft.burial_notes(tail.events, session, reason, error, message, step=step, intents=tail.intents))


async def watch_tools(run: Run) -> None:
    """Check the coherence of a function from its first tool call on, as long as the handler runs."""
    from .agents.coherence.monitor import watch

    run.watching = await watch(run)


async def restore_workspace(run: Run) -> None:
    """Restore the workspace that earlier runs of a task saved. Raises `WorkspaceError`, `ArtifactError`."""
    from .workspace.task_workspace import restore_workspace

    await restore_workspace(run)


def keep_large_values(gateway: Gateway, settings: Settings) -> Gateway:
    """Let a gateway store the largest values in the artifact store, if every worker reaches that; return it."""
    if settings.shared_artifacts:
        from .artifacts.store import store_large_values

        store_large_values(gateway, settings)
    return gateway


def observe_limits(run: Run) -> None:
    """Release the token of a limited task after its outcome."""
    from .durable.limit_tokens import AdmissionToken

    AdmissionToken.of(run)


async def confirm_limits(run: Run, task: Task[Any, Any], arguments: Mapping[str, Any]) -> LimitReason | None:
    """Take the tokens that a limited task needs to run; return the limit that has no room. Raises `InvalidLimitUse`."""
    from .durable.limit_tokens import AdmissionToken, add_limits

    if not run.envelope.limits and task.limits is not None:
        add_limits(run, task.limits, task.arguments, arguments)
    admission = run.observer(AdmissionToken) or AdmissionToken.of(run)
    return None if admission is None else await admission.confirm(run)


def kept_token(run: Run) -> str:
    """Return what names the token that a limited task keeps while it is parked, empty for none."""
    from .durable.limit_tokens import AdmissionToken

    admission = run.observer(AdmissionToken)
    return "" if admission is None else admission.kept


async def begin_budgets(run: Run, task: Task[Any, Any], arguments: Mapping[str, Any]) -> None:
    """Let a run charge the budgets of its task, and look at them."""
    from .durable.spending import begin

    await begin(run, task.budgets, task.arguments, arguments, draft_handoff, task.result_ttl)


def session_task(gateway: Gateway, partition: Partition, task_id: str) -> SessionTask | None:
    """Return the task of a turn of a session; None for the id of any other task."""
    if not is_turn_id(task_id):
        return None
    from ..queues.sessions.turns import SessionTask

    return SessionTask.of(gateway, partition, task_id)


def session_chores(
    gateway: Gateway,
    namespace: Namespace,
    agents: Mapping[str, AgentTask[Any]],
    *,
    ttl: float,
    worker: str,
    lock_ttl: float,
) -> dict[str, Callable[[], Awaitable[None]]]:
    """Return what the janitor of a worker with agents does about the sessions of the fleet; nothing without agents."""
    if not agents:
        return {}
    from .agents.session_sweeper import SessionSweeper

    waking = {name for name, agent in agents.items() if agent.kind.wake_when_due}
    sweeper = SessionSweeper(gateway, namespace, ttl=ttl, worker=worker, lock_ttl=lock_ttl, waking=waking)
    return {"sessions": sweeper.sweep}
