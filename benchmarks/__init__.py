"""How fast Perdure is, beside what a raw client reaches on the same server in the same run: `make bench`."""
