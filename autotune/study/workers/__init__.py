"""Coordinates several processes on one study: leases, heartbeats, an outbox, dead workers."""
