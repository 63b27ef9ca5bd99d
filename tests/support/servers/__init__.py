"""Servers that tests start, kill and cut: Redis of every topology, PostgreSQL, a webhook receiver, a local model."""

from .redis import BUNDLED, REDIS_6_2, SYSTEM, RedisServer, find_program

__all__ = ["BUNDLED", "REDIS_6_2", "SYSTEM", "RedisServer", "find_program"]
