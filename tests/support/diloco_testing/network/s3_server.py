"""A real S3 server on loopback: localbucket, whose objects are files, and faults between it and its clients."""

from __future__ import annotations

import base64
import hashlib
import threading
import time
import xml.etree.ElementTree as ET
from http import HTTPStatus
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from localbucket import S3_NAMESPACE, S3Error, S3Handler

BUCKET = "diloco-test"


class S3Server:
    """
    One bucket, `BUCKET`; use as a context manager.

    Args:
        root: where buckets are directories.
    """

    def __init__(self, root: Path) -> None:
        self.bucket = root / BUCKET
        self.bucket.mkdir(parents=True)
        self.requests: list[str] = []
        """"PUT runs/job/claims/000001.json" of each request."""
        self.unavailable = False
        """Every request gets 503."""
        self.delay_seconds = 0.0
        server = self

        class Handler(_Handler):
            data_root = root

            def _dispatch(self, action: Any) -> None:
                server.reach(self)
                super()._dispatch(action)

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self) -> S3Server:
        """Serve."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End."""
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    @property
    def environment(self) -> dict[str, str]:
        """The variables of AWS that lead a client here."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._http.server_address[1]}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
        }

    def objects(self, folder: str) -> list[str]:
        """Names of the objects below a folder."""
        root = self.bucket / folder
        return sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file())

    def reach(self, handler: S3Handler) -> None:
        """Called with each request before it is carried out."""
        key = unquote(urlsplit(handler.path).path).removeprefix(f"/{BUCKET}").lstrip("/")
        self.requests.append(f"{handler.command} {key}")
        time.sleep(self.delay_seconds)
        if self.unavailable:
            handler.close_connection = True
            error = S3Error(HTTPStatus.SERVICE_UNAVAILABLE, "SlowDown", "Reduce your request rate.")
            handler._send_error(error)
            raise ConnectionAbortedError


class _Handler(S3Handler):
    """With DeleteObjects, which obstore sends and localbucket 1.2.1 lacks; without a log."""

    def log_message(self, *arguments: object) -> None:
        """Nothing."""

    def handle(self) -> None:
        """A client that is killed, and a fault, end the connection only."""
        try:
            super().handle()
        except ConnectionError:
            self.close_connection = True

    def _post_request(self, bucket: str, key: str) -> None:
        if not bucket or key or "delete" not in self.query:
            super()._post_request(bucket, key)
            return
        body = self._read_body()
        stated = self.headers.get("Content-MD5")
        if stated and base64.b64encode(hashlib.md5(body).digest()).decode() != stated:
            raise S3Error(HTTPStatus.BAD_REQUEST, "BadDigest", "The Content-MD5 differs.")
        keys = [
            e.text or "" for e in ET.fromstring(body).iter() if e.tag.rpartition("}")[2] == "Key"
        ]
        result = ET.Element("DeleteResult", xmlns=S3_NAMESPACE)
        for each in keys:
            self._object_path(bucket, each).unlink(missing_ok=True)
            ET.SubElement(ET.SubElement(result, "Deleted"), "Key").text = each
        self._send_xml(result)
