"""Pages: functions that read by operations and return HTML, and the request that each gets.

@page("/queues/{queue}", title="Queue", nav="Queues")
async def queue(request: PageRequest) -> Html:
    found = await show_queue(request.call, request.inputs(OneQueue, **request.path))
    return request.render("queue.html", queue=found)
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, TypeVar, get_args, get_origin
from urllib.parse import quote, urlencode

from pydantic import BaseModel, ValidationError
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response

from ...queues.errors import ConfigurationError
from ..web.operation import Call, knows_tenants
from ..web.problems import ProblemError, message_of
from ..web.users import Role, User
from .rendering import render

NAVIGATION: Final = (
    "Overview",
    "Tasks",
    "Dead letters",
    "Questions",
    "Sessions",
    "Queues",
    "Limits",
    "Schedules",
    "Workers",
    "Budgets",
    "Jobs",
)
"""Entries of the navigation in their order. An entry leads to the first page that names it and takes no parameters."""

M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Html:
    """HTML of a page."""

    text: str
    status: int = 200


@dataclass(frozen=True, slots=True)
class Notice:
    """Message that the next page shows once."""

    text: str
    failed: bool = False


Run = Callable[["PageRequest"], Awaitable[Html | Response]]


@dataclass(frozen=True, slots=True)
class Page:
    """A page; see the module.

    Attributes:
        name: Name of its function, by which links name it.
        nav: Entry of the navigation that is marked while it is shown.
        roles: One of them is needed.
        live: Whether it is updated while it is shown.
        changes: Whether it is the form of an action.
    """

    name: str
    path: str
    title: str
    nav: str
    roles: Sequence[Role]
    live: bool
    changes: bool
    run: Run = field(repr=False)


PAGES: dict[str, Page] = {}
"""All pages by name."""


def page(
    path: str, *, title: str, nav: str = "", roles: Sequence[Role] = (Role.VIEWER,), live: bool = True
) -> Callable[[Run], Run]:
    """Make a page of an async function.

    Args:
        path: Path below the dashboard. A parameter such as `{task_id}` matches one part, `{key:path}` several.
        title: Title of the window, and heading unless the template has another.
        nav: Entry of `NAVIGATION`.
        live: Whether what the template has in its block `live` is updated while it is shown.
    """

    def make(run: Run) -> Run:
        register(Page(run.__name__, path, title, nav, tuple(roles), live, False, run))
        return run

    return make


def register(made: Page) -> None:
    """Add a page. Raises `ConfigurationError` if its name or path is taken, or its navigation is unknown."""
    if made.nav and made.nav not in NAVIGATION:
        raise ConfigurationError(f"nav of page {made.name!r} must be one of {', '.join(NAVIGATION)}, got {made.nav!r}")
    if made.name in PAGES or any(known.path == made.path for known in PAGES.values()):
        raise ConfigurationError(f"page {made.name!r} must have a name and a path of its own: {made.path}")
    PAGES[made.name] = made


@dataclass(frozen=True)
class PageRequest:
    """Request of a page by a signed-in user.

    Attributes:
        call: Passed to operations.
        page: The requested page.
        actions: Whether the dashboard lets users change anything.
        now: Time of Redis in milliseconds, None while it cannot be read.
        notice: Message to show once.
        problems: Inputs of the query that were not valid, and were left out; the page lists them.
        paused: Whether the user has paused updates.
        signs_out: Whether the user has signed in here, and so can sign out.
    """

    request: Request = field(repr=False)
    call: Call = field(repr=False)
    page: Page
    actions: bool = False
    now: int | None = None
    notice: Notice | None = None
    paused: bool = False
    signs_out: bool = False
    problems: list[ProblemError] = field(default_factory=list)

    @property
    def user(self) -> User:
        """The signed-in user."""
        return self.call.user

    @property
    def path(self) -> dict[str, str]:
        """Parameters of the path."""
        return dict(self.request.path_params)

    @cached_property
    def query(self) -> dict[str, list[str]]:
        """Parameters of the query that are not empty."""
        found: dict[str, list[str]] = {}
        for name, value in self.request.query_params.multi_items():
            if value:
                found.setdefault(name, []).append(value)
        return found

    def inputs(self, model: type[M], /, **fixed: Any) -> M:
        """Return inputs of an operation from the query.

        Values that are not valid are left out, so that the page shows what the others select, and lists the problem.

        Args:
            fixed: Inputs that the query cannot set, such as those of the path.

        Raises:
            ValidationError: A required input, or one of `fixed`, is missing or not valid.
        """
        given: dict[str, Any] = {}
        for name, info in model.model_fields.items():
            if name in self.query:
                values = self.query[name]
                given[name] = values if _takes_list(info.annotation) else values[-1]
        try:
            return model.model_validate(given | fixed)
        except ValidationError as error:
            for found in error.errors(include_url=False, include_context=False, include_input=False):
                where = str(found["loc"][0]) if found["loc"] else ""
                if where in given and where not in fixed:
                    given.pop(where)
                    self.problems.append(ProblemError(where=where, message=message_of(found)))
        return model.model_validate(given | fixed)

    def render(self, template: str, /, status: int = 200, **values: Any) -> Html:
        """Return a page from a template, which also has `request`, `url` and `now`."""
        values |= {"request": self, "url": self.url, "now": self.now}
        return Html(render(template, self.root, values), status)

    @property
    def root(self) -> str:
        """Path under which the dashboard is served, without a slash at the end."""
        return root_of(self.request)

    def url(self, name: str, /, query: Mapping[str, Any] | None = None, **path: Any) -> str:
        """Return the path of a page.

        Args:
            name: Name of the page, which is that of its function.
            query: Parameters of the query; None and empty ones are left out.
            path: Parameters of its path.
        """
        found = PAGES[name].path
        for key, value in path.items():
            found = found.replace(f"{{{key}}}", quote(str(value), safe=""))
            found = found.replace(f"{{{key}:path}}", quote(str(value), safe="/"))
        return f"{self.root}{found}{_query(query or {})}"

    def here(self, **changed: Any) -> str:
        """Return the path of this page with some parameters of the query changed; None removes one."""
        return f"{self.root}{self._inner_path}{_query(dict(self.query) | changed)}"

    @property
    def inner_here(self) -> str:
        """Path of this page and its query, below that of the dashboard."""
        return f"{self._inner_path}{_query(self.query)}"

    @property
    def bare(self) -> str:
        """Path of this page without a query."""
        return f"{self.root}{self._inner_path}"

    def may(self, name: str) -> bool:
        """Return whether the user can open a page; of an action, whether it can be taken."""
        known = PAGES[name]
        scoped = self.call.producer.namespace.tenant is not None and not knows_tenants(known.path)
        return not scoped and (self.actions or not known.changes) and self.user.may(*known.roles)

    @property
    def navigation(self) -> list[tuple[str, str, bool]]:
        """Entries of the navigation: title, path, and whether it is the one of this page."""
        first: dict[str, Page] = {}
        for known in PAGES.values():
            if known.nav and "{" not in known.path and not known.changes and self.may(known.name):
                first.setdefault(known.nav, known)
        return [(nav, self.url(first[nav].name), nav == self.page.nav) for nav in NAVIGATION if nav in first]

    @property
    def _inner_path(self) -> str:
        found = self.page.path
        for key, value in self.path.items():
            found = found.replace(f"{{{key}}}", quote(value, safe=""))
            found = found.replace(f"{{{key}:path}}", quote(value, safe="/"))
        return found


def root_of(request: HTTPConnection) -> str:
    """Return the path under which the dashboard is served, without a slash at the end."""
    return str(request.scope.get("root_path", "")).rstrip("/")


def _takes_list(annotation: Any) -> bool:
    kinds = [annotation, *get_args(annotation)]
    return any((get_origin(kind) or kind) in (list, tuple, set, frozenset) for kind in kinds)


def _query(values: Mapping[str, Any]) -> str:
    flat = {
        name: [
            str(value) for value in (given if isinstance(given, (list, tuple)) else [given]) if value not in (None, "")
        ]
        for name, given in values.items()
    }
    text = urlencode(flat, doseq=True)
    return f"?{text}" if text else ""
