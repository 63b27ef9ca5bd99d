"""Dashboard of a deployment: pages that show and change what the operations of `worker/web` show and change.

    application.py  the ASGI application: `dashboard(app)`; routes, sign-in, guards, pages of problems
    page.py         `@page`, `PageRequest`, `Html`: pages and what each gets
    actions.py      `@action`, `Action`, `FormField`: a page that says what will happen, and the request that does it
    rendering.py    templates, and filters of text, JSON, times, durations and sizes
    live.py         updates of a page while it is shown
    sign_in.py      sessions and notices in signed cookies
    pages/          the pages, one module per topic
    templates/      base.html for pages, shell.html for what comes before the sign-in, macros.html for parts
    static/         dashboard.css, dashboard.js, and libraries with their licences in vendor/

Rules for pages

- A page reads by operations only, so that roles, masks and audit lines are those of the API. `request.call` is passed
  to them, `request.inputs(Model)` makes their inputs of the query. A `Problem` may go through: it becomes a page.
- A page is bounded: 100 rows, and `pager(found.next, found.read, found.of)` below them.
- Nothing changes on GET. A change is an `@action`: a page that says exactly what will happen, and a POST.
  `action_link("name", "Text", ...)` links to it and shows nothing to a user who may not take it.
- Text needs no filter: it is escaped, and hidden characters are made visible. Never use `|safe` or `Markup` on data.
  Values of form fields use `|exact`, data uses `json_value`, times `|when`, durations in seconds `|lasting`, numbers
  `|number`, bytes `|size`. A link has a path of `url("page_name", task_id=...)` or of `request.here(...)`, never a text
  of Redis.
- The policy of the pages forbids scripts and styles in HTML, `style` attributes included: use classes, and for bars the
  attributes of SVG (`x`, `width`).
- Pages work without JavaScript. What changes while the page is shown goes into the block `live`, which is updated once
  a second at most; forms and filters go into `above` or `below`.
- One `h1` per page (`heading`), then `h2`. Each table has a caption (`table`), each field a label (`filter_field`,
  `form_field`). Colour alone says nothing (`state`).
- Import macros with context: `{% from "macros.html" import table, state with context %}`.

A page and its template

    @page("/workers", title="Workers", nav="Workers")
    async def workers(request: PageRequest) -> Html:
        return request.render("workers.html", found=await list_workers(request.call, NoInputs()))

    {% extends "base.html" %}
    {% from "macros.html" import table, state with context %}
    {% block live %}
    {% call table("Workers", ["Worker", "Status", ("Running", "number")], rows=found.workers, empty="No workers.") %}
    {% for one in found.workers %}
    <tr>
    <th scope="row"><a href="{{ url('worker', worker_id=one.worker.id) }}">{{ one.worker.id }}</a></th>
    <td>{{ state(one.worker.status) }}</td>
    <td class="number">{{ one.worker.in_flight|number }}</td>
    </tr>
    {% endfor %}
    {% endcall %}
    {% endblock %}
"""
