"""A process for every trial, forked from a server that has torch imported and no device touched.

`client.py` runs in the caller and loads no torch; `fork_server.py` is the process that trials are
forked from.
"""
