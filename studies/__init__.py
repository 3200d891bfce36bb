"""Studies of autotune: what was run, on which machine, and what it says."""
