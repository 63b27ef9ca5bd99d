"""What a worker tells its operators."""

from .logging import configure_logging, logger

__all__ = ["configure_logging", "logger"]
