"""A local stand-in of the hub's HTTP interface, which the real clients talk to."""

import base64
import hashlib
import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Server(ThreadingHTTPServer):
    """The hub's state.

    Attributes:
        repositories: the files of each repository by ``("models" | "datasets", "user/name")``.
        stored: the large files by their SHA-256.
        requests: every request: method, path, body.
        private: the names of the repositories that were made private.
        refusal: what it answers to everything that is sent to it; None takes it.
        titles: that of the last commit of each file of a repository.
    """

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories, self.stored, self.requests, self.private, self.refusal = {}, {}, [], set(), None
        self.titles = {}
        self.address = f"http://127.0.0.1:{self.server_port}"
        self.environment = {**os.environ, "HF_ENDPOINT": self.address, "HF_TOKEN": "hf_none", "HF_HUB_OFFLINE": "0"}
        self.environment |= {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1"}  # files go by plain HTTP

    def add(self, kind, name, folder):
        """Put a folder's files into a repository."""
        files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
        self.repositories[kind, name] = {path: file.read_bytes() for path, file in files.items()}

    def commit(self, repository, lines):
        files, titles = self.repositories.setdefault(repository, {}), self.titles.setdefault(repository, {})
        for key, value in [(line["key"], line["value"]) for line in lines]:
            if key == "header":
                title = value["summary"]
                continue
            titles[value["path"]] = title
            if key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                files[value["path"]] = self.stored[value["oid"]]
            else:
                assert key == "deletedFile"
                del files[value["path"]]


class Handler(BaseHTTPRequestHandler):
    """Answers as the hub does."""

    def log_message(self, *arguments):
        pass

    def _answer(self, value, status=200, headers=()):
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, content in dict(headers).items():
            self.send_header(name, content)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _nothing(self, code="EntryNotFound"):
        self._answer({"error": "not found"}, 404, {"X-Error-Code": code, "X-Repo-Commit": COMMIT})

    def _repository(self):
        """Return the files of the repository that the path names, and what follows; None if there is none."""
        parts = [part for part in unquote(urlsplit(self.path).path).split("/") if part]
        parts = parts[1:] if parts[0] == "api" else parts
        kind = parts.pop(0) if parts[0] in ("models", "datasets") else "models"
        name = "/".join(parts[:2])
        return kind, name, self.server.repositories.get((kind, name)), parts[2:]

    def do_PUT(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.requests.append(("PUT", self.path, body))
        assert hashlib.sha256(body).hexdigest() == self.path.rpartition("/")[2]
        self.server.stored[self.path.rpartition("/")[2]] = body
        self._answer({})

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        self.server.requests.append((self.command, self.path, None))
        kind, name, files, rest = self._repository()
        if files is None:
            self._nothing("RepoNotFound")
        elif rest[:1] == ["resolve"]:
            body = files.get("/".join(rest[2:]))
            if body is None:
                self._nothing()
            else:
                tag = f'"{hashlib.sha256(body).hexdigest()}"'
                self._answer(body, headers={"X-Repo-Commit": COMMIT, "ETag": tag})
        elif rest[:1] == ["tree"]:
            facts = {path: {"size": len(body), "oid": hashlib.sha1(body).hexdigest()} for path, body in files.items()}
            if "expand=true" in self.path.lower():
                for path, title in self.server.titles.get((kind, name), {}).items():
                    commit = {"id": COMMIT, "title": title, "date": "2026-01-01T00:00:00.000Z"}
                    facts.get(path, {})["lastCommit"] = commit
            folders = {path.rpartition("/")[0] for path in files if "/" in path}
            entries = [{"type": "directory", "path": path, "oid": COMMIT} for path in folders]
            self._answer([*entries, *({"type": "file", "path": path, **fact} for path, fact in facts.items())])
        elif rest[:1] in ([], ["revision"]):
            siblings = [{"rfilename": path} for path in files]
            self._answer(
                {"id": name, "sha": COMMIT, "siblings": siblings, "private": name in self.server.private, "tags": []}
            )
        else:
            self._nothing()

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.requests.append(("POST", self.path, body))
        address = self.server.address
        if self.server.refusal is not None:
            return self._answer({"error": self.server.refusal}, 403)
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization', 'me')}/{asked['name']}"
            if ("models", name) in self.server.repositories:
                return self._answer({"error": "it exists", "url": f"{address}/{name}"}, 409)
            self.server.repositories["models", name] = {}
            if asked.get("private") or asked.get("visibility") == "private":
                self.server.private.add(name)
            return self._answer({"url": f"{address}/{name}"})
        if self.path == "/api/validate-yaml":
            return self._answer({"errors": [], "warnings": []})
        if self.path.endswith("/info/lfs/objects/batch"):
            objects = [
                {**one, "authenticated": True, "actions": {"upload": {"href": f"{address}/upload/{one['oid']}"}}}
                for one in json.loads(body)["objects"]
            ]
            return self._answer({"transfer": "basic", "objects": objects})
        kind, name, _, rest = self._repository()
        if rest[:1] == ["preupload"]:
            asked = [file["path"] for file in json.loads(body)["files"]]
            modes = {path: "lfs" if path.endswith(".safetensors") else "regular" for path in asked}  # large files apart
            modes_of = [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in modes.items()]
            return self._answer({"files": modes_of})
        if rest[:1] == ["commit"]:
            self.server.commit((kind, name), [json.loads(line) for line in body.decode().splitlines()])
            url = f"{address}/{name}/commit/{COMMIT}"
            return self._answer({"success": True, "commitOid": COMMIT, "commitUrl": url})
        return self._nothing()


@pytest.fixture
def hub():
    server = Server()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()
