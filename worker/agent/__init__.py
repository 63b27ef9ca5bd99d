"""Agents: the loop over their state, what they hand on, and what they are given to go on with."""

from .agent import Agent, S
from .coherence import Coherence
from .handler import make_handler
from .live_state import live_state_of
from .state_type import StateType, problem_of

__all__ = ["Agent", "Coherence", "S", "StateType", "live_state_of", "make_handler", "problem_of"]
