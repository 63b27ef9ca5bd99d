"""The supervisor: a process that runs workers as its children, and no handler code of its own."""

from .config import SupervisorConfig
from .supervisor import Supervisor

__all__ = ["Supervisor", "SupervisorConfig"]
