"""The parts of the first hour, one file a part: its items, and what it says of their results."""
