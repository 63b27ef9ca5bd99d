"""`perdure bench`: what Perdure reaches on a server, beside what a raw client reaches on it in the same run."""
