"""
Wire formats: fp32 values ↔ payloads, and the messages that carry them.

Imports model, errors and v1. Begin with `formats`; `kernels` has the compiled loops, `frames` the
envelope with the checksum.
"""
