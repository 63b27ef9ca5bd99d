"""Perdure compared with other projects, each run as its documentation describes: `make bench-peers`."""
