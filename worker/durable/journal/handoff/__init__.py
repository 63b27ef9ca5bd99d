"""Handoff documents: the short report that a run leaves when it stops, for the next run and for people.

    document.py  Handoff: its fields, JSON and Markdown
    budget.py    shorten one to a number of tokens

A document is written while a run stops, so drafting never fails on data that it cannot read; it leaves that out. The
JSON is durable data: keep its keys.
"""
