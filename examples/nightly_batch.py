"""A nightly batch: 500 items, 10 at a time, 20 a second, and a report, every night at 02:00 in Berlin.

perdure worker run examples/nightly_batch.py:app &
perdure schedule run nightly                         # one run now; the nights stay
perdure schedule list                                # the last run and the next one, with their tasks
perdure limit set shop --rate 50/s                   # for all workers, from now on
"""

from pathlib import Path

from perdure import App, ChildFailed, Context, Cron, Retry

app = App("nightly")
shop = app.limit("shop", total=10, rate="20/s")
ITEMS = range(500)


def fetch_price(item: int) -> int:
    return 100 + item % 7  # your request to the shop


def write_report(name: str, text: str) -> str:
    Path(f"{name}.txt").write_text(text, "utf-8")
    return text


@app.task(limits=[shop], retry=Retry(max_attempts=5), timeout=60)
async def price(ctx: Context, item: int) -> int:
    return await ctx.step("fetch", fetch_price, item)


@app.task(schedule=Cron("0 2 * * *", tz="Europe/Berlin"))
async def nightly(ctx: Context) -> str:
    prices = await ctx.gather(price, ITEMS, errors="keep")
    failed = [str(failure) for failure in prices if isinstance(failure, ChildFailed)]
    total = sum(found for found in prices if isinstance(found, int))
    lines = [f"{len(ITEMS)} items, {len(failed)} failed, sum {total}", *failed]
    return await ctx.step("report", write_report, ctx.task_id, "\n".join(lines))
