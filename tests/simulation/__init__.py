"""Deterministic simulation of the whole system."""
