"""`python -m benchmarks.observability`: what metrics and traces cost per task and per step.

One process enqueues tasks and works them off, in turns without anything, with metrics, with traces, and with both. The
tracer is that of OpenTelemetry's SDK with its batch processor; the exporter drops the spans, so the cost is that of
making them. Sampled: one trace of a hundred is recorded. Each figure is CPU time of the process, which other load of
the machine disturbs less than elapsed time; the rates are printed, too. Garbage is collected before each round, and
each kind has its turn in each round.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final

import hiredis
import redis
import typer
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, Sampler, TraceIdRatioBased
from perdure import Context, PerdureError, Worker
from perdure.otel import Tracing
from perdure.worker.log import configure_logging

from .support.deployment import Deployment
from .support.machine import origin_line, run
from .support.server import NoServer, own_server, server_line

_CONCURRENCY: Final = 32
_STEPS: Final = 10


@dataclass(frozen=True, slots=True)
class Kind:
    """Set-up that is measured. sampler: None without traces."""

    text: str
    metrics: bool = False
    sampler: Sampler | None = None


KINDS: Final = (
    Kind("nothing"),
    Kind("metrics", metrics=True),
    Kind("traces", sampler=ALWAYS_ON),
    Kind("traces, 1 of 100 sampled", sampler=TraceIdRatioBased(0.01)),
    Kind("metrics and traces", metrics=True, sampler=ALWAYS_ON),
)


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of one round. cpu: microseconds of the process per task or step. rate: per second."""

    cpu: float
    rate: float


class _Dropped(SpanExporter):
    """Drops what it gets."""

    def export(self, _spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return SpanExportResult.SUCCESS


async def _cost(deployment: Deployment, kind: Kind, count: int, steps: int) -> Cost:
    """Return the cost of a no-op task, or of a step if the tasks have some."""
    provider = None if kind.sampler is None else TracerProvider(kind.sampler, shutdown_on_exit=False)
    if provider is not None:
        provider.add_span_processor(BatchSpanProcessor(_Dropped(), max_queue_size=100_000))
    app = deployment.app(*([] if provider is None else [Tracing(provider)]))

    @app.task(queue="bench")
    async def work(ctx: Context, number: int) -> int:
        for _ in range(steps):
            number = await ctx.step("add", _add, number)
        return number

    async with app:
        await work.enqueue_many({"number": number} for number in range(count))
        gc.collect()
        async with Worker(app, concurrency=_CONCURRENCY, metrics=kind.metrics) as worker:
            began, cpu = time.perf_counter(), time.process_time()
            await worker.run(burst=True)
            spent, took = time.process_time() - cpu, time.perf_counter() - began
    if provider is not None:
        provider.shutdown()
    parts = count * max(1, steps)
    return Cost(spent / parts * 1e6, parts / took)


def _add(number: int) -> int:
    return number + 1


async def costs(deployment: Deployment, count: int, steps: int, rounds: int) -> dict[Kind, list[Cost]]:
    """Return the costs of each kind, measured in turns."""
    found: dict[Kind, list[Cost]] = {kind: [] for kind in KINDS}
    for number in range(rounds):
        for at, (kind, measured) in enumerate(found.items()):
            here = deployment.within(f"{at}-{steps}-{number}")
            measured.append(await _cost(here, kind, count, steps))
            here.purge()
    return found


def main(
    tasks: Annotated[int, typer.Option(help="No-op tasks of a round; a tenth of them have ten steps each.")] = 20_000,
    rounds: Annotated[int, typer.Option(help="Rounds, in each of which each kind has its turn.")] = 7,
    quick: Annotated[bool, typer.Option("--quick", help="Few tasks, to try the program.")] = False,
) -> None:
    """Measure what metrics and traces cost, as ratios to a run without them."""
    configure_logging("ERROR")
    if quick:
        tasks, rounds = 200, 1
    try:
        with own_server(fsync=False) as deployment:
            print(origin_line(server_line(deployment)))
            run(costs(deployment.within("warm"), tasks // 10, 1, 1))
            _show("no-op task", run(costs(deployment.within("noop"), tasks, 0, rounds)))
            _show("durable step", run(costs(deployment.within("steps"), tasks // _STEPS, _STEPS, rounds)))
    except (NoServer, PerdureError, redis.RedisError, hiredis.HiredisError) as error:
        print(f"could not measure: {error}", file=sys.stderr)
        raise typer.Exit(1) from error


def _show(what: str, found: dict[Kind, list[Cost]]) -> None:
    """Print the least of the rounds, which other load of the machine disturbs least, and its ratio to nothing."""
    print(f"\n{what}, with {'':<26} CPU     ratio   rate")
    plain = min(cost.cpu for cost in found[KINDS[0]])
    for kind, measured in found.items():
        cpu, rate = min(cost.cpu for cost in measured), max(cost.rate for cost in measured)
        print(f"  {kind.text:<36} {cpu:6.1f} us  {cpu / plain:5.2f}  {rate:8,.0f}/s")


if __name__ == "__main__":
    typer.run(main)
