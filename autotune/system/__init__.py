"""What the process has of its system: files, streams, signals, locks, compilers, power cuts."""
