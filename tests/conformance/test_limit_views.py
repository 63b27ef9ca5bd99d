"""Limits as operators see them: counts of holders and of what waits, over queues and partitions, on every server."""

from __future__ import annotations

import pytest
from perdure.queues import Gateway, Namespace, set_partitions
from perdure.queues.limit_views import list_limits, show_limit, waiting_for
from perdure.queues.limits.definition import Breaker, Limit

from tests.support.limited_tasks import admit, enqueue, publish, use

pytestmark = pytest.mark.integration

PAGES = Limit("pages", total=2, running=1, by="tenant", rate="10/s", burst=3)
CHAT = Limit("chat", running=1, by="session", ordered=True)
CRM = Limit("crm", total=5, breaker=Breaker())


async def test_tasks_that_wait_are_counted_over_all_partitions(gateway: Gateway, namespace: Namespace) -> None:
    await set_partitions(gateway, namespace, "default", 4)
    await publish(gateway, namespace, PAGES, CRM)
    for tenant in range(6):
        await enqueue(gateway, namespace, [use(PAGES, tenant)], *(f"t{tenant}-{number}" for number in range(3)))
    crm, pages = await list_limits(gateway, namespace)
    assert (pages.name, pages.in_use, pages.waiting, pages.more) == ("pages", 0, 18, False)
    assert (pages.rate, crm.rate, crm.breaker) == ("10/s (burst 3)", None, "closed")
    details = await show_limit(gateway, namespace, "pages")
    assert details is not None
    assert details.queues == {"default": 18}
    assert sum(key.tasks for key in details.waiting) == 18
    assert len({key.partition for key in details.waiting}) > 1
    assert {key.hint.split("/")[0] for key in details.waiting} == {"default"}
    assert [key.since for key in details.waiting] == sorted(key.since for key in details.waiting)


async def test_a_task_of_several_limits_waits_for_each(gateway: Gateway, namespace: Namespace) -> None:
    await publish(gateway, namespace, PAGES, CRM)
    await enqueue(gateway, namespace, [use(CRM), use(PAGES, "a")], "t1")
    found = await waiting_for(gateway, namespace, ["pages", "crm", "other"], most=5)
    assert {name: sum(waiting.tasks.values()) for name, waiting in found.items()} == {"pages": 1, "crm": 1, "other": 0}
    [key] = found["pages"].keys
    assert key.key_of("pages") == use(PAGES, "a").key
    assert key.key_of("crm") == "-"


async def test_tasks_that_hold_are_shown_with_their_queue_and_those_of_an_ordered_key_wait_without_the_first(
    gateway: Gateway, namespace: Namespace
) -> None:
    await publish(gateway, namespace, CHAT)
    [partition, *_] = await enqueue(gateway, namespace, [use(CHAT, "s1")], "t1", "t2", "t3")
    assert (await admit(gateway, partition)).number == 1
    details = await show_limit(gateway, namespace, "chat")
    assert details is not None
    [holder] = details.holders
    assert (holder.task_id, holder.queue) == ("t1", "default")
    assert 0 < holder.seconds <= 30
    [key] = details.waiting
    assert (key.task_id, key.tasks, details.status.waiting) == ("t2", 2, 2)


async def test_a_limit_that_is_neither_published_nor_used_is_not_shown(gateway: Gateway, namespace: Namespace) -> None:
    assert await show_limit(gateway, namespace, "none") is None
    assert await list_limits(gateway, namespace) == []
    await enqueue(gateway, namespace, [use(CRM)], "t1")
    details = await show_limit(gateway, namespace, "crm")
    assert details is not None
    assert "no worker has published it" in details.status.problem
