"""Handoff documents: what a run leaves when it stops."""
