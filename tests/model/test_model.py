"""The model test: Redis agrees with the model after acts in any order, repeated, and too late.

`make model` runs many more. MODEL_SEED (printed at the head of a run), MODEL_RUNS and MODEL_ACTS change what is run.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, Phase, Verbosity, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.conftest import ON_SERVERS, SERVERS, shared_server
from tests.model.ground import Ground
from tests.model.machine import Queues
from tests.support.servers import VALKEY, RedisServer

pytestmark = pytest.mark.integration

SEED = int(os.environ.get("MODEL_SEED", "20261121"))
RUNS = int(os.environ.get("MODEL_RUNS", "12"))
ACTS = int(os.environ.get("MODEL_ACTS", "40"))


@pytest.mark.parametrize("kind", ON_SERVERS)
def test_redis_agrees_with_the_model(shared_servers: dict[str, RedisServer], kind: str) -> None:
    if kind == VALKEY:
        pytest.skip("the model says when Redis makes the name of a consumer; Valkey makes it at other times")
    print(f"MODEL_SEED={SEED} MODEL_RUNS={RUNS} MODEL_ACTS={ACTS}")  # noqa: T201 - shown where the test fails
    with Ground(shared_server(shared_servers, kind).url) as ground:
        machine = seed(SEED + SERVERS.index(kind))(type("Queues", (Queues,), {"ground": ground}))
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=RUNS,
                stateful_step_count=ACTS,
                deadline=None,
                database=None,
                phases=(Phase.generate, Phase.shrink),
                suppress_health_check=list(HealthCheck),
                verbosity=Verbosity.normal,
            ),
        )
