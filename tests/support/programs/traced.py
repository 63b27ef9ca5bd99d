"""A worker that traces its tasks, and writes each span that ends to the journal."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import anyio
import orjson

sys.path.insert(0, str(Path(__file__).parents[3]))

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from perdure import App, Context, Worker
from perdure.otel import Tracing

JOURNAL = os.open(os.environ["JOURNAL"], os.O_APPEND | os.O_WRONLY)


def note(what: str, key: str) -> None:
    os.write(JOURNAL, f"{os.getpid()} {what} {key}\n".encode())


class Journal(SpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        for span in spans:
            assert span.context is not None
            links = {
                str((link.attributes or {})["perdure.link"]): f"{link.context.trace_id:032x}" for link in span.links
            }
            found = {"name": span.name, "trace": f"{span.context.trace_id:032x}", "links": links}
            note("span", orjson.dumps(found).decode().replace(" ", "_"))
        return SpanExportResult.SUCCESS


provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(Journal()))
app = App("traced", middleware=[Tracing(provider)])


async def wait_for(file: str) -> None:
    note("waits", "file")
    while not await anyio.Path(file).exists():  # noqa: ASYNC110 - a file has no event
        await anyio.sleep(0.005)


@app.task
async def charge(ctx: Context, file: str) -> None:
    await ctx.step("look up", lambda: 1)
    await ctx.step("pay", wait_for, file)


@app.task
async def plain(ctx: Context, file: str) -> None:
    """Records nothing."""
    await wait_for(file)


async def main() -> None:
    async with Worker(app, concurrency=int(sys.argv[1])) as worker:
        sys.stdout.write(f"{worker.id}\n")
        sys.stdout.flush()
        await worker.run()


if __name__ == "__main__":
    anyio.run(main)
