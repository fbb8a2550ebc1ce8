"""A hub of a few models on this machine, spoken to over HTTP as the real one is."""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class HubServer:
    """`models`: id -> file -> content; `gated`: ids that nobody may read. `asked`: files fetched."""

    def __init__(self, models: dict[str, dict[str, bytes]], gated: frozenset[str] = frozenset()) -> None:
        self.models, self.gated = models, gated
        self.asked: list[str] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> HubServer:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body for a request."""
        parts = [part for part in urlsplit(path).path.split("/") if part]
        api = parts[:2] == ["api", "models"]
        owner, name, verb, revision, *rest = (*(parts[2:] if api else parts), "", "", "", "")
        model = f"{owner}/{name}"
        if model in self.gated:
            return 403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "restricted"}, b""
        if model not in self.models:
            return 401, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}, b""
        if revision not in ("main", COMMIT):
            return 404, {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "Invalid rev id"}, b""
        files = self.models[model]
        if verb == "revision":
            siblings = [{"rfilename": file} for file in files]
            return 200, {}, json.dumps({"id": model, "sha": COMMIT, "siblings": siblings}).encode()
        if verb == "tree":
            tree = [
                {"type": "file", "path": file, "size": len(content), "oid": _digest(content)}
                for file, content in files.items()
            ]
            return 200, {}, json.dumps(tree).encode()
        file = "/".join(part for part in rest if part)
        self.asked.append(file)
        return 200, {"ETag": f'"{_digest(files[file])}"', "X-Repo-Commit": COMMIT}, files[file]

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, headers, body = server.answer(self.path)
                self.send_response(status)
                for key, value in {"Content-Length": str(len(body)), **headers}.items():
                    self.send_header(key, value)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            do_HEAD = do_GET

            def log_message(self, *arguments: object) -> None:
                pass

        return Handler


def _digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
