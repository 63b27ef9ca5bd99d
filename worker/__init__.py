"""The runtime: applications, durable steps, workers, the command line."""
