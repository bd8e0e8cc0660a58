"""
The operator: reconciles DiLoCoJobs of one Kubernetes cluster, for all regions or for one.

    watch -> workqueue -> reconcile -> cluster.observe -> decide -> cluster.client

The work queue runs only while `leader/` holds the Lease; `decide` compares what was observed with the
objects that `resources/` makes of the manifest.

`state/`, `decide/` and `resources/` are pure: values in, values out, no clock, socket, file, thread
or environment. `watch/`, `leader/`, `cluster/` and the modules here are the shell around them. The
package imports the contract (`diloco`) and `diloco_job`, and no other program. Begin with
`decide/decisions.py`, then read `reconcile.py`.
"""
