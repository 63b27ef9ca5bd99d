"""The PostgreSQL memory backend."""
