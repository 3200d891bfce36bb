"""The sizes of matrices that fp8 can multiply."""

FP8_MULTIPLE = 16
"""Both dimensions of every matrix in an fp8 product must be multiples of this."""
