"""Cost of tasks and of idle workers for Redis, with 1, 16 and 500 workers: `make bench-scale`."""
