"""
The contract: everything two programs of one job must agree on.

Protos and their stubs (`v1`), the fragmentation of a model, the wire codec, the RunSpec and its
hash, the error tree, channels and metric names. Imports the standard library, numpy, numba,
protobuf and grpc; never torch, never a component.
"""
