"""Several processes working on one study: leases, heartbeats, results on their way, and who still lives."""
