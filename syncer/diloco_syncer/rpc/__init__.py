"""
The gRPC surface of the syncer: control (sessions, status) and bulk (uploads, downloads).

Imports the rest of the syncer, the contract and grpc. Begin with control.py, then uploads.py and receiver.py.
"""
