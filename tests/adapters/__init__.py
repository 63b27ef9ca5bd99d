"""Tests of the adapters, each in an environment of its own with its framework, which the default tests do not have.

    make adapters                        all adapters, at the newest release of their frameworks
    make adapters AT=both                and at the oldest release that their extras allow
    make adapters ADAPTERS='mcp arq'     some of them

`__main__.py` makes the environments in build/adapters and runs the tests there. Each folder has the tests of one
adapter: `test_*.py`, and `upstream.py`, which runs tests of the framework's source distribution with the adapter in
place of what they name, if the framework has such tests.
"""
