"""Perdure beside its peers, each run as its own documentation tells: `make bench-peers`."""
