"""The loop of a search, the places and devices where trials run, and one trial."""
