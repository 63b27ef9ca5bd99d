"""The OpenAPI document against the API: generated requests to each operation find no failure of the server.

Requests come from the document, valid and not. The responses must have the status, the media type and the schema that
the document declares.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from perdure import App, Context
from perdure.web import Role
from perdure.worker.web.openapi import document
from perdure.worker.web.operation import OPERATIONS
from perdure.worker.web.router import application, load_operations
from perdure.worker.web.service import Service
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.support.workers import BOUND, work_off

from .conftest import SECRET, user_of

pytestmark = pytest.mark.integration

CHECKS: Final = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
EXAMPLES: Final = 3
"""Requests of each operation and kind, valid and not."""

VALUES: Final = {
    "task_id": {"enum": ["dead", "done", "later", "unknown"]},
    "wait": {"type": "number", "minimum": 0, "maximum": 0.001},
    "queue": {"enum": ["test", "other"]},
    "app": {"enum": ["test", "other"]},
    "stream": {"enum": ["output", "tokens"]},
}
"""Values of parameters that reach further than random ones."""

load_operations()
TAGS: Final = sorted({known.tag for known in OPERATIONS.values()})


def schema_of_requests() -> Any:
    """Return the document, with values of a deployment that has some tasks."""
    found = document("0.0.0")
    for operations in found["paths"].values():
        for operation in operations.values():
            for parameter in operation["parameters"]:
                parameter["schema"] = VALUES.get(parameter["name"], parameter["schema"])
                if parameter["name"] == "task_id" and "text/event-stream" in str(operation["responses"]):
                    parameter["schema"] = {"enum": ["dead", "done", "unknown"]}  # the others never end
    return schemathesis.openapi.from_dict(found)


SCHEMA: Final = schema_of_requests()


@pytest.fixture
async def client(app: App) -> Any:
    """Client of an admin; the deployment has a dead, a succeeded and a scheduled task."""

    @app.task
    async def work(ctx: Context, number: int = 0) -> int:
        await ctx.emit(number, to="output")
        await ctx.step("one", lambda: 1)
        if number == 0:
            raise ValueError("the printer is on fire")
        return number

    for number, task_id in enumerate(("dead", "done")):
        await work.options(max_attempts=1, task_id=task_id).enqueue(number)
    await work_off(app)
    await work.options(delay=60, task_id="later").enqueue(3)
    transport = httpx.ASGITransport(application(Service(app, authenticate=user_of, secret=SECRET)))
    headers = {"x-user": "ada", "x-roles": str(Role.ADMIN)}
    async with httpx.AsyncClient(transport=transport, base_url="http://api.test", headers=headers) as client:
        yield client


def cases_of(operation: Any, mode: GenerationMode) -> list[Any]:
    """Generate requests, the same in each run."""
    cases: list[Any] = []

    @seed(1)
    @settings(max_examples=EXAMPLES, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(operation.as_strategy(generation_mode=mode))
    def collect(case: Any) -> None:
        cases.append(case)

    collect()
    return cases


@pytest.mark.parametrize("tag", TAGS)
async def test_no_request_makes_the_server_fail(client: httpx.AsyncClient, tag: str) -> None:
    answers = 0
    for known in OPERATIONS.values():
        if known.tag == tag:
            for mode in GenerationMode:
                for case in cases_of(SCHEMA[known.path][known.method], mode):
                    case.validate_response(await answer_of(client, case), checks=CHECKS)
                    answers += 1
    assert answers >= EXAMPLES


async def answer_of(client: httpx.AsyncClient, case: Any) -> httpx.Response:
    given = case.as_transport_kwargs(base_url="http://api.test")
    sent = {key: given[key] for key in ("params", "json", "data", "content") if given.get(key) is not None}
    if isinstance(sent.get("data"), bytes | str):
        sent["content"] = sent.pop("data")
    headers = {name: value for name, value in (given.get("headers") or {}).items() if value.isascii()}
    request = client.build_request(given["method"], given["url"], headers=headers, **sent)
    async with asyncio.timeout(BOUND):
        return await client.send(request)
