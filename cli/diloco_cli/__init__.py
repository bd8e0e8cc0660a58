"""
The `diloco` command: one thin command line over the other packages.

Begin with `__main__`. Imports the contract (`diloco`), the job, the local runtime and the operator's pure
`resources`; programs of the syncer and the worker run as processes and are never imported.
"""
