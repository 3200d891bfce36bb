"""Runs trials. An executor works like those of `concurrent.futures`: submit, futures, shutdown."""
