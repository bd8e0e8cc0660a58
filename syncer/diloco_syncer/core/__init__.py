"""Everything the syncer decides and computes, without I/O: engine, rounds, schedule, members, merge."""
