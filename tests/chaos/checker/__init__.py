"""Checker of a run: builds its history from the journal, and applies a rule per guarantee."""
