"""HTTP API and dashboard of a deployment, as ASGI applications. They need the extra `web`."""

from .worker.web.extra import check_packages

check_packages("perdure.web")

from .worker.dashboard.application import dashboard  # noqa: E402 - a missing package is named before
from .worker.web.router import router  # noqa: E402
from .worker.web.users import Role, User  # noqa: E402

__all__ = ["Role", "User", "dashboard", "router"]
