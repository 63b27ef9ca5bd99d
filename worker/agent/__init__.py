"""Agents: the loop over their state, what they hand on, and what they are given to go on with."""

from .agent import Agent, S
from .coherence import Coherence
from .form import StateForm, problem_of
from .handler import make_handler
from .session import session_of

__all__ = ["Agent", "Coherence", "S", "StateForm", "make_handler", "problem_of", "session_of"]
