"""Fair shares of a provider: two calls at a time per tenant, six in total, so many a second, and a pause after a 429.

    perdure worker run examples/fair_share.py:app --processes 2 --concurrency 32 &
    python examples/fair_share.py acme:200 small:5
    perdure limit show provider

Tenants take turns, so `small` does not wait for the 200 texts of `acme`. A task that waits for its turn needs no slot.
If the provider answers 429, the limit is held for as long as the provider asks: no worker calls it meanwhile.
"""

from __future__ import annotations

import asyncio
import sys
import time

from perdure import App, Context, Retry

app = App("shares")
provider = app.limit("provider", total=6, running=2, by="tenant", rate="50/s", burst=10)


class TooManyRequests(Exception):
    """A 429. retry_after: seconds, from the header of this name."""

    def __init__(self, retry_after: float) -> None:
        super().__init__(f"retry after {retry_after} s")
        self.retry_after = retry_after


async def translate(text: str) -> str:
    """Stand-in for the call of the provider: it refuses each text with `busy` in it once."""
    await asyncio.sleep(0.02)
    if "busy" in text and text not in _refused:
        _refused.add(text)
        raise TooManyRequests(0.3)
    return text.upper()


_refused: set[str] = set()


@app.task(limits=[provider], retry=Retry(max_attempts=5, base=0.1))
async def translated(ctx: Context, tenant: str, text: str) -> str:
    try:
        return await ctx.step("translate", translate, text)
    except TooManyRequests as error:
        await provider.hold(error.retry_after)
        raise


async def share(wanted: dict[str, list[str]]) -> dict[str, float]:
    """Translate the texts of each tenant; return after how many seconds each had all of them."""
    started = time.monotonic()

    async def of(tenant: str) -> float:
        handles = await translated.enqueue_many({"tenant": tenant, "text": text} for text in wanted[tenant])
        for handle in handles:
            await handle.result(timeout=300)
        return time.monotonic() - started

    async with app:
        seconds = await asyncio.gather(*map(of, wanted))
    return dict(zip(wanted, seconds, strict=True))


def main(arguments: list[str]) -> None:
    sizes = [argument.partition(":") for argument in arguments or ["acme:200", "small:5"]]
    wanted = {tenant: [f"{tenant} {number}" for number in range(int(count))] for tenant, _, count in sizes}
    for tenant, seconds in asyncio.run(share(wanted)).items():
        print(f"{tenant}: {len(wanted[tenant])} texts in {seconds:.1f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
