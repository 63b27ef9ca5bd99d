"""Examination of a deployment: what is wrong with its server, its rights and its data, and what to do.

    result.py       a finding: severity, what was found, its meaning and remedy
    server.py       checks of a server: version, persistence, eviction, memory, replication, clock, latency
    rights.py       checks of the user's rights, and of certificates
    deployment.py   checks of a namespace: format, settings, workers, leases, places of tasks, foreign values
    examination.py  runs all checks, and the fixes that are safe

A check is a function that returns findings and changes nothing. A check that fails is a finding itself, so that one
refusal hides no other problem.
"""
