"""Runs every trial in its own process, forked from a server that has imported torch.

`client.py` runs in the caller and does not import torch; `fork_server.py` is the process that
trials are forked from. It never touches a device, which its forks could then not use.
"""
