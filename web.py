"""HTTP API and dashboard of a deployment, as ASGI applications. They need the extra `web`."""

from .worker.dashboard.application import dashboard
from .worker.web.router import router
from .worker.web.users import Role, User

__all__ = ["Role", "User", "dashboard", "router"]
