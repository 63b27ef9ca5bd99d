"""Fixtures of the API: a client per user, in the process of the test, over the app of the test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import TypeAlias

import httpx
import pytest
from perdure import App
from perdure.web import Role, User, router
from starlette.requests import HTTPConnection

SECRET = b"0123456789abcdef0123456789abcdef"

ClientOf: TypeAlias = Callable[..., httpx.AsyncClient]


def user_of(request: HTTPConnection) -> User | None:
    """Return the user that the test names in headers."""
    name = request.headers.get("x-user")
    tenant = request.headers.get("x-tenant")
    return None if name is None else User(name, request.headers["x-roles"].split(), tenant)


@pytest.fixture
async def client_of(app: App) -> AsyncIterator[ClientOf]:
    """`client_of(Role.VIEWER, name="ada")` returns a client of the API for a user of these roles."""
    transport = httpx.ASGITransport(router(app, authenticate=user_of, secret=SECRET))
    clients: list[httpx.AsyncClient] = []

    def make(*roles: Role, name: str = "ada", tenant: str | None = None) -> httpx.AsyncClient:
        headers = {"x-user": name, "x-roles": " ".join(roles)} if roles else {}
        headers |= {} if tenant is None else {"x-tenant": tenant}
        clients.append(httpx.AsyncClient(transport=transport, base_url="http://api.test", headers=headers))
        return clients[-1]

    yield make
    for client in clients:
        await client.aclose()


@pytest.fixture
def api(client_of: ClientOf) -> httpx.AsyncClient:
    """Client of an admin."""
    return client_of(Role.ADMIN)
