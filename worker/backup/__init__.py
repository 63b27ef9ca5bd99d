"""Backup of a namespace to a file, and its restore.

    backup_file.py  the file: compressed JSON lines with a checksum
    dump.py         reads all keys of a namespace
    load.py         writes them into an empty namespace

A backup has the values of the keys, not the memory of the server, so that another kind or version of server can restore
it. It is read in pages: neither side holds more than some pages of some keys.
"""
