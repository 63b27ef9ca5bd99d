"""Forgeries in sealed data: nothing that a writer without the key has stored is taken for truth.

`make fuzz` applies 10,000 forgeries. FUZZ_SEED and FUZZ_COUNT change which; FUZZ_ONLY=12,40 applies only these.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import redis.asyncio
from perdure import Settings

from tests.fuzz.forgeries import Applied, draw_forgery
from tests.fuzz.sealed import Finding, SealedWorld
from tests.support.stored_data import FIRST, with_keys

pytestmark = [pytest.mark.integration, pytest.mark.processes]

SEED = int(os.environ.get("FUZZ_SEED", "20261128"))
COUNT = int(os.environ.get("FUZZ_COUNT", "200"))
ONLY = [int(number) for number in os.environ.get("FUZZ_ONLY", "").split(",") if number]
BATCH = 300
"""Forgeries of a round."""


def shown(findings: Sequence[Finding], applied: Sequence[Applied]) -> list[str]:
    """Return a text for each subject: what is wrong with it, and the forgeries that wrote to its keys."""
    seen: dict[str, list[str]] = {}
    for finding in findings:
        seen.setdefault(finding.subject, []).append(finding.seen)
    return [
        "\n".join([*dict.fromkeys(texts), *(f"    {one}" for one in Finding(subject, "").among(applied))])
        for subject, texts in seen.items()
    ]


@pytest.fixture
async def world(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SealedWorld]:
    """A sealed world that knows the shapes of a plain one. Its namespace is emptied afterwards."""
    monkeypatch.setenv("PERDURE_ENCRYPTION_KEYS", FIRST)
    monkeypatch.setenv("PERDURE_ENCRYPTION_REQUIRED", "1")
    settings = settings.model_copy(update={"payload_limit": 4096})
    twin = f"{settings.namespace}p"
    async with redis.asyncio.Redis.from_url(settings.redis_url) as client:
        plain = SealedWorld(settings.model_copy(update={"namespace": twin}), client, tmp_path / "plain")
        try:
            shapes = await plain.shapes()
        finally:
            await plain.clear()
        world = SealedWorld(with_keys(settings, FIRST, required=True), client, tmp_path / "sealed", shapes, twin)
        try:
            yield world
        finally:
            await world.clear()


async def test_no_forgery_is_taken_for_truth(world: SealedWorld) -> None:
    print(f"FUZZ_SEED={SEED} FUZZ_COUNT={COUNT}")  # noqa: T201 - shown where the test fails
    findings, _ = await world.round([])
    assert not (findings or world.failed), "without forgeries, all is true, and all tasks end"
    failures: list[str] = []
    made: Counter[str] = Counter()
    started = time.monotonic()
    numbers = ONLY or list(range(COUNT))
    for start in range(0, len(numbers), BATCH):
        batch = [draw_forgery(SEED, number, world.places) for number in numbers[start : start + BATCH]]
        findings, applied = await world.round(batch)
        made.update(one.forgery.place.name for one in applied if one.commands)
        new = shown(findings, applied)
        failures += new
        for text in (f"{made.total()} forgeries in {time.monotonic() - started:.0f} s", *new):
            print(text, flush=True)  # noqa: T201
    print(f"{made.total()} forgeries of {len(made)} kinds of keys: {dict(made.most_common())}")  # noqa: T201
    assert not failures, "\n".join([f"FUZZ_SEED={SEED}", *failures])
    assert ONLY or made.total() >= 0.99 * COUNT
