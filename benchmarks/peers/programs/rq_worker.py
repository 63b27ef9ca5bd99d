"""RQ's worker, in a program that has imported the tasks already: its page on performance tells to do so."""

from __future__ import annotations

from rq import Worker
from rq.serializers import JSONSerializer

from .on_rq import queue, redis

if __name__ == "__main__":
    Worker([queue], connection=redis, serializer=JSONSerializer).work(logging_level="WARNING")
