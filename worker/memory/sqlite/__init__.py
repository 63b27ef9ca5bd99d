"""SQLite backend of the memory store: text search with FTS5, vector search with sqlite-vec if it is installed.

    backend.py  transactions
    driver.py   a connection, by apsw or sqlite3; translation of errors
    schema.py   tables, opening of a file
    salvage.py  reading a damaged file

Several processes may use a file at once; one process must open it with one SQLite library only (see driver.py). A
damaged file is never changed.
"""
