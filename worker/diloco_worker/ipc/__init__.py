"""
How trainer and link process communicate: shared memory, a socket, a child process.

Of this package it imports core/ only. Begin with `link_process`, the trainer's end; both ends use `pipe` and
`shared_memory`.
"""
