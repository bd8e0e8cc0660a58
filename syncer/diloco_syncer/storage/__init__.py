"""
What the syncer holds and keeps: parameters, snapshots, counters, the exported model.

Imports `core` and the contract. Begin with parameters.py, then store.py.
"""
