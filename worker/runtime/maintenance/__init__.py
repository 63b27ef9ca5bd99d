"""Background duties of a worker: promotion, clean-up, partition assignment and registration."""
