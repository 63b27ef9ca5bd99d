"""A session of 1,000 turns over 20 worker restarts, half by kill -9: order, no loss, no doubled turn, flat cost."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import pytest
from perdure import App, Settings

from tests.support.paths import PROGRAMS
from tests.support.processes import worker_processes
from tests.support.programs.sessions import conversing
from tests.support.runs import address_of
from tests.support.workers import BOUND, redis_command

pytestmark = [pytest.mark.evaluation, pytest.mark.integration, pytest.mark.timeout(1800)]

TURNS, RESTARTS = 1000, 20

KEPT = Settings().session_turns


async def test_a_session_of_a_thousand_turns_over_twenty_restarts(settings: Settings, tmp_path: Path) -> None:
    every = TURNS // RESTARTS
    seconds: list[float] = []
    sizes: list[int] = []
    notes: list[str] = []
    with worker_processes(settings, tmp_path, PROGRAMS / "sessions" / "conversing.py") as workers:
        async with App("conversing", settings=settings) as app:
            session = app.session(app.agent(conversing.Talker, name="talker"), "user-42")
            address = address_of(app, "talker", session)
            worker = await workers.start().ready()
            digest, kills = "", 0
            for number in range(TURNS):
                started = time.monotonic()
                turn = await session.send(f"m{number}")
                restarted = number % every == every // 2
                if restarted:
                    await workers.line("act", f"m{number}")
                    if number // every % 2:
                        worker.stop()
                        await worker.ended()
                    else:
                        worker.kill()
                        kills += 1
                    worker = await workers.start().ready()
                answer = await turn.result(BOUND)
                digest = conversing.answer_after(digest, f"m{number}")
                note, _, plain = answer.rpartition("\n\n")
                assert plain == f"{number + 1} {digest}"
                assert restarted or not note, note
                notes += [note] if note else []
                if not restarted:
                    seconds.append(time.monotonic() - started)
                if number in (99, TURNS - 1):
                    sizes.append(int(await redis_command(app, "HSTRLEN", address.session, "state")))
            history = [(one.turn, one.role, one.content) async for one in session.history()]
            first = history[0][0]
            assert KEPT <= TURNS + 1 - first <= KEPT + 100
            assert [one[:2] for one in history] == [
                (n, role) for n in range(first, TURNS + 1) for role in ("user", "assistant")
            ]
            assert [one[2] for one in history[::2]] == [f"m{number}" for number in range(first - 1, TURNS)]
            noted = [line.key for line in workers.lines("act")]
            assert set(noted) == {f"m{number}" for number in range(TURNS)}
            assert len(noted) <= TURNS + RESTARTS
            record = await session.record()
            assert (record.status, record.ended, record.sent) == ("idle", TURNS, TURNS)
            early, late = statistics.median(seconds[50:150]), statistics.median(seconds[-100:])
            memory = int(await redis_command(app, "MEMORY", "USAGE", address.session))
            log = int(await redis_command(app, "MEMORY", "USAGE", address.history))
            print(
                f"\n{TURNS} turns, {RESTARTS} restarts ({kills} by SIGKILL); steps run again: {len(noted) - TURNS}"
                f"\nmedian of a turn: {early * 1000:.1f} ms (turns 50 to 150), {late * 1000:.1f} ms (the last 100)"
                f"\nstored state: {sizes[0]} bytes at turn 100, {sizes[1]} bytes at turn {TURNS}"
                f"\nidle session in Redis: {memory} bytes, its history {log} bytes ({TURNS + 1 - first} turns)"
                f"\nanswers that acknowledge an interruption: {len(notes)}, the first: {notes[0]}"
            )
            assert late <= 2 * early
            assert sizes[1] <= 1.2 * sizes[0]
