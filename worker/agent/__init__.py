"""Agents: the loop over their state, what they hand on, and what they are given to go on with."""
