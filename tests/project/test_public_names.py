"""The public surface: the names that `perdure` has, and that asking for none of them costs nothing."""

from __future__ import annotations

import subprocess
import sys

import perdure
import pytest

NAMES = {
    "Agent",
    "AgentState",
    "App",
    "Artifact",
    "ArtifactError",
    "DecryptionError",
    "Coherence",
    "Context",
    "ContextBuilder",
    "ContextError",
    "Ephemeral",
    "Event",
    "HandOffRefused",
    "Handoff",
    "AlreadyDone",
    "HashingEmbedder",
    "InboxFull",
    "InvalidArguments",
    "LeaseLost",
    "MemoryStoreError",
    "Message",
    "NewMemory",
    "NotReplicated",
    "CompactionRequest",
    "PayloadTooLarge",
    "PerdureError",
    "PlanStep",
    "Producer",
    "Prompt",
    "Resumption",
    "Retry",
    "RetryLater",
    "ServerFull",
    "Settings",
    "Snooze",
    "State",
    "StateError",
    "StepInDoubt",
    "StepMismatch",
    "StepTimeout",
    "StillRunning",
    "TaskCancelled",
    "TaskEnded",
    "TaskFailed",
    "TaskHandle",
    "TaskNotFound",
    "ToolCall",
    "Unavailable",
    "Worker",
    "current_step",
    "from_anthropic",
    "from_openai",
    "register_event",
    "to_anthropic",
    "to_openai",
}


def test_these_names_are_public_and_no_others() -> None:
    assert set(perdure.__all__) == NAMES
    assert len(perdure.__all__) == len(NAMES)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_public_name_is_what_it_is_called(name: str) -> None:
    assert getattr(perdure, name).__name__ == name


def test_dir_shows_the_public_names_before_they_are_used() -> None:
    code = "import perdure; print(set(perdure.__all__) <= set(dir(perdure)))"
    assert _run(code) == "True"


def test_a_star_import_brings_them_all() -> None:
    found: dict[str, object] = {}
    exec("from perdure import *", found)
    assert set(found) >= NAMES


def test_another_name_is_an_attribute_error_that_says_so() -> None:
    with pytest.raises(AttributeError, match="module 'perdure' has no attribute 'Nothing'"):
        getattr(perdure, "Nothing")  # noqa: B009 - a type checker rightly refuses perdure.Nothing


def test_importing_perdure_imports_none_of_its_dependencies() -> None:
    code = "import sys, perdure; print(sorted({'redis', 'pydantic', 'anyio', 'typer', 'rich'} & set(sys.modules)))"
    assert _run(code) == "[]"


def _run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout.strip()
