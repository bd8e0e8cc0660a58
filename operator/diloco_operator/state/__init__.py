"""
The state of one job as immutable values. Pure.

`stored_job` parses the manifest, `observation` holds what a reconcile read, and `job_state` puts it
in order for `decide`. Imports `resources`, diloco_job and the contract. Begin with `JobState`.
"""
