"""Runs trials on the nodes of a Ray cluster, with the same trial server as on this machine.

The search (the driver) owns the study and its database. On each device that it uses, `worker.py`
runs in a Ray actor and has an executor of `execution/local.py`; `executor.py` is the same executor
as the driver sees it. `connection.py` finds the cluster, `nodes.py` its nodes and devices, and
`files.py` brings a node what a trial needs. Only these modules import Ray, and only a search with
`--ray` imports them.
"""
