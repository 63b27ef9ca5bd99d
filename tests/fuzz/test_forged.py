"""Forgeries in sealed data: nothing that a writer without the key has stored is taken for truth.

`make fuzz` applies 10,000 forgeries. FUZZ_SEED and FUZZ_COUNT change which; FUZZ_ONLY=12,40 applies only these.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path

import pytest
import redis.asyncio
from perdure import Settings
from perdure.queues import Namespace
from perdure.queues.keys import SessionPartition

from tests.fuzz.forgeries import draw_forgery
from tests.fuzz.places import places
from tests.fuzz.sealed import Finding, SealedWorld
from tests.support.programs.witness import QUEUE
from tests.support.stored_data import FIRST, with_keys

pytestmark = [pytest.mark.integration, pytest.mark.processes]

SEED = int(os.environ.get("FUZZ_SEED", "20261128"))
COUNT = int(os.environ.get("FUZZ_COUNT", "200"))
ONLY = [int(number) for number in os.environ.get("FUZZ_ONLY", "").split(",") if number]
BATCH = 250
"""Forgeries of a round."""

OPEN = ("SessionPartition.session", "SessionPartition.history")
"""Places whose forgeries are still taken for truth: not every number of a session is part of its sealed data."""


async def test_no_forgery_is_taken_for_truth(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    print(f"FUZZ_SEED={SEED} FUZZ_COUNT={COUNT}")  # noqa: T201 - shown where the test fails
    monkeypatch.setenv("PERDURE_ENCRYPTION_KEYS", FIRST)
    monkeypatch.setenv("PERDURE_ENCRYPTION_REQUIRED", "1")
    settings = settings.model_copy(update={"payload_limit": 4096})
    plain_settings = settings.model_copy(update={"namespace": f"{settings.namespace}p"})
    names = Namespace(settings.namespace)
    address = SessionPartition(names.name, 0)
    kinds = list(places(names, names.partition(QUEUE), address))
    started, failures, acts, kinds_used = time.monotonic(), [], Counter[str](), Counter[str]()
    async with redis.asyncio.Redis.from_url(settings.redis_url) as client:
        twin = SealedWorld(plain_settings, client, tmp_path / "plain", "", {}, "")
        shapes = await twin.shapes()
        await twin.clear()
        world = SealedWorld(
            with_keys(settings, FIRST, required=True),
            client,
            tmp_path / "sealed",
            FIRST,
            shapes,
            plain_settings.namespace,
        )
        findings, _ = await world.round([])
        assert not (findings or world.failed), "without forgeries, all is true"
        numbers = ONLY or list(range(COUNT))
        for start in range(0, len(numbers), BATCH):
            drawn = [draw_forgery(SEED, number, kinds) for number in numbers[start : start + BATCH]]
            batch = [forgery for forgery in drawn if ONLY or forgery.place.name not in OPEN]
            findings, applied = await world.round(batch)
            for one in applied:
                acts[one.forgery.act if one.commands else "nothing"] += 1
                kinds_used[one.forgery.place.name] += bool(one.commands)
            seen: dict[str, list[str]] = {}
            for finding in findings:
                seen.setdefault(finding.subject, []).append(finding.seen)
            for subject, texts in seen.items():
                guilty = [f"    {one}" for one in Finding(subject, "").among(applied)]
                failures.append("\n".join([*dict.fromkeys(texts), *guilty]))
            print(f"{start + len(batch)} {time.monotonic() - started:.0f} s, {len(failures)} failures")  # noqa: T201
        await world.clear()
    print(dict(acts), dict(kinds_used))  # noqa: T201
    assert not failures, "\n".join([f"FUZZ_SEED={SEED}", *failures])
