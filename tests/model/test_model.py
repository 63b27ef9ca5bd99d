"""The model test: Redis agrees with the model after acts in any order, repeated, and too late.

`make model` runs many more. MODEL_SEED (printed at the head of a run), MODEL_RUNS and MODEL_ACTS change what is run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from hashlib import sha1
from pathlib import Path
from typing import Any

import perdure
import pytest
from hypothesis import HealthCheck, Phase, Verbosity, seed, settings
from hypothesis.stateful import run_state_machine_as_test
from perdure.queues.delivery import checkpoint
from perdure.queues.transport import scripts
from perdure.queues.transport.scripts import Script, queue_script

from tests import model
from tests.conftest import ON_SERVERS, SERVERS, default_kind, shared_server
from tests.model.ground import Ground
from tests.model.ledger import HOUR
from tests.model.machine import PASTS, TASKS, Queues, Written
from tests.support.servers import RedisServer

pytestmark = pytest.mark.integration

SEED = int(os.environ.get("MODEL_SEED", "20261121"))
RUNS = int(os.environ.get("MODEL_RUNS", "12"))
ACTS = int(os.environ.get("MODEL_ACTS", "40"))


def entry(number: int) -> Written:
    return "done", f"s{number}", b"%d" % number, b"{}"


@pytest.fixture
def machine(shared_servers: dict[str, RedisServer]) -> Iterator[Queues]:
    with Ground(shared_server(shared_servers, default_kind()).url) as ground:
        machine = type("Queues", (Queues,), {"ground": ground})()
        yield machine
        machine.teardown()


def write_after_a_loss(machine: Queues, *, kept: bool) -> int:
    """Lose the second and the third entry of a run, which then writes the fourth. Return the last entry's number."""
    machine.start(old=False, some=["t0"])
    machine.read("a", 1, heard=True)
    delivery, task = machine.deliveries[0]
    machine.write(delivery, task, [entry(1)])
    machine.take_copy()
    machine.write(delivery, task, [entry(2)])
    machine.write(delivery, task, [entry(3)])
    machine.lose_tail(kept)
    machine.is_as_expected()
    assert machine.last_entry(task) == 1
    machine.write(delivery, task, [entry(4)])
    return machine.last_entry(task)


def test_a_run_sends_again_what_redis_has_lost(machine: Queues) -> None:
    assert write_after_a_loss(machine, kept=True) == 4


def test_the_next_run_continues_before_what_redis_has_lost(machine: Queues) -> None:
    assert write_after_a_loss(machine, kept=False) == 1
    delivery, task = machine.deliveries[0]
    assert not machine.ledger.owned(delivery)
    machine.claim("b", 1, heard=True)
    again, _ = machine.deliveries[-1]
    machine.write(again, task, [entry(2)])
    assert machine.last_entry(task) == 2


@pytest.mark.parametrize("kept", [True, False])
def test_a_script_that_leaves_a_gap_is_found(machine: Queues, monkeypatch: pytest.MonkeyPatch, kept: bool) -> None:
    check = "if last < number - 1 then\n  return -1 - last\nend\n"
    source = queue_script("write_checkpoint").source
    assert check in source
    source = source.replace(check, "")
    broken = Script("write_checkpoint", source, sha1(source.encode(), usedforsecurity=False).hexdigest())
    monkeypatch.setattr(checkpoint, "_WRITE", broken)
    monkeypatch.setitem(scripts._loaded, Path("broken.lua"), broken)  # a server without it gets it
    with pytest.raises(AssertionError, match="expected: -2"):
        write_after_a_loss(machine, kept=kept)
    machine.sound = False  # Redis differs from the model, so the partition is not closed at the end


def test_large_arguments_copies_and_exports_agree_with_the_model(machine: Queues) -> None:
    """Sequences that random runs seldom reach: an upload without some chunks, repeated calls, a late export, and a
    replay with new arguments.
    """

    def act(name: str, *args: object, **kwargs: object) -> None:
        getattr(machine, name)(*args, **kwargs)
        machine.is_as_expected()

    machine.start(old=False, some=[])
    for missing in (True, False, False):
        act("enqueue_one", task="t0", delay=0, chunks=2, missing=missing)
        act("enqueue_one", task="t1", delay=HOUR, chunks=1, missing=missing)
    for lost in ("fields", "events", "chunk", "", ""):
        act("store_copy", task="t2", source="import 1", past=PASTS[2], chunks=2, lost=lost)
        act("store_copy", task="t3", source="one 1-0", past=PASTS[1], chunks=0, lost=lost)
    act("store_copy", task="t2", source="import 2", past=PASTS[2], chunks=0, lost="")
    changes: list[tuple[str, dict[str, Any]]] = [
        ("send", {"which": 3}),
        ("edit_checkpoint", {"behind": 0, "wakes": "x"}),
        ("look", {}),
    ]
    for change, given in changes:
        act("begin_export", task="t1")
        act(change, task="t1", **given)
        act("close_exported", 0, "late", HOUR)
    act("close_exported", 0, "late", HOUR)
    act("read", "a", 4, heard=True)
    act("close_exported", 0, "dead", HOUR)
    act("bury", 0, "mine", raw=False, counters=(1, 0), kept=HOUR)
    for task in TASKS:
        act("begin_export", task=task)
        act("dismiss", task=task)
        act("close_exported", 0, "late", HOUR)
        act("close_exported", 0, "as it is", HOUR)
    for missing in (True, False):
        act("reset", "t1", 2, missing, late=not missing)
    act("cancel", "t1", HOUR)
    act("reset", "t1", 1, missing=False, late=True)
    for raw in (False, True):
        act("forget_task", task="t0", stale=False)
        act("enqueue_one", task="t0", delay=0, chunks=2, missing=False)
        for edited in (False, True):
            act("read", "a", 4, heard=True)
            act("bury", 0, "mine", raw=raw, counters=(1, 0), kept=HOUR)
            act("replay", 0, fresh=False, edited=edited, late=False)
    machine.close(2)
    for task in TASKS:
        act("forget_task", task=task, stale=task != "t3")
        act("cancel", task, HOUR)
        act("expire", task)
        act("enqueue_one", task=task, delay=0, chunks=1, missing=False)
        act("store_copy", task=task, source="import 1", past=PASTS[2], chunks=1, lost="")
        act("reset", task, 1, missing=False, late=False)
        act("expire_uploads", task)


def test_each_script_has_a_rule_or_is_named_with_the_reason() -> None:
    rows = re.findall(r"^\| (\w+) \| (\w+) \|$", model.__doc__ or "", re.MULTILINE)[1:]
    others = {name for group in re.findall(r"\(([\w,\s]+)\)", model.__doc__ or "") for name in group.split()}
    named = [name for name, _ in rows] + [name.rstrip(",") for name in others]
    scripts = {path.stem for path in Path(perdure.__file__).parent.glob("*/lua/*.lua")}
    assert sorted(named) == sorted(
        scripts
        - {"bounded", "fence", "inbox", "joins", "on_end", "payload", "retention", "seen", "upload", "values", "waits"}
        - {"depth", "limited", "limits", "streams", "tag", "turns", "wake", "watched"}
    )
    assert [method for _, method in rows if not callable(getattr(Queues, method, None))] == []


@pytest.mark.parametrize("kind", ON_SERVERS)
def test_redis_agrees_with_the_model(shared_servers: dict[str, RedisServer], kind: str) -> None:
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
