"""A web service that starts a long job, shows its progress and returns its result.

    perdure worker run examples/web_job.py:app &
    python examples/web_job.py 8000 &
    curl --data '{"year": 2026}' localhost:8000/reports      # {"id": "..."}
    curl localhost:8000/reports/ID                           # {"state": "running", "done": 3, "total": 12, ...}

The service is synchronous, like Flask and Django; `enqueue_sync` works in any of its threads and processes. The same
POST with the same "id" starts no second job, so a client may repeat it if the answer was 503 or did not arrive.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from perdure import App, Context, State, TaskExists, TaskNotFound, Unavailable

MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
STATUS = {TaskExists: 409, TaskNotFound: 404, Unavailable: 503, ValueError: 400}  # ValueError: wrong JSON, argument, id

app = App("reports")


def total_of(year: int, month: int) -> int:
    """Return the sales of a month. A slow database is asked here."""
    time.sleep(float(os.environ.get("SECONDS_PER_MONTH", "1")))
    return year * 100 + month


@app.task(timeout=600)
async def report(ctx: Context, year: int) -> dict[str, int]:
    totals: dict[str, int] = {}
    for number, month in enumerate(MONTHS, 1):
        totals[month] = await ctx.step("month", total_of, year, number)  # recorded: a new worker continues here
        await ctx.progress(number, len(MONTHS), month)
    return totals


def create(body: Any) -> tuple[int, dict[str, Any]]:
    if not isinstance(body, dict) or "year" not in body:
        raise ValueError('the body must be a JSON object with "year"')
    return 202, {"id": report.options(task_id=body.get("id")).enqueue_sync(body["year"]).id}


def show(task_id: str) -> tuple[int, dict[str, Any]]:
    handle = app.sync().find(task_id)
    if handle is None:
        return 404, {"error": "no such report"}
    record = handle.record_sync()
    shown: dict[str, Any] = {"state": record.state}
    if record.state is State.SUCCEEDED:
        shown["result"] = handle.result_sync()
    elif progress := record.progress():
        shown |= {"done": progress.done, "total": progress.total, "note": progress.note}
    return 200, shown


class Reports(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.reply(lambda: create(json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))))

    def do_GET(self) -> None:
        self.reply(lambda: show(self.path.rpartition("/")[2]))

    def reply(self, act: Callable[[], tuple[int, dict[str, Any]]]) -> None:
        try:
            status, data = act()
        except Exception as error:  # noqa: BLE001 - every request is answered
            status = next((code for kind, code in STATUS.items() if isinstance(error, kind)), 500)
            data = {"error": str(error)}
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(data).encode() + b"\n")


if __name__ == "__main__":
    with ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Reports) as server:
        print(f"http://127.0.0.1:{server.server_port}/reports", flush=True)
        server.serve_forever()
