"""Health of a worker: is it alive, connected, consuming, making progress?

loop_watchdog.py   LoopWatchdog: a thread that notices a blocked event loop, dumps stacks, stops lease renewal
redis_contact.py   RedisContact: the event loop and the thread that renews leases both reach Redis
deadlines.py       RunDeadlines: time and idle limits; abandons runs that ignore cancellation
capacity.py        Capacity: how many slots may be filled, by memory and the lag of the loop
report.py          Health, Report: four levels, readable from any thread
probe_server.py    ProbeServer: /livez and /readyz over HTTP (imported only where it is used)
"""
