"""Everything the syncer decides, without I/O: admission, learners, rounds, pacing. Begin with engine.py."""
