"""Testing support for users' projects: `perdure.testing` and the pytest plugin.

    plugin.py        fixtures for pytest; imports nothing else of the package until one of them is used
    fixture.py       what the fixture `perdure` gives: a server, a namespace of the test, and their removal
    idle.py          run_until_idle, drain, run_worker: run a worker in a test until nothing is left to do, or beside it
    enqueued.py      assert_enqueued and refute_enqueued
    clock.py         what the fixture `perdure_clock` gives: a server whose time the test sets forward
    timed_server.py  that server, in a thread of the process
    fake_engine.py   its engine: fakeredis at the time of the server, which the simulation of the project uses too
    log_replay.py    replay_log: run new code with the records of an exported task
    unit_context.py  make_context: a context for one call of a handler, without a server

This module imports nothing: pytest loads the plugin in each of its runs.
"""
