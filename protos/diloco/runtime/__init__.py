"""
What a process needs of its surroundings, one module per concern.

The container's first process imports `backoff`, `env`, `exits`, `files`, `formatting`, `health`, `listening`,
`logs` and `signals`, so these need the standard library only. Imports errors. Begin with `env` and
`files`.
"""
