"""The supervisor: a process that runs workers as its children, and no handler code of its own."""

from .config import Plan
from .supervisor import Supervisor

__all__ = ["Plan", "Supervisor"]
