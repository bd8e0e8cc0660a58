"""
The operator: reconciles DiLoCoJobs of one Kubernetes cluster, for all regions or for one.

    watch -> workqueue -> reconcile -> cluster.observe -> decide -> cluster.client

`state/`, `decide/` and `resources/` are pure: values in, values out, no clock, socket, file, thread
or environment. `watch/`, `cluster/` and the modules here are the shell around them. The package
imports the contract (`diloco`) and `diloco_job`, and no other program. Begin with
`decide/decisions.py`, then read `reconcile.py`.
"""
