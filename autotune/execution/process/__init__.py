"""What runs in a process that the trial server has forked for one task, with torch.

`request.py` comes first: it sets up the process and replies. `answers.py` has the function that
carries out each task.
"""
