"""Partitions of a queue: routes, resharding, the producer's router and the worker's assignment."""
