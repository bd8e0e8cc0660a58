"""
The operator's decisions: phase, changes to children, conditions, status, Events. Pure.

One module per policy: `phase` (the lifecycle) with `lost_volume`; `changes` with `drift`,
`volume_claims`, `running_templates`, `rollout`, `replacements`, `lost_nodes` and `pruning`;
`conditions` and `objections`; `status`. Imports `state`, `resources`, diloco_job and the contract.
Begin with `decisions.decide`.
"""
