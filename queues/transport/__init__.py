"""Connections to Redis: addresses, clients, pipelining, scripts, Sentinel and Cluster."""
