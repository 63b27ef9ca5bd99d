"""The runtime: from messages to handlers and back."""

from .worker import Worker

__all__ = ["Worker"]
