"""
Sources of work: kopf's watches and periodic lists, and the health of both.

`handlers.py` adds keys to the work queue; `health.py` detects watches that miss events. Imports
`cluster`, `resources`, `state`, `workqueue`, diloco_job and the contract. Begin with `handlers.registry`.
"""
