"""
How trainer and link process communicate: shared memory, a socket, a child process.

Imports the contract, and of this package core/ only. Begin with `link_process`, the trainer's end; both ends
use `pipe` and `shared_memory`.
"""
