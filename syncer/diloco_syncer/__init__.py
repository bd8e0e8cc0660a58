"""
The syncer: pulls fragments from learners, merges them, applies the outer optimizer, sends the result to all.

`core` is pure (no clock, no socket, no file, no thread except the lock of a streaming merge). The shell is `service`
(gRPC: translate), `runner` (one thread that feeds events to the engine and carries its decisions out), `theta` (the
parameters), `store` (durable files) and `__main__` (composition root). No torch anywhere.
"""
