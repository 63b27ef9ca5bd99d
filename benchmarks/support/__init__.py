"""Servers, processes and machine facts that benchmarks share."""
