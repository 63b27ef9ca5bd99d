"""The raw client: the same work with the fewest commands, as the limit that benchmarks are compared with."""
