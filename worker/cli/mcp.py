"""`perdure mcp`: tasks as tools of an MCP server."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import anyio
import typer

from ...queues.errors import ConfigurationError
from ..app import App
from ..integrations.extra import check_package
from .dashboard import user_name
from .support.connection import ConnectionOptions
from .support.errors import Failed, Misuse
from .support.options import in_duration
from .support.runner import command
from .web import Host, Port, RootPath, TokensFile, open_source, serve


@command
def mcp(
    place: ConnectionOptions,
    application: Annotated[
        str | None,
        typer.Argument(
            metavar="[APP]",
            help="Serve the tasks of this app only: module:attribute or path/to/file.py:attribute. Without it, those "
            "of all apps whose workers have published them.",
            show_default=False,
        ),
    ] = None,
    *,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="PATTERN", help="Serve these tasks only, such as report-*. Repeat it."),
    ] = None,
    tools: Annotated[
        Path | None,
        typer.Option("--tools", metavar="FILE", help="TOML file with a table of options for each task to serve."),
    ] = None,
    role: Annotated[
        list[str] | None,
        typer.Option(
            "--role",
            metavar="ROLE",
            help="Role of the client on stdin: producer, viewer, operator, approver. Repeat it. Default: producer and "
            "approver.",
            show_default=False,
        ),
    ] = None,
    http: Annotated[bool, typer.Option("--http", help="Serve streamable HTTP at /mcp in place of stdin.")] = False,
    host: Host = "127.0.0.1",
    port: Port = 8767,
    tokens: TokensFile = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-host",
            metavar="NAME",
            help="Name by which clients may reach it, such as mcp.example.com. Repeat it. Names of this machine are "
            "allowed.",
            show_default=False,
        ),
    ] = None,
    root_path: RootPath = "",
    result_ttl: Annotated[
        float, in_duration("Time for which the outcome of a call is kept. Default: 1d.", positive=True)
    ] = 86_400.0,
    patience: Annotated[
        float,
        in_duration("Time for which a call of a client without MCP tasks waits for the result. Default: 5m."),
    ] = 300.0,
    max_result: Annotated[
        int, typer.Option("--max-result", min=1024, metavar="BYTES", help="Largest result that a call returns.")
    ] = 256 * 1024,
) -> None:
    """Serve tasks as tools for MCP clients.

    A program that starts it speaks to it on stdin and stdout. With --http,
    clients send a token of 'perdure web token'. A call that takes longer
    becomes an MCP task, which continues when this server stops.

    Example: perdure mcp tasks.py:app
    """
    try:
        check_package("perdure mcp", "mcp", extra="mcp")
    except ConfigurationError as error:
        raise Failed(str(error)) from None
    from ..integrations.mcp.mcp_transports import http_application, serve_stdio
    from ..integrations.mcp.tool_list import read_selection
    from ..integrations.mcp.tool_server import ToolServerOptions
    from ..web.users import Role, TokenFile, User

    source = open_source(place, application)
    options = ToolServerOptions(
        selection=read_selection(tools, only or ()),
        result_ttl=round(result_ttl),
        patience=patience,
        max_result=max_result,
        app=source.name if isinstance(source, App) else None,
    )
    if http:
        if tokens is None:
            raise Misuse("--tokens must name a file: perdure web token NAME --role producer --tokens tokens.toml")
        if role:
            raise Misuse("--role must be without --http: the token of a client has its roles")
        hosts = allow_host or (() if host in ("127.0.0.1", "localhost", "::1") else None)
        made = http_application(source, TokenFile(tokens), options, hosts=hosts)
        serve("MCP server", made, host, port, root_path)
        return
    if unknown := sorted(set(role or ()) - set(Role)):
        raise Misuse(f"--role must be one of {', '.join(Role)}, got {unknown[0]!r}")
    user = User(user_name(), role or [Role.PRODUCER, Role.APPROVER])
    anyio.run(partial(serve_stdio, source, user, options))
