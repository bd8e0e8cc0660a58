"""A gRPC server of the product's own kind with one method, /test/Call, that returns what it received."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import grpc

from diloco.rpc import servers
from diloco.rpc.tls import Tls


@contextlib.contextmanager
def echo_server(tls: Tls | None = None) -> Iterator[int]:
    """Serve on 127.0.0.1; its port."""
    handler = grpc.unary_unary_rpc_method_handler(lambda request, context: request)
    server = servers.server(
        [grpc.method_handlers_generic_handler("test", {"Call": handler})], max_workers=2
    )
    port = servers.bind(server, "127.0.0.1:0", tls)
    server.start()
    try:
        yield port
    finally:
        server.stop(None).wait()
