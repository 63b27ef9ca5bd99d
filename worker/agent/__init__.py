"""Agents: the loop over their state, what they hand on, and what they are given to go on with."""

from .agent import Agent, S
from .coherence import Coherence
from .handler import make_handler
from .live_state import session_of
from .state_type import StateForm, problem_of

__all__ = ["Agent", "Coherence", "S", "StateForm", "make_handler", "problem_of", "session_of"]
