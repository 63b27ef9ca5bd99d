"""PostgreSQL backend of the memory store: text search with tsvector, vector search with pgvector.

backend.py  transactions; translation of errors
schema.py   tables, embedder of the store
rows.py     statements of a transaction, row to Memory
"""
