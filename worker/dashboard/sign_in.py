"""Sign-in with a token, and the signed cookies of the session, of notices and of the pause switch.

The cookie of a session holds the hash of the token, signed. So a token that is removed from the token file ends its
sessions, and who reads the cookie cannot use the API.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from itsdangerous import BadSignature, URLSafeTimedSerializer
from starlette.requests import HTTPConnection
from starlette.responses import Response

from ..web.users import TokenFile, User, token_hash
from .page import Notice, PageRequest, root_of

SESSION_COOKIE: Final = "perdure-session"
NOTICE_COOKIE: Final = "perdure-notice"
PAUSE_COOKIE: Final = "perdure-updates"

_SESSION: Final = 12 * 3600
"""Seconds until a user must sign in again."""

_NOTICE: Final = 60
"""Seconds within which a notice must be shown."""

_MAX_NOTICE: Final = 1_000
"""Characters of a notice: cookies have 4 KiB."""


@dataclass(frozen=True, slots=True)
class SignedCookies:
    """Cookies with a signature, which no one without the secret can forge."""

    secret: bytes = field(repr=False)

    def _signer(self, name: str) -> URLSafeTimedSerializer:
        return URLSafeTimedSerializer(self.secret, salt=name)

    def write(self, response: Response, request: HTTPConnection, name: str, value: Any, age: int) -> None:
        """Set a cookie. value: plain data. age: seconds until it ends."""
        response.set_cookie(name, self._signer(name).dumps(value), max_age=age, **attributes(request))

    def read(self, request: HTTPConnection, name: str, age: int) -> Any:
        """Return the value of a cookie; None if it is missing, forged or too old."""
        try:
            return self._signer(name).loads(request.cookies.get(name, ""), max_age=age)
        except BadSignature:
            return None


def attributes(request: HTTPConnection) -> dict[str, Any]:
    """Return the attributes of the cookies of the dashboard."""
    return {
        "path": root_of(request) or "/",
        "httponly": True,
        "samesite": "strict",
        "secure": request.url.scheme in ("https", "wss"),
    }


@dataclass(frozen=True, slots=True)
class Sessions:
    """Sessions of users who have signed in with a token."""

    cookies: SignedCookies
    tokens: TokenFile

    def start(self, response: Response, request: HTTPConnection, token: str) -> User | None:
        """Start a session if the token is known. Return its user, or None."""
        token = token.strip()
        user = self.tokens.find(token)
        if user is not None:
            self.cookies.write(response, request, SESSION_COOKIE, token_hash(token), _SESSION)
        return user

    def user_of(self, request: HTTPConnection) -> User | None:
        """Return the signed-in user, with the roles that the token file gives now."""
        found = self.cookies.read(request, SESSION_COOKIE, _SESSION)
        return self.tokens.find_hash(found) if isinstance(found, str) else None


def end_session(response: Response, request: HTTPConnection) -> None:
    """Remove the cookie of a session."""
    response.delete_cookie(SESSION_COOKIE, **attributes(request))


@dataclass(frozen=True, slots=True)
class Notices:
    """Notices that the next page shows, in a cookie: a link of another site cannot make one."""

    cookies: SignedCookies

    def put(self, response: Response, request: PageRequest, notice: Notice) -> None:
        """Let the next page show a notice."""
        value = {"text": notice.text[:_MAX_NOTICE], "failed": notice.failed}
        self.cookies.write(response, request.request, NOTICE_COOKIE, value, _NOTICE)

    def take(self, request: HTTPConnection) -> Notice | None:
        """Return the notice to show."""
        found = self.cookies.read(request, NOTICE_COOKIE, _NOTICE)
        return Notice(str(found["text"]), bool(found["failed"])) if isinstance(found, Mapping) else None
