"""
Version 1 of the wire: `syncer.proto` (control), `bulk.proto` (tensors), and their stubs, which
scripts/generate.py writes. Imports protobuf and grpc only. Begin with `syncer.proto`.
"""
