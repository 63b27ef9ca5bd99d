"""Pages for a user of a tenant."""

from __future__ import annotations

from perdure import App, Context
from perdure.web import Role
from perdure.worker.dashboard.application import load_pages
from perdure.worker.dashboard.page import PAGES
from perdure.worker.web.operation import knows_tenants

from tests.worker.dashboard.conftest import Visit


async def test_a_user_of_a_tenant_sees_its_tasks_and_no_page_about_the_deployment(visit: Visit, app: App) -> None:
    @app.task
    async def order(ctx: Context) -> None: ...

    for tenant in ("acme", "other"):
        await order.options(tenant=tenant, task_id="order-17").enqueue()
    front = await visit("/", Role.ADMIN, x_tenant="acme")
    assert (front.status_code, front.headers["location"]) == (303, "/sub/tasks")
    tasks = await visit("/tasks", Role.ADMIN, x_tenant="acme")
    assert tasks.status_code == 200
    assert "acme~order-17" in tasks.text and "other~order-17" not in tasks.text
    for link in ("/sub/queues", "/sub/limits", "/sub/jobs", "/sub/schedules", "/sub/task-jobs/cancel"):
        assert f'href="{link}' not in tasks.text, link
    assert (await visit("/tasks/acme~order-17", Role.ADMIN, x_tenant="acme")).status_code == 200
    assert (await visit("/tasks/other~order-17", Role.ADMIN, x_tenant="acme")).status_code == 404
    load_pages()
    closed = [page for page in PAGES.values() if not knows_tenants(page.path) and page.path != "/"]
    assert len(closed) > 20
    for page in closed:
        path = page.path.replace("{", "").replace("}", "")
        refused = await visit(path, Role.ADMIN, x_tenant="acme")
        assert refused.status_code == 403, page.path
        assert "about all tenants" in refused.text
