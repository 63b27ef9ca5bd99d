"""Durable execution of a handler: the run, its checkpoint, and the context that a handler works with.

    run.py                one run: lifecycle, event log
    handler_task.py       the asyncio task of a handler, and its cancellation
    stop_reasons.py       why a run stops, and what follows
    observer.py           RunObserver: notified of what happens in a run
    middleware.py         hooks around enqueue, run, step and settle
    context.py            Context: the public `ctx`
    steps/                ctx.step: run once, record, return from the record
    step_caller.py        step, tool, inbox and ask of a context and of its options
    checkpoint_writer.py  the one writer of a run's checkpoint
    log_calls.py          ctx.decide, discover, add_message, record_event
    messaging.py          ctx.inbox, ask, send
    task_artifacts.py     ctx.artifacts
    task_workspace.py     ctx.workspace
    shared_workspace.py   files of several tasks, with compare-and-set
    task_memory.py        ctx.memory; ids of the memories that a task has used
    recall.py             ctx.recall_step
    resume_info.py        ctx.resume_info
    continuation.py       ctx.continue_as
    goal.py               the goal of a function's run
    sync/                 SyncContext: the `ctx` of a plain function, which runs in a thread

What a handler got once, it gets again after a crash: every call above writes a record under a key that depends only on
the order of the calls, and a resumed run returns that record. A new call must do the same, in one write with its event,
through `run.recorder`, which is fenced. worker/journal/step_record.py has the stored form.
"""

from .context import Context, current_context
from .continuation import HANDING, complete_successor, successor_of
from .goal import goal_of
from .json_types import JsonType, storable, type_name, type_problem
from .log_calls import log_orphans
from .messaging import InboxOwner, consumed, next_entries, report_unreadable, unread_messages
from .middleware import CallNext, Chain, EnqueueCall, Middleware, Settlement, build_chain, enqueue_innermost
from .observer import RunObserver
from .recall import RecalledStep, recall_step
from .run import Run
from .shared_workspace import SharedFile, SharedWorkspace, shared_hashes
from .steps.codec import Codec, codec_of
from .steps.current import CURRENT_RUN, Step, StepCall, current_step, log_fields
from .steps.keys import changed_scope, forget_steps
from .steps.large import store_task_result
from .steps.matching import reload_records
from .steps.options import AlreadyDone, Durability, StepOptions
from .steps.step_thread import StepThread
from .steps.threads import Threads
from .stop_reasons import STOP_RULES, ParkReason, StopReason, StopRule, counters_after, stop_of_event
from .task_artifacts import Artifacts
from .task_memory import CITED_MEMORIES, TaskMemory, cite_memories, cited_memories, store_findings
from .task_workspace import (
    FolderOnly,
    Workspace,
    check_saved_link,
    check_workspace_field,
    restore_workspace,
    task_workspace_files,
    workspace_hashes,
    workspace_link,
)
from .value_loss import find_misread, warn_of_losses

__all__ = [
    "CITED_MEMORIES",
    "CURRENT_RUN",
    "HANDING",
    "STOP_RULES",
    "AlreadyDone",
    "Artifacts",
    "CallNext",
    "Chain",
    "Codec",
    "Context",
    "Durability",
    "EnqueueCall",
    "FolderOnly",
    "InboxOwner",
    "JsonType",
    "Middleware",
    "ParkReason",
    "RecalledStep",
    "Run",
    "RunObserver",
    "Settlement",
    "SharedFile",
    "SharedWorkspace",
    "Step",
    "StepCall",
    "StepOptions",
    "StepThread",
    "StopReason",
    "StopRule",
    "TaskMemory",
    "Threads",
    "Workspace",
    "build_chain",
    "changed_scope",
    "check_saved_link",
    "check_workspace_field",
    "cite_memories",
    "cited_memories",
    "codec_of",
    "complete_successor",
    "consumed",
    "counters_after",
    "current_context",
    "current_step",
    "enqueue_innermost",
    "find_misread",
    "forget_steps",
    "goal_of",
    "log_fields",
    "log_orphans",
    "next_entries",
    "recall_step",
    "reload_records",
    "report_unreadable",
    "restore_workspace",
    "shared_hashes",
    "stop_of_event",
    "storable",
    "store_findings",
    "store_task_result",
    "successor_of",
    "task_workspace_files",
    "type_name",
    "type_problem",
    "unread_messages",
    "warn_of_losses",
    "workspace_hashes",
    "workspace_link",
]
