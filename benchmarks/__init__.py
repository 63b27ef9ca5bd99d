"""Benchmarks of Perdure beside a raw client on the same server: `make bench`."""
