"""What the syncer holds and keeps: parameters, snapshots, counters, the exported model."""
