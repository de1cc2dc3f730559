"""A small hub: it keeps what is pushed to it and gives it back, over HTTP, as the real one does.

Only the addresses that an upload and a download of a model need: repositories, preuploads, large
files (git-lfs), commits, trees, files. The client is the real `huggingface_hub`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


class Hub:
    """What is stored: blobs by their SHA-256; commits, a table of files each; branches."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.commits: dict[str, dict[str, str]] = {}
        self.branches: dict[str, dict[str, str]] = {}
        self.large: set[str] = set()
        self.asked: list[str] = []

    def create(self, name: str) -> None:
        self.branches.setdefault(name, {"main": self.keep({})})

    def keep(self, files: dict[str, str]) -> str:
        commit = hashlib.sha1(json.dumps([files, len(self.commits)]).encode()).hexdigest()
        self.commits[commit] = files
        return commit

    def put(self, content: bytes) -> str:
        key = hashlib.sha256(content).hexdigest()
        self.blobs[key] = content
        return key

    def files(self, name: str, revision: str = "main") -> dict[str, bytes]:
        commit = self.branches[name].get(revision, revision)
        return {path: self.blobs[key] for path, key in self.commits[commit].items()}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *args: Any) -> None:
        self.hub.asked.append(format % args)

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _answer(
        self, content: Any, status: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _missing(self, what: str) -> None:
        self._answer({"error": what}, 404, {"X-Error-Code": what})

    def do_POST(self) -> None:
        path, body, hub = unquote(urlsplit(self.path).path), self._body(), self.hub
        address = f"http://{self.headers['Host']}"
        if self.headers.get("Authorization") != "Bearer hf_secret":
            return self._answer({"error": "who are you?"}, 401)
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'somebody'}/{asked['name']}"
            hub.create(name)
            return self._answer({"url": f"{address}/{name}", "name": name})
        if path == "/api/validate-yaml":
            assert json.loads(body)["content"].startswith("---\n")
            return self._answer({"errors": [], "warnings": []})
        if match := re.fullmatch(r"/api/models/(.+)/preupload/(.+)", path):
            files = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(body)["files"]
            ]
            return self._answer({"files": files})
        if re.fullmatch(r"/.+\.git/info/lfs/objects/batch", path):
            objects = [
                {**blob, "actions": {"upload": {"href": f"{address}/lfs/{blob['oid']}"}}}
                for blob in json.loads(body)["objects"]
            ]
            return self._answer({"transfer": "basic", "objects": objects})
        if match := re.fullmatch(r"/api/models/(.+)/branch/(.+)", path):
            name, branch = match.groups()
            hub.branches[name].setdefault(branch, hub.branches[name]["main"])
            return self._answer({})
        if match := re.fullmatch(r"/api/models/(.+)/commit/(.+)", path):
            name, branch = match.groups()
            files = dict(hub.commits[hub.branches[name][branch]])
            for line in body.splitlines():
                entry = json.loads(line)
                value = entry["value"]
                if entry["key"] == "file":
                    assert value["encoding"] == "base64"
                    files[value["path"]] = hub.put(base64.b64decode(value["content"]))
                elif entry["key"] == "lfsFile":
                    assert value["oid"] in hub.blobs
                    files[value["path"]] = value["oid"]
                    hub.large.add(value["oid"])
            commit = hub.branches[name][branch] = hub.keep(files)
            url = f"{address}/{name}/commit/{commit}"
            return self._answer({"commitOid": commit, "commitUrl": url, "hookOutput": ""})
        return self._missing("EntryNotFound")

    def do_PUT(self) -> None:
        key = self.hub.put(self._body())
        if not self.path.endswith(key):
            return self._answer({"error": "another content"}, 400)
        return self._answer({})

    def do_GET(self) -> None:
        path, hub = unquote(urlsplit(self.path).path), self.hub
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/(.+)|/tree/(.+))?", path):
            name = match[1]
            if name not in hub.branches:
                return self._missing("RepoNotFound")
            asked = match[3] or match[4] or "main"
            commit = hub.branches[name].get(asked, asked)
            if commit not in hub.commits:
                return self._missing("RevisionNotFound")
            entries = [self._entry(*file) for file in hub.commits[commit].items()]
            if match[4]:
                return self._answer(entries)
            siblings = [{"rfilename": entry["path"]} for entry in entries]
            return self._answer({"id": name, "modelId": name, "sha": commit, "siblings": siblings})
        if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            name, asked, file = match.groups()
            commit = hub.branches[name].get(asked, asked)
            key = hub.commits[commit].get(file)
            if key is None:
                return self._missing("EntryNotFound")
            headers = {"ETag": f'"{key}"', "X-Repo-Commit": commit}
            return self._answer(hub.blobs[key], headers=headers)
        return self._missing("EntryNotFound")

    do_HEAD = do_GET

    def _entry(self, path: str, key: str) -> dict[str, Any]:
        size = len(self.hub.blobs[key])
        entry: dict[str, Any] = {"type": "file", "path": path, "size": size, "oid": key}
        if key in self.hub.large:
            entry["lfs"] = {"oid": key, "size": size, "pointerSize": 130}
        return entry


@contextmanager
def serving() -> Iterator[tuple[str, Hub]]:
    """Run a hub on a free port of this machine; gives its address and what it holds."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("OwnHandler", (Handler,), {"hub": hub}))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
