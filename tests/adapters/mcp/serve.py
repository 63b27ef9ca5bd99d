"""Program that serves the app of the conformance suite, with a worker: `python -m tests.adapters.mcp.serve TOKENS`.

It prints its port. The suite sends no token, so each request gets one here. Everything behind that is what
`perdure mcp --http` serves.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path
from typing import Any

from perdure import Worker
from perdure.integrations.mcp import ToolServerOptions, http_application
from perdure.worker.web.server import make_server
from perdure.worker.web.users import Role, TokenFile, add_token

from .everything import SELECTION, app


async def main(tokens: Path) -> None:
    token = add_token(tokens, "suite", [Role.PRODUCER, Role.APPROVER])
    application = http_application(app, TokenFile(tokens), ToolServerOptions(selection=SELECTION, app=app.name))

    async def with_token(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            scope["headers"] = [*scope["headers"], (b"authorization", f"Bearer {token}".encode())]
        await application(scope, receive, send)

    listener = socket.create_server(("127.0.0.1", 0))
    server = make_server(with_token, "127.0.0.1", listener.getsockname()[1])
    async with Worker(app, concurrency=32) as worker:
        running = asyncio.create_task(worker.run())
        print(listener.getsockname()[1], flush=True)
        await server.serve(sockets=[listener])
        running.cancel()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
