"""Peak memory of a training, measured: the one number every other number is weighed against.

`cpu.py` reads the allocator's own events, `cuda.py` the caching allocator's counters; both are a
`MemoryMeter`.
"""
