"""An S3-compatible storage on a port of its own of this machine: moto's server, with faults that a test asks for."""

from __future__ import annotations

import contextlib
import threading
import urllib.request
from collections.abc import Callable, Iterator

import pyarrow.fs
from werkzeug.serving import make_server

BUCKET = "runs"
CUT = "cut"
_KEYS = ("access", "secret")


class Storage:
    """A storage that runs.

    Attributes:
        fault: fault(environ) of each request: a status line to answer with, `CUT` to end the connection
            in the middle of the answer, or None to let it pass; it may wait.
        requests: (method, path with its query) of those that came.
    """

    def __init__(self, app):
        self._app = app
        self.fault: Callable[[dict], str | None] = lambda environ: None
        self.requests: list[tuple[str, str]] = []
        self.port = 0

    def __call__(self, environ, start_response):
        query = f"?{environ['QUERY_STRING']}" if environ["QUERY_STRING"] else ""
        self.requests.append((environ["REQUEST_METHOD"], environ["PATH_INFO"] + query))
        status = self.fault(environ)
        if status is None:
            return self._app(environ, start_response)
        if status == CUT:
            answer = b"".join(self._app(environ, start_response))
            return [answer[: len(answer) // 2]]
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        start_response(status, [("Content-Type", "application/xml")])
        return [b"<Error><Code>ServiceUnavailable</Code><Message>told so by a test</Message></Error>"]

    def filesystem(self, keys: tuple[str, str] = _KEYS, **options) -> pyarrow.fs.S3FileSystem:
        """The storage as pyarrow sees it."""
        return pyarrow.fs.S3FileSystem(
            access_key=keys[0],
            secret_key=keys[1],
            endpoint_override=f"127.0.0.1:{self.port}",
            scheme="http",
            region="us-east-1",
            **options,
        )

    def uri(self, path: str) -> str:
        """A place there, for who has nothing but a text."""
        where = f"scheme=http&endpoint_override=127.0.0.1%3A{self.port}&region=us-east-1"
        return f"s3://{':'.join(_KEYS)}@{path}?{where}"

    def require_known_keys(self) -> None:
        """From now on keys that nobody made are refused."""
        self.tell("reset-auth", b"0")

    def tell(self, command: str, value: bytes = b"") -> None:
        """Sends a setting to moto's server."""
        url = f"http://127.0.0.1:{self.port}/moto-api/{command}"
        urllib.request.urlopen(urllib.request.Request(url, value, {"Content-Type": "text/plain"}), timeout=30).close()


@contextlib.contextmanager
def serving() -> Iterator[Storage]:
    """A storage with an empty bucket, until the end of the block."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

    storage = Storage(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, storage, threaded=True)
    storage.port = server.server_port
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        storage.filesystem(allow_bucket_creation=True).create_dir(BUCKET)
        yield storage
    finally:
        storage.fault = lambda environ: None
        storage.tell("reset-auth", b"inf")  # moto keeps what it has for the life of this process
        storage.tell("reset")
        server.shutdown()
        server.server_close()
        thread.join()
