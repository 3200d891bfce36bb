"""Real searches whose trials take milliseconds, for tests and for `studies/reliability/`."""
