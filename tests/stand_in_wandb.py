"""A small stand-in for the W&B service on loopback, which keeps all that it receives.

It answers the requests of this project's W&B client: the user, the state of a run, runs, their
history by line, files, and artifacts with their lineage. It can answer slowly, with errors, or not
at all.
"""

from __future__ import annotations

import json
import re
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

ENTITY = "lab"


@dataclass
class Run:
    """The data of one run."""

    name: str
    project: str
    sweep: str | None = None
    group: str | None = None
    job_type: str | None = None
    display_name: str | None = None
    tags: list[str] = field(default_factory=list)
    notes: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    lines: dict[str, dict[int, str]] = field(default_factory=dict)  # of a streamed file, by number
    files: dict[str, bytes] = field(default_factory=dict)
    exit_code: int | None = None
    is_begun: bool = False  # by a client; an agent's run exists before

    @property
    def history(self):
        found = self.lines.get("wandb-history.jsonl", {})
        return [json.loads(found[number]) for number in sorted(found)]

    @property
    def summary(self):
        found = self.lines.get("wandb-summary.json", {})
        return json.loads(found[max(found)]) if found else {}

    @property
    def settings(self):
        """Return the configuration as a user sees it."""
        return {key: one["value"] for key, one in self.config.items() if key != "_wandb"}


@dataclass
class Artifact:
    """One version of an artifact; ``made_by`` is the run that logged it first."""

    id: str
    type: str
    name: str
    digest: str
    made_by: str
    metadata: dict[str, Any]
    state: str = "PENDING"
    files: dict[str, str] = field(default_factory=dict)  # path -> its MD5 in the manifest


