"""
What the link and the trainer decide, as pure code: no clock, socket, file, thread, torch or proto.

Time is an argument. Begin with `link_protocol`: it turns events into decisions (both in `events`).
`messages` are the states that trainer and link exchange, `inbox` decides which side may touch a fragment,
`ledger` counts steps and tokens. Imports `errors`, `model` and the back-off of the contract, and
nothing else of the project.
"""
