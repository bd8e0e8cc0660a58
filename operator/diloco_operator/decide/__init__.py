"""
The operator's decisions: phase, changes to children, conditions, status, Events. Pure.

One module per policy: `phase` (the lifecycle), `changes` with `rollout`, `pruning` and `drift`,
`conditions`, `status`. Imports `state`, `resources`, diloco_job and the contract. Begin with `decisions.decide`.
"""
