"""Absurd's worker, which a program starts."""

from __future__ import annotations

import asyncio
import os

from .on_absurd import work, work_in_threads

if __name__ == "__main__":
    if "BENCH_THREADS" in os.environ:
        work_in_threads()
    else:
        asyncio.run(work())
