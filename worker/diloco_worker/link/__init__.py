"""
The link process: all network traffic of a learner. No torch.

Begin with `link`, which carries out the decisions of core/link_protocol.py; `__main__` assembles
the process. `session` holds the control stream, `bulk` runs transfers on threads.

Transfers without I/O, for this process and for simulators: `schedule` (which run), `encoder` and
`upload_messages` (an upload), `placement` and `assembly` (a download, until it is in the inbox),
`buffers` (what they may hold). `upload` and `download` are the gRPC calls around them.

Imports the contract, and of this package core/, ipc/ and `settings`; never trainer/ or the modules above it.
"""