class Service:
    """The state of the server, and its behaviour."""

    def __init__(self):
        self.runs = {}
        self.artifacts = {}
        self.used = []  # by a run, one version
        self.operations = []
        self.uploads = {}
        self.unknown = []
        self.delay_s = 0.0
        self.refuses = lambda _: False  # answers 500 to such an operation
        self.hangs = lambda _: False
        self.sweeps = None  # answers about sweeps, if a test wants some
        self.lock = threading.RLock()
        self.released = threading.Event()
        self.url = ""

    # Questions of a test.

    @property
    def lineage(self):
        """Return the edges from inputs to runs, and from runs to outputs."""
        made = {(one.made_by, one.name) for one in self.artifacts.values() if one.made_by}
        return made | {(artifact.name, run) for run, artifact in self.used}

    def versions(self, name):
        return [one for one in self.artifacts.values() if one.name == name]

    def expect(self, name, project, sweep, config):
        """Add a run that a client has not begun yet; an agent will be told of it."""
        self.runs[name] = Run(name, project, sweep=sweep, config=config)

    # Requests of the client.

    def graphql(self, operation, told, query):
        name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", operation).lower()
        answer = getattr(self, f"_on_{name}", getattr(self.sweeps, f"on_{name}", None))
        if answer is None:
            self.unknown.append(f"{operation} {json.dumps(told)[:300]} {query[:600]}")
            return {}
        with self.lock:
            try:
                return answer(told.get("input") or told)
            except (KeyError, TypeError) as error:
                self.unknown.append(f"{operation} {error!r} {json.dumps(told)[:600]} {query[:900]}")
                raise ValueError from error

    def _on_viewer(self, _):
        me = {"id": "me", "entity": ENTITY, "username": "me", "email": "", "flags": "{}"}
        return {"viewer": {**me, "teams": {"edges": []}, "apiKeys": {"edges": []}}}

    def _on_server_features_query(self, _):
        return {"serverInfo": {"features": []}}

    def _on_run_resume_status(self, told):
        run = self.runs.get(told["name"])
        bucket = None if run is None else self._bucket(run)
        model = {"id": "model", "name": told["project"], "entity": {"id": "e", "name": ENTITY}}
        return {"model": {**model, "bucket": bucket}}

    def _bucket(self, run):
        tail = [json.dumps(line) for line in run.history[-1:]]
        return {
            "id": f"id-{run.name}",
            "name": run.name,
            "displayName": run.display_name,
            "description": None,
            "summaryMetrics": json.dumps(run.summary),
            "historyLineCount": len(run.lines.get("wandb-history.jsonl", {})),
            "eventsLineCount": 0,
            "logLineCount": 0,
            "historyTail": json.dumps(tail),
            "eventsTail": "[]",
            "config": json.dumps(run.config),
            "tags": run.tags,
            "notes": run.notes,
            "wandbConfig": json.dumps({"t": 1}),
            "sweepName": run.sweep,
            "project": {
                "id": "p",
                "name": run.project,
                "entity": {"id": "e", "name": ENTITY},
            },
        }

    def _on_upsert_bucket(self, told):
        is_new = told["name"] not in self.runs
        run = self.runs.setdefault(told["name"], Run(told["name"], told["project"]))
        run.is_begun = True
        for ours, theirs in (
            ("group", "groupName"),
            ("job_type", "jobType"),
            ("display_name", "displayName"),
            ("tags", "tags"),
            ("notes", "notes"),
            ("sweep", "sweep"),
        ):
            if told.get(theirs) is not None:
                setattr(run, ours, told[theirs])
        if told.get("config") is not None:
            run.config = json.loads(told["config"])
        return {"upsertBucket": {"bucket": self._bucket(run), "inserted": is_new}}

    def _on_create_run_files(self, told):
        files = [
            {"name": name, "uploadUrl": f"{self.url}/put/run/{told['run']}/{name}"}
            for name in told["files"]
        ]
        made = {"runID": f"id-{told['run']}", "uploadHeaders": [], "files": files}
        return {"createRunFiles": made}

    def _on_artifact_type(self, told):
        found = self.versions(told["name"].partition(":")[0])
        known = {"artifactType": {"name": found[-1].type}} if found else None
        return {"project": {"artifact": known}}

    def _on_create_artifact(self, told):
        name, digest = told["artifactCollectionName"], told["digest"]
        number = len(self.versions(name))
        known = next((one for one in self.versions(name) if one.digest == digest), None)
        if known is None:
            known = Artifact(
                id=f"artifact-{len(self.artifacts)}",
                type=told["artifactTypeName"],
                name=name,
                digest=digest,
                made_by=told.get("runName") or "",
                metadata=json.loads(told.get("metadata") or "{}"),
            )
            self.artifacts[known.id] = known
        latest = {"id": known.id, "versionIndex": number}
        return {
            "createArtifact": {
                "artifact": {
                    "id": known.id,
                    "state": known.state,
                    "artifactSequence": {"id": name, "name": name, "latestArtifact": latest},
                }
            }
        }

    def _on_create_artifact_manifest(self, told):
        url = f"{self.url}/put/manifest/{told['artifactID']}"
        made = {
            "id": f"manifest-{told['artifactID']}",
            "file": {
                "id": "f",
                "name": "f",
                "displayName": "f",
                "uploadUrl": url,
                "uploadHeaders": [],
            },
        }
        return {"createArtifactManifest": {"artifactManifest": made}}

    def _on_create_artifact_files(self, told):
        edges = [{"node": self._file(one)} for one in told["artifactFiles"]]
        return {"createArtifactFiles": {"files": {"edges": edges}}}

    def _file(self, told):
        owner, name = told["artifactID"], told["name"]
        return {
            "id": f"{owner}/{name}",
            "name": name,
            "displayName": name,
            "uploadUrl": f"{self.url}/put/file/{owner}/{name}",
            "uploadHeaders": [],
            "uploadMultipartUrls": None,
            "storagePath": name,
            "artifact": {"id": owner},
        }

    def _on_commit_artifact(self, told):
        artifact = self.artifacts[told["artifactID"]]
        artifact.state = "COMMITTED"
        return {"commitArtifact": {"artifact": {"id": artifact.id, "digest": artifact.digest}}}

    def _on_artifact_by_id(self, told):
        one = self.artifacts[told["id"]]
        project = {"id": "p", "internalId": "p", "name": "p", "entity": {"name": ENTITY}}
        known = {
            "__typename": "Artifact",
            "id": one.id,
            "artifactSequence": {
                "__typename": "ArtifactSequence",
                "name": one.name,
                "project": project,
            },
            "versionIndex": self.versions(one.name).index(one),
            "artifactType": {"name": one.type},
            "metadata": json.dumps(one.metadata),
            "ttlDurationSeconds": 0,
            "ttlIsInherited": True,
            "tags": [],
            "aliases": [],
            "state": one.state,
            "size": 0,
            "digest": one.digest,
            "fileCount": len(one.files),
            "createdAt": "2026-11-20T05:58:01",
        }
        absent = ("description", "historyStep", "commitHash", "updatedAt")
        return {"artifact": known | dict.fromkeys(absent)}

    def _on_use_artifact(self, told):
        artifact = self.artifacts[told["artifactID"]]
        self.used.append((told["runName"], artifact))
        return {"useArtifact": {"artifact": {"id": artifact.id, "digest": artifact.digest}}}

    def streamed(self, name, told):
        with self.lock:
            run = self.runs.setdefault(name, Run(name, "?"))
            for file, part in (told.get("files") or {}).items():
                lines = run.lines.setdefault(file, {})
                for i, line in enumerate(part["content"]):
                    lines[part["offset"] + i] = line
            if told.get("complete"):
                run.exit_code = told.get("exitcode")
            is_stopped = self.sweeps is not None and name in self.sweeps.stopping
        return {"limits": {}, "stopped": is_stopped}

    def stored(self, path, body):
        _, kind, owner, *rest = path.removeprefix("/").split("/")
        with self.lock:
            self.uploads[path] = body
            if kind == "run":
                self.runs[owner].files["/".join(rest)] = body
            elif kind == "manifest":
                contents = json.loads(body)["contents"]
                self.artifacts[owner].files = {k: v["digest"] for k, v in contents.items()}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    service: Service

    def log_message(self, *_):
        pass

    def _body(self):
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline().strip(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _any(self):
        try:
            self._answer()
        except (ConnectionError, TimeoutError):
            self.close_connection = True

    def handle(self):
        """Answer until the client disconnects in any way."""
        try:
            super().handle()
        except ConnectionError:
            self.close_connection = True

    do_GET = do_POST = do_PUT = _any  # as the library spells them

    def _answer(self):
        body, path, service = self._body(), unquote(self.path), self.service
        told = json.loads(body) if path == "/graphql" else {}
        operation = told.get("operationName") or _named(told.get("query", "")) or path
        with service.lock:
            service.operations.append(operation)
        if service.hangs(operation):
            service.released.wait(120)
            self.close_connection = True
            return
        time.sleep(service.delay_s)
        if service.refuses(operation):
            self._send(500, {"errors": [{"message": "refused"}]})
        elif path == "/graphql":
            try:
                answer = service.graphql(operation, told.get("variables") or {}, told["query"])
            except ValueError:
                self._send(400, {"errors": [{"message": "not understood"}]})
            else:
                self._send(200, {"data": answer})
        elif path.endswith("/file_stream"):
            self._send(200, service.streamed(path.split("/")[-2], json.loads(body)))
        elif path.startswith("/put/"):
            service.stored(path, body)
            self._send(200, {})
        else:
            service.unknown.append(path)
            self._send(404, {})

    def _send(self, status, value):
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _named(query):
    words = query.replace("(", " ").replace("{", " ").split()
    return words[1] if len(words) > 1 else ""


@contextmanager
def serving(service):
    """Serve on a free port inside the block."""
    handler = type("Handler", (_Handler,), {"service": service})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    service.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield service
    finally:
        service.released.set()
        server.shutdown()
        server.server_close()
        thread.join()
