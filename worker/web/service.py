"""The service behind the API and the dashboard: the open producer of a deployment, its users and its secret."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from starlette.requests import HTTPConnection

from ...queues.errors import ConfigurationError, NotOpen
from ...queues.producer import Producer
from ...queues.security.approvers import ApproverKey
from ..app import App
from .operation import Call
from .problems import Problem
from .users import TokenFile, User

Authenticate: TypeAlias = Callable[[HTTPConnection], User | Awaitable[User | None] | None]
"""Returns the user of a request, or None for a caller who must sign in."""

MAX_BODY: Final = 4 << 20
"""Bytes of a request body at most, unless `max_body` is another bound."""


MAX_REQUESTS: Final = 250
"""Requests of one user that run at the same time at most, open event streams included: a quarter of all that the server
takes, so that no user keeps the others out."""


@dataclass(slots=True)
class Service:
    """State that requests share.

    Args:
        source: The app, or a producer where the code of the app is not at hand.
        tokens: Users by token.
        authenticate: Finds the user of a request in place of `tokens`, for an application that knows its users.
        secret: Key of the signatures of cookies and answer links, at least 32 random bytes. Default: none, so links
            cannot be made.
        max_body: Largest body of a request in bytes.
        approver_keys: Private keys that sign the answers of users, by their names. Default: none, so users cannot
            answer where workers know approvers.
    """

    source: App | Producer
    tokens: TokenFile | None = None
    authenticate: Authenticate | None = None
    secret: bytes = field(default=b"", repr=False)
    max_body: int = MAX_BODY
    approver_keys: Mapping[str, ApproverKey] = field(default_factory=dict, repr=False)
    extras: dict[str, Any] = field(default_factory=dict, repr=False)
    """Values that requests share, such as the readers of event streams, by name of their module."""
    _running: Counter[str] = field(default_factory=Counter, repr=False)

    def __post_init__(self) -> None:
        if (self.tokens is None) == (self.authenticate is None):
            raise ConfigurationError(
                "the API must know its users: give tokens=, a token file, or authenticate=, a function that returns "
                "the User of a request"
            )

    @property
    def app(self) -> App | None:
        """The app, if the service has its code."""
        return self.source if isinstance(self.source, App) else None

    @property
    def producer(self) -> Producer:
        """The open producer. Raises `Problem` while the app is not open."""
        if isinstance(self.source, Producer):
            return self.source
        try:
            return self.source.producer
        except NotOpen:
            raise Problem(
                503,
                "app-not-open",
                f"app {self.source.name!r} is not open: enter it in the lifespan of the application that mounts the "
                "router: async with app: yield",
                source="server",
            ) from None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Keep the app or the producer open."""
        async with self.source:
            yield

    async def user_of(self, request: HTTPConnection) -> User | None:
        """Return the user of a request by its token or by the application; None if it has none.

        Raises:
            Problem: The token is not known.
        """
        if self.authenticate is not None:
            found = self.authenticate(request)
            return await found if inspect.isawaitable(found) else found
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or self.tokens is None:
            return None
        user = self.tokens.find(token.strip())
        if user is None:
            raise Problem(
                401,
                "unknown-token",
                "the token is not known: ask for one, 'perdure web token' makes it",
                headers={"WWW-Authenticate": 'Bearer error="invalid_token"'},
            )
        return user

    async def is_still(self, user: User, request: HTTPConnection) -> bool:
        """Return whether the token of a request is still one of the user, with the same roles; True without tokens."""
        if self.tokens is None:
            return True
        try:
            return (await self.user_of(request)) == user
        except Problem:
            return False

    @contextmanager
    def running(self, user: User) -> Iterator[None]:
        """Count a request of a user for as long as it runs."""
        self._running[user.name] += 1
        try:
            yield
        finally:
            self._running[user.name] -= 1
            if not self._running[user.name]:
                del self._running[user.name]

    def check_running(self, user: User) -> None:
        """Raise `Problem` if too many requests of a user run."""
        if self._running[user.name] >= MAX_REQUESTS:
            raise Problem(
                429,
                "too-many-requests",
                f"at most {MAX_REQUESTS} requests and event streams of user {user.name!r} may run at the same time: "
                "end some of them",
                headers={"Retry-After": "1"},
            )

    def call(self, user: User, base: str = "") -> Call:
        """Return a call by a user. base: URL of the API as the caller reaches it. Raises as `Call` does."""
        return Call(user, self.producer, self.app, self.secret, base, self.extras, self.approver_keys)
