"""Evaluations of what agents know after kills, over long runs and in long conversations.

One file per subject. Its tests have the marker `evaluation`, print their figures, and assert what the documentation
promises. They take minutes, so `make evaluate` runs them, and the default run does not. A small version of each belongs
beside the tests of the code that it measures.
"""
