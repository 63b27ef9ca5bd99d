"""Program that adds memories after a line on stdin, beside others that do the same, and prints them as stored."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from perdure.worker.memory import HybridStore, new_memory
from perdure.worker.memory.factory import make_store
from perdure.worker.settings import load_settings

from tests.support.memory_stores import Numbers


async def main(texts: list[tuple[str, str | None, str]]) -> None:
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    async with HybridStore(make_store(load_settings())._backend, Numbers()) as store:
        for text, key, source in texts:
            memory = await store.add(new_memory(text, source=source), key=key)
            sys.stdout.write(memory.model_dump_json() + "\n")


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
