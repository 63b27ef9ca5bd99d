"""Mutations of every key: what another program writes ends no worker, hides no list and delays no other task.

`make fuzz` applies 10,000 mutations. FUZZ_SEED and FUZZ_COUNT change which; FUZZ_ONLY=12,40 applies only these.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence

import pytest
import redis.asyncio
from perdure import Settings, Worker
from perdure.queues import Namespace
from perdure.queues.keys import SessionPartition
from perdure.worker.log import logger

from tests.fuzz.mutations import Mutation, draw
from tests.fuzz.places import places
from tests.fuzz.search import guilty
from tests.fuzz.world import QUEUE, TIMINGS, World

pytestmark = [pytest.mark.integration, pytest.mark.processes]

SEED = int(os.environ.get("FUZZ_SEED", "20261126"))
COUNT = int(os.environ.get("FUZZ_COUNT", "200"))
ONLY = [int(number) for number in os.environ.get("FUZZ_ONLY", "").split(",") if number]

BATCH = 100
"""Mutations between two checks. A check takes a second or two, a mutation some milliseconds."""

MAX_FAILURES = 10
"""Failures after which a run ends. The mutations of each are searched for."""


async def search(
    world: World, batch: Sequence[Mutation], broken: Sequence[str], as_json: bool
) -> tuple[Sequence[Mutation], str]:
    """Return the mutations that break something, and a text that names them."""
    wanted = broken[0].partition(":")[0]

    async def fails(some: Sequence[Mutation]) -> bool:
        found, _ = await world.check(some, as_json)
        return any(problem.startswith(wanted) for problem in found)

    least = await guilty(batch, fails)
    found, sent = await world.check(least, as_json)
    shown = [
        f"    FUZZ_ONLY={mutation.number}: {mutation.place.name}, {mutation.act}: {command}"
        for mutation, command in zip(least, sent, strict=True)
    ]
    return least, "\n".join([*(text[:400] for text in found or broken), *shown])


async def test_mutations_of_every_key_end_no_worker_and_break_no_list(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    print(f"FUZZ_SEED={SEED} FUZZ_COUNT={COUNT}")  # noqa: T201 - shown where the test fails
    monkeypatch.setattr(Worker, "timings", TIMINGS)
    names = Namespace(settings.namespace)
    kinds = list(places(names, names.partition(QUEUE), SessionPartition(names.name, 0)))
    failures: list[str] = []
    applied: Counter[str] = Counter()
    started = time.monotonic()
    async with redis.asyncio.Redis.from_url(settings.redis_url) as client:
        world = World(settings, client)
        await world.build()
        logger.disable("perdure")  # each junk item is a warning
        try:
            numbers = ONLY or list(range(COUNT))
            for start in range(0, len(numbers), BATCH):
                batch = [draw(SEED, number, kinds) for number in numbers[start : start + BATCH]]
                applied.update(mutation.place.name for mutation in batch)
                as_json = start // BATCH % 2 == 1
                while len(failures) < MAX_FAILURES:
                    broken, _ = await world.check(batch, as_json)
                    if not broken:
                        break
                    least, shown = await search(world, batch, broken, as_json)
                    failures.append(shown)
                    batch = [mutation for mutation in batch if mutation not in least]
        finally:
            logger.enable("perdure")
            await world.clear()
    ended = sum("ended: " in failure for failure in failures)
    lists = sum("perdure " in failure for failure in failures)
    print(  # noqa: T201
        f"{applied.total()} mutations of {len(applied)} kinds of keys in {time.monotonic() - started:.0f} s; "
        f"workers ended: {ended}, lists broken: {lists}"
    )
    assert not failures, "\n".join([f"FUZZ_SEED={SEED}", *failures])
    assert ONLY or 50 * len(kinds) > COUNT or applied.keys() == {place.name for place in kinds}
