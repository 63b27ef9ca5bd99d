"""Metrics of workers: what they have counted and measured, in the Prometheus text format on the health port.

A worker counts only if there is a health port, its own or that of its supervisor. Of the package
`prometheus_client`, only exposition.py knows.

    families.py    the table of metrics: names, labels, buckets, and bounds of the label sets
    meter.py       Meter: counters and histograms of one worker, and what it measures now
    totals.py      Totals: the sums over all workers of a supervisor, those that have ended included
    exposition.py  the text that Prometheus reads (imported only where it is used)
"""
