"""Predictions in a study: asked for once a configuration, or without any trial."""
