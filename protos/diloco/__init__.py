"""
The contract: everything that two programs of one job must agree on.

Lowest to highest, each may import those before it (pyproject.toml, "layers of the contract"):

    v1        protobuf messages and services of the wire, with generated stubs
    errors    the errors that a program raises on purpose, and exit codes
    spec      RunSpec: what all processes of a job share, and its hash
    runtime   one process: environment variables, files, health file, logs, metrics, back-off
    model     named tensors, fragments, safetensors headers
    codec     wire formats with compiled kernels, messages of a bulk stream
    rpc       gRPC channels and servers, TLS, status codes, conversion of messages
    journal   events.jsonl: records, writer, reader, audit

Imports the standard library, numpy, numba, xxhash, protobuf, grpc, cryptography and
prometheus_client; never torch, never the package of a program. Begin with `spec.py`, then
`model/fragments.py`, then `v1/syncer.proto`.
"""
