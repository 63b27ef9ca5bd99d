"""Guards of the dashboard: headers, hosts, origins, sign-in, sessions, and the switch that makes it read-only."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from perdure import App
from perdure.queues import ConfigurationError
from perdure.web import Role, dashboard
from perdure.worker.web.users import add_token

from .conftest import HOST, SECRET, Visit, user_of


@asynccontextmanager
async def client(app: App, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Return a client of a dashboard that is served at the root."""
    site = dashboard(app, **({"secret": SECRET} | options))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(site), base_url="http://localhost:8766") as found:
        yield found


SAME = {"sec-fetch-site": "same-origin"}


async def test_pages_forbid_scripts_and_frames_of_others(visit: Visit) -> None:
    for response in (await visit("/", Role.VIEWER), await visit("/none", Role.VIEWER), await visit("/static/none.js")):
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'; script-src 'self'; style-src 'self';" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["referrer-policy"] == "same-origin"
    assert (await visit("/", Role.VIEWER)).headers["cache-control"] == "no-store"


async def test_static_files_are_kept_by_the_browser_until_they_change(visit: Visit) -> None:
    page = (await visit("/", Role.VIEWER)).text
    found = re.findall(r'(?:src|href)="(/sub/static/[^"]+)"', page)
    assert len(found) == 6
    for path in found:
        response = await visit(path)
        assert response.status_code == 200, path
        assert response.headers["cache-control"] == "public, max-age=31536000, immutable"


@pytest.mark.parametrize(
    "host", ["evil.example", "dashboard.test.evil.example", "", "a b", "[::1", "localhost.evil.example"]
)
async def test_a_request_for_another_host_is_refused(visit: Visit, host: str) -> None:
    for path in ("/", "/nowhere"):
        response = await visit(path, Role.ADMIN, host=host)
        assert response.status_code == 403
        assert "this address is not served as" in response.text
        assert "ada" not in response.text, "it shows nothing of the dashboard"


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:80", "127.0.0.1:8766", "[::1]:8766", "10.1.2.3", HOST.upper()]
)
async def test_names_of_this_machine_addresses_and_allowed_names_are_served(visit: Visit, host: str) -> None:
    assert (await visit("/", Role.ADMIN, host=host)).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site"},
        {"sec_fetch_site": "none"},
        {"sec_fetch_site": "cross-site", "origin": f"http://{HOST}"},
        {"sec_fetch_site": "same-origin, cross-site"},
        {"origin": "http://evil.example"},
        {"origin": f"http://{HOST}.evil.example"},
        {"origin": "null"},
        {"origin": f"http://{HOST}:81"},
        {"origin": ""},
        {},
    ],
    ids=str,
)
async def test_a_change_from_a_page_of_another_origin_is_refused(app: App, headers: dict[str, str]) -> None:
    async with client(app, authenticate=user_of, actions=True) as found:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        sent |= {"host": HOST, "x-user": "ada", "x-roles": "admin"}
        for path in ("/updates", "/sign-out", "/sign-in"):
            response = await found.post(path, headers=sent)
            assert response.status_code == 403, path
            assert "must come from a page of this dashboard" in response.text


@pytest.mark.parametrize("headers", [{"sec-fetch-site": "same-origin"}, {"origin": f"http://{HOST}"}], ids=str)
async def test_a_change_from_a_page_of_the_dashboard_is_let_through(app: App, headers: dict[str, str]) -> None:
    async with client(app, authenticate=user_of) as found:
        response = await found.post("/updates", headers={"host": HOST} | headers, data={"next": "/"})
        assert (response.status_code, response.headers["location"]) == (303, "/")


@pytest.fixture
def tokens(tmp_path: Path) -> Callable[..., tuple[Path, str]]:
    def make(*roles: Role, name: str = "ada") -> tuple[Path, str]:
        path = tmp_path / "tokens.toml"
        return path, add_token(path, name, roles)

    return make


async def test_a_user_signs_in_with_a_token_and_signs_out(app: App, tokens: Callable[..., tuple[Path, str]]) -> None:
    path, token = tokens(Role.VIEWER)
    async with client(app, tokens=path) as found:
        asked = await found.get("/?cursor=1")
        assert asked.headers["location"] == "/sign-in?next=%2F%3Fcursor%3D1"
        form = await found.get(asked.headers["location"])
        assert "Token" in form.text
        assert app.producer.namespace.name not in form.text, "it shows nothing of the deployment"
        signed = await found.post(asked.headers["location"], data={"token": f" {token}\n"}, headers=SAME)
        assert (signed.status_code, signed.headers["location"]) == (303, "/?cursor=1")
        cookie = signed.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        assert "Path=/" in cookie
        assert token not in cookie
        shown = await found.get("/")
        assert shown.status_code == 200
        assert "ada" in shown.text
        left = await found.post("/sign-out", headers=SAME)
        assert left.headers["location"] == "/sign-in"
        assert (await found.get("/")).status_code == 303


