"""
All I/O of a reconcile: the Kubernetes API, the jobs' syncers, and the observation made from both.

Imports `state` and `resources` for the values that it takes and returns, `workqueue` for the keys of jobs,
diloco_job, the contract and the client library of Kubernetes; it decides nothing. Begin with `observe.Observer`.
"""
