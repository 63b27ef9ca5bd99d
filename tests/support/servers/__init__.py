"""Servers that tests start, kill and cut: Redis of every topology, PostgreSQL, a webhook receiver, a local model."""

from .redis import BUNDLED, SYSTEM, VALKEY, RedisServer, find_program

__all__ = ["BUNDLED", "SYSTEM", "VALKEY", "RedisServer", "find_program"]
