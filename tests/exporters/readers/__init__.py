"""Readers: return what a trainer does with an export's files, as settings of autotune."""
