"""The gRPC surface of the syncer: control (sessions, status) and bulk (uploads, downloads)."""
