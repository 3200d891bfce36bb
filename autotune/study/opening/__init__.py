"""From a request to an open study: new with its files, or stored, and what it reuses."""
