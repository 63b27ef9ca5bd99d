"""Helpers that tests share: servers, processes, clusters and what they look at."""
