"""
The streaming merge: chunks of many learners in, chunks of the new parameters out. Begin with streaming.py.

Imports `core` and the contract.
"""
