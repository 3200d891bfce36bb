"""The label of a token that is not learned."""

IGNORED_LABEL = -100
"""The label that cross entropy ignores by default, in torch and in transformers."""
