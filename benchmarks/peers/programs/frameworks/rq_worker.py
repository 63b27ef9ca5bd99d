"""RQ's worker in a program that imports the tasks first, as RQ's page on performance recommends."""

from __future__ import annotations

from rq import SimpleWorker, Worker
from rq.serializers import JSONSerializer

from ..setup import SIMPLE
from .on_rq import queue, redis

if __name__ == "__main__":
    kind = SimpleWorker if SIMPLE else Worker
    kind([queue], connection=redis, serializer=JSONSerializer).work(logging_level="WARNING")
