"""
gRPC for all programs of a job: `channels` and `servers`, `tls` and `certificates`, `status_codes`
(errors ↔ gRPC), `tensor_info` (tensors ↔ messages), `status_client`.

Imports model, errors and v1. Begin with `channels`.
"""
