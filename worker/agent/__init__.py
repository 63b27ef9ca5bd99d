"""Agents: the loop over their state, what they hand on, and what they are given to go on with."""

from .agent import Agent, S
from .coherence import Coherence, CoherenceMonitor
from .handler import make_handler
from .state_type import StateType, problem_of

__all__ = ["Agent", "Coherence", "CoherenceMonitor", "S", "StateType", "make_handler", "problem_of"]
