"""Benchmarks of the table, one module each: what Perdure takes for an operation, and the raw client beside it."""
