"""PostgreSQL backend of the memory store: text search with tsvector, vector search with pgvector.

    backend.py  transactions; translation of errors
    schema.py   tables, embedder of the store

Rows are always locked in the same order, so transactions cannot deadlock. The table of vectors is created when an
embedder is first set, since pgvector needs a privilege to install.
"""
