"""Checks a studies database before it is opened and on request, and makes its backup."""
