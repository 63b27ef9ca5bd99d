"""Each handler of the suite, disturbed at each place. `make replay` runs all of it, other runs a sample."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from perdure import Settings

from tests.replay.process import Forks, forks
from tests.replay.rehearsal import Disturbance, Rehearsal, disturbances, problems, quiet
from tests.replay.suite import HANDLERS

pytestmark = pytest.mark.integration

WHOLE = os.environ.get("REPLAY") == "all"
"""Whether all disturbances are tried, and not a sample of them."""

SEED = os.environ.get("REPLAY_SEED", "1")

SAMPLE = 2
"""Disturbances of each handler in a sample."""

KILLED = 5
"""Handlers whose process is killed in a sample."""

LONGEST_FIRST = sorted(HANDLERS, key=lambda name: not HANDLERS[name].spawns)
"""Handlers that spawn children have most writes, and their rehearsals last longest."""


@pytest.fixture
def replay_settings(settings: Settings) -> Iterator[Settings]:
    with quiet():
        yield settings.model_copy(update={"lease": 30.0})


@pytest.mark.parametrize("name", LONGEST_FIRST)
def test_a_disturbed_task_goes_the_way_it_went(name: str, replay_settings: Settings, tmp_path: Path) -> None:
    handler = HANDLERS[name]
    undisturbed = Rehearsal(handler, replay_settings, tmp_path, "undisturbed").play()
    assert not (found := problems(handler, undisturbed, undisturbed, None)), found
    chosen = disturbances(handler, undisturbed)
    if not WHOLE:
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
@pytest.mark.parametrize("name", HANDLERS)
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
