"""Plays the Hugging Face hub from a directory: the calls for models and data sets, and a log of what was asked for."""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "c" * 40


class HubStandIn:
    """Serves `directory` as the model or data set `repository`; of files of over 1 KB the hub states the SHA-256.

    Args:
        directory: with files, or directories of them.
        repository: `owner/name`.
        kind: `models` or `datasets`.
        card: what the hub has read in the card.
    """

    def __init__(self, directory: Path, repository: str, *, kind: str = "models", card: dict[str, Any] | None = None) -> None:
        self.repository = repository
        self._kind, self._card = kind, card
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
        place = f"/{self.repository}/" if self._kind == "models" else f"/{self._kind}/{self.repository}/"
        file = path.removeprefix(f"{place}resolve/{COMMIT}/")
        if path.startswith(f"/api/{self._kind}/{self.repository}"):
            self._send(request, json.dumps(self._info()).encode(), {"Content-Type": "application/json"}, with_body)
        elif file != path and (self.directory / file).is_file():
            data = (self.directory / file).read_bytes()
            if with_body:
                self.fetched.append(file)
            headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
            self._send(request, data, headers, with_body)
        else:
            code = "EntryNotFound" if path.startswith(place) else "RepoNotFound"
            self._send(request, b"", {"X-Error-Code": code, "X-Error-Message": "not found"}, with_body, status=404)

    def _info(self) -> dict[str, Any]:
        siblings = []
        for path in sorted(path for path in self.directory.rglob("*") if path.is_file()):
            data = path.read_bytes()
            lfs = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 100}
            large = {"lfs": lfs} if len(data) > 1000 else {}
            siblings.append({"rfilename": str(path.relative_to(self.directory)), "size": len(data), "blobId": "b" * 40, **large})
        card = {} if self._card is None else {"cardData": self._card}
        return {"id": self.repository, "sha": COMMIT, "siblings": siblings, **card}

    def _send(
        self, request: BaseHTTPRequestHandler, data: bytes, headers: dict[str, str], with_body: bool, status: int = 200
    ) -> None:
        request.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            request.send_header(name, value)
        request.end_headers()
        if with_body:
            request.wfile.write(data)
