"""The API as an ASGI application, on its own or mounted under any path of another application."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ...queues.security.approvers import read_approver_keys
from . import operations
from .answer_page import answer_routes
from .binding import problem_response, routes
from .openapi import document
from .problems import Problem
from .service import MAX_BODY, Service
from .users import TokenFile

if TYPE_CHECKING:
    from ...queues.producer import Producer
    from ..app import App
    from .service import Authenticate


def load_operations() -> None:
    """Import all modules of operations, which register what they define."""
    for module in pkgutil.iter_modules(operations.__path__):
        importlib.import_module(f"{operations.__name__}.{module.name}")


def router(
    app: App | Producer,
    *,
    tokens: str | Path | None = None,
    authenticate: Authenticate | None = None,
    secret: bytes = b"",
    max_body: int = MAX_BODY,
    approver_keys: str | Path | None = None,
) -> Starlette:
    """Return the API as an ASGI application.

    It works under any path: `api.mount("/perdure", router(app, tokens="tokens.toml"))`. A server of its own opens the
    app; an application that mounts the router opens it in its lifespan: `async with app: yield`.

    Args:
        app: The app, or an open producer.
        tokens: Token file; `perdure web token` writes one.
        authenticate: Returns the `User` of a request, or None, in place of tokens. It may be async.
        secret: Key of answer links, at least 32 random bytes. Default: no links.
        max_body: Largest body of a request in bytes.
        approver_keys: File of the private keys that sign the answers of users, by their names.

    Raises:
        ConfigurationError: Neither or both of `tokens` and `authenticate` are given, or the file cannot be read.
    """
    known = TokenFile(Path(tokens)) if tokens is not None else None
    keys = {} if approver_keys is None else read_approver_keys(Path(approver_keys))
    return application(Service(app, known, authenticate, secret, max_body, keys))


def application(service: Service) -> Starlette:
    """Return the API of a service as an ASGI application."""
    load_operations()

    async def openapi(request: Request) -> Response:
        return JSONResponse(document(version("perdure"), request.scope.get("root_path", "").rstrip("/")))

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with service.open():
            yield

    found = Starlette(
        routes=[Route("/openapi.json", openapi), *answer_routes(service), *routes(service)],
        exception_handlers={HTTPException: _not_routed},
        lifespan=lifespan,
    )
    found.router.redirect_slashes = False
    return found


async def _not_routed(request: Request, error: Any) -> Response:
    path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
    if error.status_code == 405:
        allowed = error.headers.get("Allow", "") if error.headers else ""
        return problem_response(
            Problem(
                405, "method", f"{path} takes {allowed or 'other methods'}, got {request.method}", headers=error.headers
            )
        )
    return problem_response(Problem(error.status_code, "no-such-path", f"there is no {path}; see openapi.json"))
