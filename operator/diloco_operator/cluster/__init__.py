"""
All I/O of a reconcile: the Kubernetes API, the jobs' syncers, and the observation made from both.

Imports `state` for the values that it returns, diloco_job, `diloco.rpc` and the client library of
Kubernetes; it decides nothing. Begin with `observe.Observer`.
"""
