"""Public surface: the names of `perdure` and of its three public modules, and the cost of `import perdure`."""

from __future__ import annotations

import re
import subprocess
import sys
from types import ModuleType

import perdure
import perdure.context
import perdure.memory
import perdure.testing
import pytest
from perdure.worker.memory.embedders import load_embedder

from tests.support.paths import ROOT

NAMES = {
    "Agent",
    "AgentState",
    "AlreadyDone",
    "App",
    "Artifact",
    "ArtifactError",
    "Breaker",
    "Budget",
    "BudgetLeft",
    "ChildFailed",
    "Coherence",
    "Context",
    "ContextBuilder",
    "ContextError",
    "Cron",
    "DecryptionError",
    "EndedTask",
    "EnqueueCall",
    "Ephemeral",
    "Event",
    "Every",
    "FileConflict",
    "First",
    "HandOffRefused",
    "Handoff",
    "Identity",
    "InboxFull",
    "InvalidArguments",
    "LeaseLost",
    "Limit",
    "Middleware",
    "NotReplicated",
    "PayloadTooLarge",
    "PerdureError",
    "Plan",
    "PlanStep",
    "Producer",
    "QueueFull",
    "Rate",
    "RecordedFailure",
    "ResumeWarning",
    "Resumption",
    "Retry",
    "RetryLater",
    "RunStopped",
    "ServerFull",
    "Session",
    "SessionFailed",
    "SessionFull",
    "SessionNotFound",
    "Settings",
    "Settlement",
    "Snooze",
    "SpawnRefused",
    "State",
    "StateError",
    "StepCall",
    "StepInDoubt",
    "StepMismatch",
    "StepResolvedAsFailed",
    "StepStillRunning",
    "StepTimeout",
    "StillRunning",
    "Stop",
    "Store",
    "StoreBatch",
    "StoreConflict",
    "StoreEntry",
    "StoreError",
    "StoreFenced",
    "StreamItem",
    "StreamTrimmed",
    "SyncContext",
    "TaskCancelled",
    "TaskEnded",
    "TaskExists",
    "TaskFailed",
    "TaskHandle",
    "TaskNotFound",
    "TurnHandle",
    "Unavailable",
    "Unique",
    "Worker",
    "WorkspaceError",
    "configure_logging",
    "current_context",
    "current_step",
    "register_event",
    "use_stdlib_logging",
}

CONTEXT_NAMES = {
    "AgentTools",
    "MALFORMED",
    "Budgets",
    "Commitment",
    "ContextError",
    "CompactionRequest",
    "ContextBuilder",
    "ContextTooLarge",
    "Finding",
    "Message",
    "Prompt",
    "Question",
    "ToolCall",
    "View",
    "default_counter",
    "from_anthropic",
    "from_openai",
    "to_anthropic",
    "to_openai",
}

MEMORY_NAMES = {
    "Embedder",
    "EmbedderFailed",
    "EmbedderMismatch",
    "FoundMemory",
    "HashingEmbedder",
    "InvalidMemory",
    "Memory",
    "MemoryLink",
    "MemoryStoreDamaged",
    "MemoryStoreError",
    "MemoryStoreMissing",
    "MemoryStoreUnavailable",
    "NewMemory",
    "NotAMemoryStore",
    "RelatedMemory",
    "VectorsUnavailable",
}

TESTING_NAMES = {
    "CrashComparison",
    "CrashProblem",
    "PerdureClock",
    "PerdureFixture",
    "ReplayedLog",
    "UnitContext",
    "assert_enqueued",
    "crash_at",
    "crash_everywhere",
    "drain",
    "make_context",
    "record_effect",
    "refute_enqueued",
    "replay_log",
    "run_until_idle",
    "run_worker",
}


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (perdure, NAMES),
        (perdure.context, CONTEXT_NAMES),
        (perdure.memory, MEMORY_NAMES),
        (perdure.testing, TESTING_NAMES),
    ],
    ids=["perdure", "perdure.context", "perdure.memory", "perdure.testing"],
)
def test_a_module_exports_these_names_and_no_others(module: ModuleType, names: set[str]) -> None:
    assert sorted(module.__all__) == sorted(names)
    for name in names - {"MALFORMED"}:
        assert getattr(module, name).__name__ == name


def test_guides_import_public_names_only() -> None:
    found: dict[str, list[str]] = {}
    for guide in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        shown = "".join(re.findall(r"^```python\n(.*?)^```", guide.read_text("utf-8"), re.MULTILINE | re.DOTALL))
        found[guide.name] = re.findall(r"perdure\.(?:worker|queues|deadletter)\b.*", shown)
    assert not {name: imports for name, imports in found.items() if imports}


def test_dir_lists_public_names_before_first_use() -> None:
    code = "import perdure; print(set(perdure.__all__) <= set(dir(perdure)))"
    assert _run(code) == "True"


def test_star_import_binds_all_public_names() -> None:
    found: dict[str, object] = {}
    exec("from perdure import *", found)
    assert set(found) >= NAMES


def test_unknown_name_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'perdure' has no attribute 'Nothing'"):
        getattr(perdure, "Nothing")  # noqa: B009 - a type checker rightly refuses perdure.Nothing


def test_importing_perdure_imports_no_dependency_and_no_submodule() -> None:
    code = (
        "import sys, perdure; print([name for name in sys.modules"
        " if name in ('redis', 'pydantic', 'anyio', 'typer', 'rich') or name.startswith('perdure.')])"
    )
    assert _run(code) == "[]"


@pytest.mark.parametrize("target", ["perdure.memory:HashingEmbedder", "perdure:HashingEmbedder"])
def test_both_paths_of_the_hashing_embedder_load(target: str) -> None:
    assert isinstance(load_embedder(target), perdure.memory.HashingEmbedder)


def _run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout.strip()
