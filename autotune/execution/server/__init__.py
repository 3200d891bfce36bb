"""Forks a process for each task, watches it and ends it: nothing here imports torch.

`client.py` runs in the process of the search and `fork_server.py` in that of the trial server, from
which tasks are forked. It never touches a device, which its forks could then not use. What runs in
a forked process is in `execution/process/`.
"""
