"""
`diloco chaos`: runs a job as `diloco run` does and injects faults.

Begin with `fault_plan` (which faults, drawn from a seed) and `fault_schedule` (which of them begin and end now), which
are pure; `fault_injector` carries them out with the supervisor's processes and the `proxy` before the syncer. Imports
the rest of the local runtime, the job, the processes of the agent, and the contract.
"""
