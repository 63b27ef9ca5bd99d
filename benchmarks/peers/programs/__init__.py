"""Programs that run in the virtual environment of a setup: clients, the caller of steps, and the shared file of times.

They use the standard library; the modules of `frameworks` import the measured project.
"""
