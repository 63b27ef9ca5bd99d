"""kill -9 of workers in the turns of a session: each message has one turn, in order, with the state of those before."""

from __future__ import annotations

from pathlib import Path

import pytest
from perdure import App, Settings

from tests.support.paths import PROGRAMS
from tests.support.processes import worker_processes
from tests.support.programs.sessions import conversing
from tests.support.workers import bounded
from tests.support.workers import history as event_history

pytestmark = [pytest.mark.integration, pytest.mark.processes]

TURNS, KILLS = 10, 2


async def test_a_session_survives_the_workers_that_are_killed_in_its_turns(settings: Settings, tmp_path: Path) -> None:
    with worker_processes(settings, tmp_path, PROGRAMS / "sessions" / "conversing.py") as workers:
        async with App("conversing", settings=settings) as app:
            talker = app.agent(conversing.Talker, name="talker")
            session = app.session(talker, "user-42")
            started = [workers.start() for _ in range(KILLS + 1)]
            turns = [await session.send(f"m{number}") for number in range(TURNS)]
            for killed in range(1, KILLS + 1):
                line = await workers.line("act", f"m{killed * TURNS // (KILLS + 1)}")
                next(one for one in started if one.pid == line.pid).kill()
            answers = [await bounded(turn.result()) for turn in turns]
            digest = ""
            for number, answer in enumerate(answers):
                digest = conversing.answer_after(digest, f"m{number}")
                note, _, own = answer.rpartition("\n\n")
                assert own == f"{number + 1} {digest}"
                assert not note or note.startswith("(This work was interrupted by a crash at ")
                handle = await app.producer.find(turns[number].task_id)
                assert handle is not None
                events = {event.type for event in await event_history(handle)}
                assert not note or "resumed" in events, "a kill may come after the end of the turn"
            history = [(one.turn, one.role, one.status) async for one in session.history()]
            expected = [(n, role, "answered") for n in range(1, TURNS + 1) for role in ("user", "assistant")]
            assert history == expected
            noted = [line.key for line in workers.lines("act")]
            assert len(noted) <= TURNS + KILLS, "a step runs once more for each kill at most"
