"""A stand-in for the Hugging Face Hub on loopback, with the part of its API that an upload uses."""

from __future__ import annotations

import base64
import json
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "c0ffee" + "0" * 34
TOKEN = "hf_" + "t" * 34


@dataclass
class Hub:
    """The repositories of the hub, and the requests and commits that it received."""

    url: str = ""
    repos: dict[str, dict[str, Any]] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    commits: list[dict[str, Any]] = field(default_factory=list)


def _handler(hub):  # noqa: C901  # one class, five routes
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            """Print nothing."""

        def _answer(self, code, value, **headers):
            body = json.dumps(value).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            for name, text in headers.items():
                self.send_header(name.replace("_", "-"), text)
            self.end_headers()
            self.wfile.write(body)

        def _body(self):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))

        def _begin(self):
            hub.requests.append((self.command, self.path))
            if self.headers.get("Authorization") == f"Bearer {TOKEN}":
                return True
            self._body()
            self._answer(401, {"error": "Invalid credentials"}, X_Error_Message="Invalid token")
            return False

        def do_GET(self):
            if not self._begin():
                return
            name = self.path.removeprefix("/api/models/").partition("?")[0]
            if name in hub.repos:
                self._answer(200, {"id": name, "sha": COMMIT, **hub.repos[name]})
            else:
                self._answer(404, {"error": "missing"}, X_Error_Code="RepoNotFound")

        def do_POST(self):
            if not self._begin():
                return
            body = self._body()
            if self.path == "/api/validate-yaml":
                self._answer(200, {"errors": [], "warnings": []})
            elif self.path == "/api/repos/create":
                asked = json.loads(body)
                name = f"{asked['organization']}/{asked['name']}"
                hub.repos[name] = {"private": asked.get("visibility") == "private"}
                self._answer(200, {"url": f"{hub.url}/{name}", "name": name})
            elif "/preupload/" in self.path:
                files = [
                    {"path": one["path"], "uploadMode": "regular", "shouldIgnore": False}
                    for one in json.loads(body)["files"]
                ]
                self._answer(200, {"files": files})
            else:
                self._commit(body)

        def _commit(self, body):
            lines = [json.loads(line) for line in body.splitlines()]
            files = {
                line["value"]["path"]: base64.b64decode(line["value"]["content"])
                for line in lines
                if line["key"] == "file"
            }
            (header,) = [line["value"] for line in lines if line["key"] == "header"]
            repo = self.path.removeprefix("/api/models/").partition("/commit/")[0]
            hub.commits.append({"repo": repo, "message": header["summary"], "files": files})
            url = f"{hub.url}/{repo}/commit/{COMMIT}"
            self._answer(200, {"success": True, "commitOid": COMMIT, "commitUrl": url})

    return Handler


@contextmanager
def stand_in_hub():
    """Run the hub inside the block."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, name="stand-in hub")
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
