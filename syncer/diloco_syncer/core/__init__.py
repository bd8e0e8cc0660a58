"""
Everything the syncer decides, without I/O: admission, learners, rounds, pacing. Begin with engine.py.

Imports the contract without `rpc/`, and nothing else of the syncer.
"""
