"""Plays the Hugging Face hub from a directory: the calls that `models.files.hub` makes, and a log of what was asked for."""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "c" * 40


class HubStandIn:
    """Serves `directory` as model `repository`; files of over 1 KB are large ones, whose SHA-256 the hub states."""

    def __init__(self, directory: Path, repository: str) -> None:
        self.repository = repository
        self.directory = directory
        #: Names of the files whose bytes were sent.
        self.fetched: list[str] = []
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                stand_in._answer(self, with_body=False)

            def do_GET(self) -> None:
                stand_in._answer(self, with_body=True)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> HubStandIn:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, request: BaseHTTPRequestHandler, *, with_body: bool) -> None:
        path = request.path.partition("?")[0]
        file = path.rpartition("/")[2]
        if path.startswith(f"/api/models/{self.repository}"):
            self._send(request, json.dumps(self._info()).encode(), {"Content-Type": "application/json"}, with_body)
        elif path == f"/{self.repository}/resolve/{COMMIT}/{file}" and (self.directory / file).is_file():
            data = (self.directory / file).read_bytes()
            if with_body:
                self.fetched.append(file)
            headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
            self._send(request, data, headers, with_body)
        else:
            code = "EntryNotFound" if path.startswith(f"/{self.repository}/") else "RepoNotFound"
            self._send(request, b"", {"X-Error-Code": code, "X-Error-Message": "not found"}, with_body, status=404)

    def _info(self) -> dict[str, Any]:
        siblings = []
        for path in sorted(self.directory.iterdir()):
            data = path.read_bytes()
            lfs = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 100}
            large = {"lfs": lfs} if len(data) > 1000 else {}
            siblings.append({"rfilename": path.name, "size": len(data), "blobId": "b" * 40, **large})
        return {"id": self.repository, "sha": COMMIT, "siblings": siblings}

    def _send(
        self, request: BaseHTTPRequestHandler, data: bytes, headers: dict[str, str], with_body: bool, status: int = 200
    ) -> None:
        request.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            request.send_header(name, value)
        request.end_headers()
        if with_body:
            request.wfile.write(data)
