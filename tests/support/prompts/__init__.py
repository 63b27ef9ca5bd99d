"""Readers of prompts: what a model can know from the text alone, and whether the state agrees with it."""
