"""Transports of the MCP server: stdio, and streamable HTTP as an ASGI application with bearer tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any, Final

from mcp.server.auth.middleware.auth_context import AuthContextMiddleware
from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser, BearerAuthBackend, RequireAuthMiddleware
from mcp.server.auth.provider import AccessToken
from mcp.server.context import ServerRequestContext
from mcp.server.stdio import stdio_server
from mcp.server.streamable_http_manager import StreamableHTTPASGIApp, StreamableHTTPSessionManager
from mcp.server.transport_security import TransportSecuritySettings
from mcp.shared.exceptions import MCPError
from mcp_types.jsonrpc import INVALID_REQUEST
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.authentication import AuthenticationMiddleware
from starlette.routing import Route

from ....queues.catalog import publish_entry
from ....queues.producer import Producer
from ...app import App
from ...web.operation import Call
from ...web.users import TokenFile, User
from .tool_server import ToolServer, ToolServerOptions

PATH: Final = "/mcp"
"""Path of the server."""

_LOCAL: Final = ("127.0.0.1", "localhost", "[::1]")


class TokenUsers:
    """Users of a token file, for the SDK."""

    def __init__(self, tokens: TokenFile) -> None:
        self._tokens = tokens

    async def verify_token(self, token: str) -> AccessToken | None:
        """Return the user of a token; None for one that is not known."""
        user = self._tokens.find(token)
        if user is None:
            return None
        return AccessToken(token="", client_id=user.name, subject=user.name, scopes=sorted(user.roles))


def _user_of_token(ctx: ServerRequestContext[Any, Any]) -> User:
    """Return the user whose token a request has."""
    user = ctx.request.scope.get("user") if ctx.request is not None else None
    if not isinstance(user, AuthenticatedUser):
        raise MCPError(INVALID_REQUEST, "the request needs a token: Authorization: Bearer TOKEN")
    return User(user.access_token.client_id, user.access_token.scopes)


async def serve_stdio(source: App | Producer, user: User, options: ToolServerOptions) -> None:
    """Serve a client on stdin and stdout until it closes them.

    Args:
        source: The app, whose tasks alone are served, or a producer for those of all apps; not open yet.
        user: The user of the client.
    """
    async with open_source(source) as producer:
        tools = ToolServer(lambda user: Call(user, producer), lambda _: user, options)
        server = tools.server(name="perdure", version=version("perdure"))
        async with stdio_server() as (read, write):
            await server.run(read, write, server.create_initialization_options())
        tools.stopping = True


def http_application(
    source: App | Producer, tokens: TokenFile, options: ToolServerOptions, *, hosts: Collection[str] | None = ()
) -> Starlette:
    """Return the ASGI application of the server, at `/mcp`; its lifespan opens the source.

    Args:
        tokens: Users by token.
        hosts: Names by which clients may reach it apart from those of this machine; None for any name. They keep pages
            of other sites out whose names point here (DNS rebinding).
    """
    opened: list[Producer] = []
    tools = ToolServer(lambda user: Call(user, opened[0]), _user_of_token, options)
    server = tools.server(name="perdure", version=version("perdure"))
    names = [*_LOCAL, *(hosts or ())]
    security = TransportSecuritySettings(
        enable_dns_rebinding_protection=hosts is not None,
        allowed_hosts=[*names, *(f"{name}:*" for name in names)],
        allowed_origins=[
            f"{scheme}://{name}{port}" for scheme in ("http", "https") for name in names for port in ("", ":*")
        ],
    )
    manager = StreamableHTTPSessionManager(server, security_settings=security)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with open_source(source) as producer:
            opened[:] = [producer]
            try:
                async with manager.run():
                    yield
                    tools.stopping = True  # what is cancelled now leaves its tasks running
            finally:
                tools.stopping = True

    return Starlette(
        routes=[Route(PATH, RequireAuthMiddleware(StreamableHTTPASGIApp(manager), []))],
        middleware=[
            Middleware(AuthenticationMiddleware, backend=BearerAuthBackend(TokenUsers(tokens))),
            Middleware(AuthContextMiddleware),
        ],
        lifespan=lifespan,
    )


@asynccontextmanager
async def open_source(source: App | Producer) -> AsyncIterator[Producer]:
    """Keep an app or a producer open. The tasks of an app are published, so that its tools are known at once."""
    async with source:
        if isinstance(source, Producer):
            yield source
            return
        producer = source.producer
        seconds, micros = await producer.gateway.command("TIME")
        entry = source.tasks.entry(source.name)
        await publish_entry(producer.gateway, producer.namespace, entry, int(seconds) * 1000 + int(micros) // 1000)
        yield producer
