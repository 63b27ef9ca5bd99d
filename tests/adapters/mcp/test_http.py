"""The server over HTTP: tokens, and tasks of other users."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp import MCPError
from mcp.client.streamable_http import streamable_http_client
from perdure.integrations.mcp import ToolOptions, ToolSelection, ToolServerOptions, http_application
from perdure.worker.web.server import make_server
from perdure.worker.web.users import Role, TokenFile, add_token

from .apps import app
from .clients import connected

OPTIONS = ToolServerOptions(selection=ToolSelection(options={"pay": ToolOptions(wait=0)}), app="shop")


@asynccontextmanager
async def served(tokens: Path) -> AsyncIterator[str]:
    """Serve the app in this process; yield its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        server = make_server(http_application(app, TokenFile(tokens), OPTIONS), "127.0.0.1", port)
        running = asyncio.create_task(server.serve(sockets=[listener]))
        yield f"http://127.0.0.1:{port}/mcp"
        server.should_exit = True
        await running


def transport(url: str, token: str) -> Any:
    return streamable_http_client(url, http_client=httpx2.AsyncClient(headers={"Authorization": f"Bearer {token}"}))


async def test_request_without_a_token_is_refused(perdure: Any, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.toml"
    add_token(tokens, "ann", [Role.PRODUCER])
    async with served(tokens) as url, httpx2.AsyncClient() as client:
        for headers in ({}, {"Authorization": "Bearer perdure_other"}):
            answer = await client.post(url, headers=headers, json={})
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"].startswith("Bearer")


async def test_user_does_not_see_the_tasks_of_another_one(perdure: Any, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.toml"
    ann, bob = (
        add_token(tokens, name, [Role.PRODUCER, Role.APPROVER][:kind]) for name, kind in (("ann", 1), ("bob", 1))
    )
    async with served(tokens) as url:
        async with connected(transport(url, ann)) as client:
            task = (await client.call("pay", amount=1)).task_id
            assert (await client.task("get", task)).status == "working"
        async with connected(transport(url, bob)) as client:
            for method in ("get", "cancel"):
                with pytest.raises(MCPError, match="could not find task"):
                    await client.task(method, task)
