"""Each handler of the suite, disturbed at each place. `make replay` runs all of it, other runs a sample."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from perdure import Settings

from . import ends  # noqa: F401 - it adds handlers
from .handlers import HANDLERS
from .process import Forks, forks
from .rehearsal import Disturbance, Rehearsal, disturbances, problems, quiet

pytestmark = pytest.mark.integration

WHOLE = os.environ.get("REPLAY") == "all"
"""Whether all disturbances are tried, and not a sample of them."""

SEED = os.environ.get("REPLAY_SEED", "1")

SAMPLE = 5
"""Disturbances of each handler in a sample."""

KILLED = 5
"""Handlers whose process is killed in a sample."""

REPEATED = frozenset(
    (
        "agent_with_inner_steps",
        "artifact_after_a_failure",
        "asyncio_timeout_around_a_step",
        "bank_that_recovers",
        "bank_that_recovers_and_approval",
        "both_banks_fail_and_the_task_is_retried",
        "branches_that_handle_their_failures",
        "def_task",
        "def_task_with_tries",
        "exception_group_of_a_step",
        "failure_and_logged_calls",
        "failure_with_data",
        "fallback_bank",
        "flaky_tool_error_shown_to_the_model",
        "gather_reported_and_then_raised",
        "gather_with_return_exceptions",
        "later_step_fails_once",
        "loop_of_three_tries",
        "loop_of_three_tries_and_then_raise",
        "message_sent_after_a_failure",
        "move_on_after_in_branches",
        "outer_step_with_tries_and_recorded_parts",
        "own_backoff_between_tries",
        "plain_functions_in_threads",
        "question_after_a_failure",
        "question_that_is_answered",
        "race_whose_loser_is_cut_off",
        "risky_step_that_fails",
        "scopes",
        "skip_failed_items",
        "skip_failed_items_with_tries",
        "step_ids",
        "step_that_exits",
        "step_that_is_in_time_when_called_again",
        "step_with_a_timeout",
        "task_group_with_a_failure",
        "third_try_succeeds",
        "tool_error_shown_to_the_model",
        "tries_are_used_up_and_the_handler_continues",
        "tries_of_a_step",
        "wait_for_around_a_step",
    )
)
"""Handlers that a stop shows in: failures, and tries of a step, are not recorded, so that they happen again."""

WRONG = pytest.mark.xfail(strict=True, reason="the failure of a step that the handler has handled is not recorded")


@pytest.fixture
def replay_settings(settings: Settings) -> Iterator[Settings]:
    with quiet():
        yield settings.model_copy(update={"lease": 30.0})


@pytest.mark.parametrize("name", [pytest.param(name, marks=WRONG if name in REPEATED else ()) for name in HANDLERS])
def test_a_disturbed_task_goes_the_way_it_went(name: str, replay_settings: Settings, tmp_path: Path) -> None:
    handler = HANDLERS[name]
    undisturbed = Rehearsal(handler, replay_settings, tmp_path, "undisturbed").play()
    assert not (found := problems(handler, undisturbed, undisturbed, None)), found
    chosen = disturbances(handler, undisturbed)
    if not WHOLE and name not in REPEATED:
        chosen = Random(f"{SEED} {name}").sample(chosen, min(SAMPLE, len(chosen)))
    wrong: list[str] = []
    for disturbance in chosen:
        seen = Rehearsal(handler, replay_settings, tmp_path, str(disturbance)).play(disturbance)
        wrong += [f"{disturbance}: {problem}" for problem in problems(handler, undisturbed, seen, disturbance)]
        if wrong and not WHOLE:
            break
    assert not wrong, "\n".join(wrong)


@pytest.fixture(scope="module")
def forked() -> Iterator[Forks]:
    with forks() as process:
        yield process


@pytest.mark.processes
@pytest.mark.parametrize("name", [name for name in HANDLERS if name not in REPEATED])
def test_a_killed_process_leaves_what_another_one_continues(
    name: str, replay_settings: Settings, tmp_path: Path, forked: Forks
) -> None:
    if not WHOLE and name not in Random(SEED).sample(sorted(HANDLERS), KILLED):
        pytest.skip("not in the sample")
    handler = HANDLERS[name]
    undisturbed = Rehearsal(handler, replay_settings, tmp_path, "undisturbed").play()
    write = Random(f"{SEED} {name}").randint(1, max(1, undisturbed.writes - 1))
    rehearsal = Rehearsal(handler, replay_settings, tmp_path, "killed")

    def kill() -> None:
        code = forked.work(replay_settings, tmp_path, name, "killed", write)
        assert code in (-signal.SIGKILL, 0)  # 0: the task waits now, so that there was no such write

    disturbance = Disturbance("kill", write)
    assert not (wrong := problems(handler, undisturbed, rehearsal.play(disturbance, killed=kill), disturbance)), wrong
