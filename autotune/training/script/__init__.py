"""A user's training script: what it calls, how it is run as it is, and how it becomes a trial."""
