"""What runs inside a peer's own virtual environment: its handlers, its client, and the clock that all of them share.

The modules named `on_...` import their peer, which is installed nowhere else; the rest is the standard library alone.
"""
