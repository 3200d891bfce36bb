"""Whole studies as files of JSON lines: written from a database, read and checked, and put into another one."""
