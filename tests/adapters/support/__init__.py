"""Helpers of the tests of all adapters.

journal.py    file in which programs note their calls, and hold one of them
processes.py  worker processes of a program, which a test kills, freezes and starts again
test_pages.py runs the how-to pages that the entry of an adapter names, in its environment
"""
