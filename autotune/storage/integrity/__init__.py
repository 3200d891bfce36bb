"""Whether a studies database is ours and whole: checks before it is opened and on request, and its backup."""
