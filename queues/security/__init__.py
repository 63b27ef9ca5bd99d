"""Encryption of stored data, secret arguments and redaction."""
