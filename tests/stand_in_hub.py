"""A small stand-in for the Hugging Face Hub on loopback, with the requests that loading uses.

Its answers follow the hub's protocol, https://huggingface.co/docs/hub/api, and the headers that
huggingface_hub reads.
"""

from __future__ import annotations

import hashlib
import json
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit


@dataclass
class Repository:
    """A model or dataset: the files of each commit by path, and the branches."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    gated: bool = False

    def commit(self, files, branch="main"):
        """Add a commit and move a branch to it."""
        sha = hashlib.sha1(repr(sorted(files.items())).encode(), usedforsecurity=False).hexdigest()
        self.commits[sha] = files
        self.refs[branch] = sha
        return sha


class Hub(ThreadingHTTPServer):
    """The server; `requests` lists the method and path of every request.

    A dataset's name in `repositories` begins with ``datasets/``.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories = {}
        self.requests = []
        self.broken = False

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    def asked(self, part):
        """Return the requests whose line contains a text."""
        return [line for line in self.requests if part in line]


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self._answer()

    def do_GET(self):
        self._answer()

    def _answer(self):
        self.server.requests.append(f"{self.command} {self.path}")
        parts = urlsplit(self.path)
        path = [unquote(part) for part in parts.path.strip("/").split("/")]
        if self.server.broken:
            self._send(503, b"")
        elif path in (["api", "models"], ["api", "datasets"]):
            self._search(parse_qs(parts.query), datasets=path[1] == "datasets")
        elif path[:2] == ["api", "models"]:
            self._api("/".join(path[2:4]), path[4:])
        elif path[:2] == ["api", "datasets"]:
            self._api("/".join(path[1:4]), path[4:])
        elif path[:1] == ["datasets"] and path[3:4] == ["resolve"]:
            self._file("/".join(path[:3]), path[4], "/".join(path[5:]))
        elif path[2:3] == ["resolve"]:
            self._file("/".join(path[:2]), path[3], "/".join(path[4:]))
        else:
            self._refuse(404, "EntryNotFound")

    def _search(self, query, *, datasets):
        text, author = query.get("search", [""])[0], query.get("author", [""])[0]
        names = [
            name.removeprefix("datasets/")
            for name in self.server.repositories
            if name.startswith("datasets/") is datasets
        ]
        names = [n for n in names if text.lower() in n.lower() and n.startswith(author)]
        self._json([{"id": name, "modelId": name} for name in names])

    def _api(self, name, rest):
        repository = self.server.repositories.get(name)
        if repository is None:
            self._refuse(401, "RepoNotFound")
        elif rest == ["refs"]:
            branches = [
                {"name": ref, "ref": f"refs/heads/{ref}", "targetCommit": sha}
                for ref, sha in repository.refs.items()
            ]
            self._json({"branches": branches, "tags": [], "converts": []})
        else:
            kind, revision = rest[0] if rest else "revision", rest[1] if rest[1:] else "main"
            sha = repository.refs.get(revision, revision)
            if sha not in repository.commits:
                self._refuse(404, "RevisionNotFound")
            elif kind == "tree":
                self._json([_entry(*item) for item in repository.commits[sha].items()])
            else:
                siblings = [{"rfilename": path} for path in repository.commits[sha]]
                bare = name.removeprefix("datasets/")
                self._json({"id": bare, "modelId": bare, "sha": sha, "siblings": siblings})

    def _file(self, name, revision, file):
        repository = self.server.repositories[name]
        sha = repository.refs.get(revision, revision)
        if repository.gated:
            self._refuse(403, "GatedRepo")
        elif file not in repository.commits.get(sha, {}):
            self._refuse(404, "EntryNotFound")
        else:
            data = repository.commits[sha][file]
            headers = {"X-Repo-Commit": sha, "ETag": f'"{_listed_hash(file, data)}"'}
            if self.headers.get("range"):
                first, _, last = self.headers["range"].removeprefix("bytes=").partition("-")
                end = min(int(last or len(data)), len(data) - 1)
                headers["Content-Range"] = f"bytes {first}-{end}/{len(data)}"
                self._send(206, data[int(first) : end + 1], headers)
            else:
                self._send(200, data, headers)

    def _json(self, value):
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _refuse(self, status, code):
        self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

    def _send(self, status, body, headers=None):
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _listed_hash(file, data):
    """Return the SHA-256 of a large file, or Git's SHA-1 of any other."""
    if file.endswith((".safetensors", ".bin", ".parquet", ".arrow")):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def _entry(path, data):
    return {
        "type": "file",
        "path": path,
        "size": len(data),
        "oid": hashlib.sha1(data, usedforsecurity=False).hexdigest(),
    }


@contextmanager
def serving():
    """Run the server on a free port inside the block."""
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        thread.join()
        hub.server_close()
