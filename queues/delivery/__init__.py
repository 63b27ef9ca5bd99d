"""Deliveries: reading and claiming messages, leases, checkpoints and settlement."""