async def test_the_cookie_is_sent_over_tls_only_and_below_the_path_only(
    app: App, tokens: Callable[..., tuple[Path, str]]
) -> None:
    path, token = tokens(Role.VIEWER)
    site = dashboard(app, tokens=path, secret=SECRET)
    transport = httpx.ASGITransport(site, root_path="/fleet")
    async with httpx.AsyncClient(transport=transport, base_url="https://localhost") as found:
        signed = await found.post("/fleet/sign-in", data={"token": token}, headers=SAME)
        assert "; Path=/fleet;" in signed.headers["set-cookie"]
        assert "; Secure" in signed.headers["set-cookie"]


async def test_an_unknown_token_is_refused(app: App, tokens: Callable[..., tuple[Path, str]], log: list[str]) -> None:
    path, token = tokens(Role.VIEWER)
    async with client(app, tokens=path) as found:
        for wrong in (token[:-1], "", "perdure_" + "x" * 9_000, "\ud800".encode("utf-8", "surrogatepass").hex()):
            response = await found.post("/sign-in", data={"token": wrong}, headers=SAME)
            assert response.status_code == 403
            assert "This token is not known." in response.text
            assert "set-cookie" not in response.headers
        assert any("unknown token" in line for line in log)
        large = await found.post("/sign-in", data={"token": "x" * 20_000}, headers=SAME)
        assert large.status_code == 413


@pytest.mark.parametrize(
    "target", ["//evil.example", "/\\evil.example", "https://evil.example", "javascript:1", "/a\r\nb"]
)
async def test_a_sign_in_leads_to_no_other_host(app: App, tokens: Callable[..., tuple[Path, str]], target: str) -> None:
    path, token = tokens(Role.VIEWER)
    async with client(app, tokens=path) as found:
        response = await found.post("/sign-in", params={"next": target}, data={"token": token}, headers=SAME)
        assert response.headers["location"] == "/"


async def test_a_forged_or_foreign_cookie_is_no_session(app: App, tokens: Callable[..., tuple[Path, str]]) -> None:
    path, token = tokens(Role.VIEWER)
    async with client(app, tokens=path, secret=b"another secret of at least 32 bytes") as other:
        signed = await other.post("/sign-in", data={"token": token}, headers=SAME)
    foreign = signed.cookies["perdure-session"]
    async with client(app, tokens=path) as found:
        own = (await found.post("/sign-in", data={"token": token}, headers=SAME)).cookies["perdure-session"]
        notice = own.replace(own.partition(".")[0], "ImFiYyI")  # another value under the signature
        for forged in (foreign, notice, own[:-1], own[:-2] + "AA", "", "x" * 5_000, "a.b.c", "\x00"):
            found.cookies.set("perdure-session", forged)
            assert (await found.get("/")).status_code == 303, forged


async def test_a_removed_token_ends_its_sessions(app: App, tokens: Callable[..., tuple[Path, str]]) -> None:
    path, token = tokens(Role.VIEWER)
    async with client(app, tokens=path) as found:
        await found.post("/sign-in", data={"token": token}, headers=SAME)
        assert (await found.get("/")).status_code == 200
        path.write_text(
            path.read_text().replace('name = "ada"', 'name = "bob"').replace('sha256 = "', 'sha256 = "0')[:-3] + '"\n'
        )
        assert (await found.get("/")).status_code == 303


async def test_a_user_of_the_application_that_mounts_it_needs_no_sign_in(app: App) -> None:
    async with client(app, authenticate=user_of) as found:
        asked = await found.get("/")
        assert asked.status_code == 401
        assert "sign in to the application" in asked.text
        assert (await found.get("/sign-in")).status_code == 404


async def test_a_user_without_the_role_sees_no_page(visit: Visit) -> None:
    response = await visit("/", Role.PRODUCER)
    assert response.status_code == 403
    assert "must have the role viewer" in response.text


async def test_a_read_only_dashboard_takes_no_answers_by_links(app: App) -> None:
    for actions, shown in ((False, "there is no page /answer/x"), (True, "The link is not valid")):
        async with client(app, authenticate=user_of, actions=actions) as browser:
            response = await browser.post("/answer/x", headers=SAME)
        assert response.status_code == 404
        assert shown in response.text


async def test_a_dashboard_without_users_is_refused(app: App) -> None:
    with pytest.raises(ConfigurationError, match="must know its users"):
        dashboard(app)


async def test_unexpected_errors_show_nothing_of_the_data(
    app: App, visit: Visit, monkeypatch: pytest.MonkeyPatch, log: list[str]
) -> None:
    monkeypatch.setattr("perdure.worker.dashboard.pages.overview._ROWS", "the secret of the database")
    await app.producer.enqueue("a", {}, queue="files")
    response = await visit("/", Role.VIEWER)
    assert response.status_code == 500
    assert "its log has the traceback" in response.text
    assert "the secret" not in response.text
    assert any("GET /sub/ failed: TypeError" in line for line in log)
