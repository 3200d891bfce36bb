"""Does the suite notice? Changes of one operator, constant or branch, and the tests that fail."""
