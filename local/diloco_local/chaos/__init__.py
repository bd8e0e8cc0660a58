"""
`diloco chaos`: runs a job as `diloco run` does and injects faults.

Begin with `plan` (which faults, drawn from a seed) and `schedule` (which of them begin and end now), which
are pure; `injector` carries them out with the supervisor's processes and the `proxy` before the syncer.
"""
