"""Exports whole studies as files of JSON lines, and imports such files into another database."""
