"""
The local runtime: carries a plan out on one machine (`diloco run`).

`policy` and `status` are pure: what to start, stop and give up, and what to tell about it.
`children`, `leash`, `rundir`, `poller` and `progress` each talk to one outside thing; `supervisor`
puts them together.
"""
