"""A process per trial. `client.py` runs in the caller (no torch), `server.py` in the process trials are forked from."""
