"""Clients of the tests: the SDK's, with the tasks extension as SEP-2663 has it, and a server in the same process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Any, Literal

from mcp import Client
from mcp.client import ClientExtension, ResultClaim
from mcp_types import ElicitResult, Request, RequestParams, Result
from perdure import App
from perdure.integrations.mcp import ToolServerOptions
from perdure.worker.integrations.mcp.mcp_transports import open_source
from perdure.worker.integrations.mcp.tool_server import ToolServer
from perdure.worker.web.operation import Call
from perdure.worker.web.users import Role, User

BOTH = (Role.PRODUCER, Role.APPROVER)


class Created(Result):
    result_type: Literal["task"] = "task"
    task_id: str
    status: str
    ttl_ms: int


class TaskParams(RequestParams):
    task_id: str
    input_responses: dict[str, Any] | None = None


class TaskRequest(Request[TaskParams, str]):
    name_param = "taskId"


class Answer(Result):
    status: str | None = None
    result: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    input_requests: dict[str, Any] | None = None


class Tasks(ClientExtension):
    identifier = "io.modelcontextprotocol/tasks"

    def claims(self) -> list[ResultClaim[Any]]:
        return [ResultClaim(result_type="task", model=Created, resolve=unresolved)]


async def unresolved(created: Any, context: Any) -> Any:
    raise AssertionError("the tests follow tasks themselves")


async def leave_open(context: Any, params: Any) -> ElicitResult:
    return ElicitResult(action="cancel")


class TestClient:
    """A client that follows MCP tasks itself."""

    __test__ = False

    def __init__(self, client: Client) -> None:
        self.client = client

    async def call(self, tool: str, /, *, key: str | None = None, **arguments: Any) -> Any:
        meta: Any = {"perdure/idempotency-key": key} if key else None
        return await self.client.session.call_tool(
            tool, arguments, meta=meta, allow_input_required=True, allow_claimed=True
        )

    async def task(self, method: str, task_id: str, **responses: Any) -> Answer:
        given = TaskParams(task_id=task_id, input_responses=responses or None)
        return await self.client.session.send_request(TaskRequest(method=f"tasks/{method}", params=given), Answer)

    async def until(self, task_id: str, *statuses: str) -> Answer:
        """Ask for a task until it has one of the statuses; the time-out of the test ends it."""
        while (found := await self.task("get", task_id)).status not in statuses:  # noqa: ASYNC110
            await asyncio.sleep(0.1)  # a client looks again and again: it gets no notification
        return found


@asynccontextmanager
async def connected(server: Any, *, tasks: bool = True, elicits: Any = leave_open) -> AsyncIterator[TestClient]:
    """Connect to a server: of the SDK, a command on stdin, or a URL."""
    client = Client(server, extensions=[Tasks()] if tasks else None, elicitation_callback=elicits)
    async with client:
        yield TestClient(client)


@asynccontextmanager
async def in_process(app: App, *, roles: Collection[Role] = BOTH, **options: Any) -> AsyncIterator[Any]:
    """Serve an app, without a worker, for a client in this process."""
    user = User("tester", roles)
    async with open_source(app) as producer:
        chosen = ToolServerOptions(**{"app": app.name, **options})
        yield ToolServer(lambda user: Call(user, producer), lambda _: user, chosen).server(name="test", version="1")
