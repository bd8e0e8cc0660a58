"""
The local runtime: runs a job's plan on one machine (`diloco run`).

Begin with `policy` (what to start, stop and restart) and `status` (status.json), which are pure;
`supervisor` connects them to processes, signals and the syncer. `run_directory` owns the files,
`report` reads them. Imports the job, `processes`, `restarts` and `output` of the agent, and the contract;
the syncer and the learners run as processes and are never imported.
"""
