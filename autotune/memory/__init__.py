"""Measures the peak memory of a training, and attributes it to its tensors.

`meter.py` has the interface, `MemoryMeter`. `cpu.py` implements it with the allocator's events,
`cuda.py` with the caching allocator's counters. `recording.py` holds what a step allocated and
freed, and `attribution.py` turns that into the peak and its categories.
"""
