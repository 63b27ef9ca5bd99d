"""Hostile and damaged messages for a real worker."""
