"""What outlives tasks: an agent's long-term knowledge."""
