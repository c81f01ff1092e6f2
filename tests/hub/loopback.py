"""A small hub on loopback that speaks the protocol of `huggingface_hub`, with LFS, Xet, permissions and faults.

Repositories are in memory and large files in a folder. What the real Hub decides, such as which file is large, is
decided here in the same way; what no client of ours asks for is not there and answers 404. Xet's store is a folder to
which the client is sent (`local://`): tokens and hashes go over HTTP, chunks do not.
"""

import base64
import contextlib
import hashlib
import json
import re
import struct
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

OWNER = "someone"
# Token: its user, and whether it may write.
TOKENS = {"hf_owner": (OWNER, True), "hf_reader": (OWNER, False), "hf_stranger": ("stranger", True)}
LARGE = re.compile(r"\.(safetensors|bin|pt|pth|png|parquet)$")
LICENSES = {"apache-2.0", "cc-by-2.0", "cc-by-4.0", "mit", "other"}


@dataclass
class StoredFile:
    """One version of a file: its bytes, or where its bytes are."""

    size: int
    oid: str
    content: bytes | None = None
    xet_hash: str | None = None

    @property
    def is_large(self) -> bool:
        return self.content is None


@dataclass
class Repository:
    """Commits by id, in their order, and branches."""

    private: bool
    commits: dict[str, tuple[str, dict[str, StoredFile]]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, branch: str, message: str, files: dict[str, StoredFile]) -> str:
        seed = f"{len(self.commits)} {branch} {message} {sorted((name, file.oid) for name, file in files.items())}"
        identity = hashlib.sha1(seed.encode()).hexdigest()
        self.commits[identity] = (message, files)
        self.branches[branch] = identity
        return identity


@dataclass
class Fault:
    """What goes wrong with the next requests whose method and path fit."""

    method: str
    path: str
    status: int | None
    after: int
    times: int


class HubError(Exception):
    """An answer that is an error, with the code that clients look at."""

    def __init__(self, status: int, code: str = "", message: str = "") -> None:
        super().__init__(message or code)
        self.status, self.code = status, code


class Hub:
    """The hub: start it with `run`, read what was asked of it in `requests`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.repositories: dict[str, Repository] = {}
        self.requests: list[str] = []
        self.faults: list[Fault] = []
        self.crashes: list[str] = []
        self.lock = threading.RLock()
        (folder / "lfs").mkdir(parents=True)

    @contextlib.contextmanager
    def run(self) -> Iterator["Hub"]:
        """Serve until the end of the block."""
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("BoundHandler", (Handler,), {"hub": self}))
        server.daemon_threads = True
        self.url = f"http://127.0.0.1:{server.server_port}"
        self.storage = f"http://localhost:{server.server_port}/storage"  # another host, to which clients are sent
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    def fail(self, method: str, path: str, status: int | None = None, after: int = 0, times: int = 1) -> None:
        """Answer with a status, or without one hang up after so many bytes of the body."""
        self.faults.append(Fault(method, path, status, after, times))

    def take_fault(self, method: str, path: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.times and fault.method == method and re.search(fault.path, path):
                    fault.times -= 1
                    return fault
        return None

    def files(self, name: str, revision: str = "main") -> dict[str, StoredFile]:
        """Return the files of a repository, as a browser would list them."""
        repository = self.repositories[name]
        return repository.commits[repository.branches.get(revision, revision)][1]

    def read(self, name: str, path: str) -> bytes:
        """Return the bytes of a file that did not come by Xet."""
        file = self.files(name)[path]
        return file.content if file.content is not None else (self.folder / "lfs" / file.oid).read_bytes()

    def plant(self, name: str, path: str, content: bytes) -> None:
        """Add a file behind the client's back."""
        repository = self.repositories[name]
        repository.commit("main", f"Add {path}", {**self.files(name), path: regular_file(content)})

    @property
    def xet_store(self) -> str:
        return f"local://{(self.folder / 'cas').absolute()}"

    def xet_hash(self, oid: str) -> str | None:
        """Find the hash of a file that was uploaded by Xet in the store's shards.

        A shard is a header and then for each file records of 48 bytes: its hash, flags and number of segments; a
        record for each segment; by the flags, as many for verification; by the flags, one that begins with SHA-256.
        """
        for shard in (self.folder / "cas").rglob("shards/*.mdb"):
            records = shard.read_bytes()
            position = 48
            while records[position : position + 32] != b"\xff" * 32:
                flags, segments = struct.unpack_from("<II", records, position + 32)
                end = position + 48 * (1 + segments * (2 if flags >> 31 else 1))
                if flags >> 30 & 1:
                    if hash_words(records[end : end + 32]) == oid:
                        return hash_words(records[position : position + 32])
                    end += 48
                position = end
        return None


def hash_words(raw: bytes) -> str:
    """Spell a hash of Xet's, which is four little-endian words."""
    return "".join(f"{word:016x}" for word in struct.unpack("<4Q", raw))


def regular_file(content: bytes) -> StoredFile:
    return StoredFile(len(content), hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest(), content)


class Handler(BaseHTTPRequestHandler):
    """Answer one connection's requests; `routes` says which method answers which path."""

    hub: Hub
    protocol_version = "HTTP/1.1"
    routes: list[tuple[str, str, Callable[..., Any]]] = []

    def log_message(self, *_: Any) -> None:
        pass

    def answer_request(self) -> None:
        parts = urlsplit(self.path)
        path = unquote(parts.path)
        self.query = parse_qs(parts.query)
        self.hub.requests.append(f"{self.command} {path}")
        self.fault = self.hub.take_fault(self.command, path)
        length = int(self.headers.get("Content-Length") or 0)
        if self.fault and self.fault.status is None and self.command in ("PUT", "POST"):
            self.rfile.read(min(self.fault.after, length))
            self.close_connection = True
            return
        self.body = self.rfile.read(length)
        try:
            if self.fault and self.fault.status is not None:
                raise HubError(self.fault.status, message="the hub is out of order")
            for method, pattern, answer in self.routes:
                if self.command in method.split() and (match := re.fullmatch(pattern, path)):
                    with self.hub.lock:
                        answer(self, **match.groupdict())
                    return
            raise HubError(404, message=f"no route for {self.command} {path}")
        except HubError as error:
            headers = {"X-Error-Code": error.code, "X-Error-Message": str(error)}
            self.send({"error": str(error)}, error.status, {key: value for key, value in headers.items() if value})
        except Exception:
            self.hub.crashes.append(traceback.format_exc())
            raise

    do_GET = do_HEAD = do_POST = do_PUT = answer_request  # noqa: N815

    def send(self, content: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), **(headers or {})}
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.fault and self.fault.status is None:
            self.wfile.write(body[: self.fault.after])
            self.wfile.flush()
            self.close_connection = True
            return
        self.wfile.write(body)

    # Who asks, and for what.

    def user(self) -> tuple[str | None, bool]:
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token and token not in TOKENS:
            raise HubError(401, message="Invalid credentials in Authorization header")
        return TOKENS.get(token, (None, False))

    def repository(self, name: str, write: bool = False) -> Repository:
        user, may_write = self.user()
        repository = self.hub.repositories.get(name)
        if repository is None or (repository.private and user != OWNER):
            raise HubError(404, "RepoNotFound", "Repository not found")
        if write and user is None:
            raise HubError(401, message="Invalid username or password.")
        if write and not (may_write and user == OWNER):
            raise HubError(403, message="You don't have the rights to write to this repository")
        return repository

    def revision(self, name: str, revision: str) -> tuple[str, dict[str, StoredFile]]:
        repository = self.repository(name)
        identity = repository.branches.get(revision, revision)
        if identity not in repository.commits:
            raise HubError(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return identity, repository.commits[identity][1]

    # Repositories.

    def whoami(self) -> None:
        user, may_write = self.user()
        if user is None:
            raise HubError(401, message="Invalid username or password.")
        role = {"role": "write" if may_write else "read", "displayName": "test"}
        self.send({"type": "user", "name": user, "auth": {"accessToken": role}, "orgs": []})

    def create(self) -> None:
        user, may_write = self.user()
        wanted = json.loads(self.body)
        namespace = wanted.get("organization") or user
        name = f"{namespace}/{wanted['name']}"
        if user is None:
            raise HubError(401, message="Invalid username or password.")
        if namespace != user or not may_write:
            raise HubError(403, message=f"You don't have the rights to create a model under {namespace!r}")
        if name in self.hub.repositories:
            answer = {"error": "You already created this model repo", "url": f"{self.hub.url}/{name}"}
            self.send(answer, 409)
            return
        repository = self.hub.repositories[name] = Repository(wanted.get("visibility") == "private")
        repository.commit("main", "initial commit", {".gitattributes": regular_file(b"*.safetensors filter=lfs\n")})
        self.send({"url": f"{self.hub.url}/{name}", "name": name, "id": name})

    def branch(self, name: str, branch: str) -> None:
        repository = self.repository(name, write=True)
        if branch in repository.branches:
            raise HubError(409, message="Reference already exists")
        start = json.loads(self.body or b"{}").get("startingPoint") or "main"
        repository.branches[branch] = self.revision(name, start)[0]
        self.send({})

    def info(self, name: str, revision: str = "main") -> None:
        identity, files = self.revision(name, revision)
        siblings = [{"rfilename": path} for path in sorted(files)]
        private = self.repository(name).private
        self.send({"id": name, "modelId": name, "sha": identity, "private": private, "tags": [], "siblings": siblings})

    def tree(self, name: str, revision: str, folder: str | None) -> None:
        _, files = self.revision(name, revision)
        below = {path: file for path, file in files.items() if f"/{path}".startswith(f"{folder or ''}/")}
        if folder and not below:
            raise HubError(404, "EntryNotFound", f"{folder} does not exist on {revision!r}")
        self.send([self.entry(path, file) for path, file in sorted(below.items())])

    def entry(self, path: str, file: StoredFile) -> dict[str, Any]:
        entry: dict[str, Any] = {"type": "file", "path": path, "size": file.size, "oid": file.oid}
        if file.is_large:
            entry["lfs"] = {"oid": file.oid, "size": file.size, "pointerSize": 134}
        if file.xet_hash:
            entry["xetHash"] = file.xet_hash
        return entry

    def validate_card(self) -> None:
        """Check a card as the real Hub does: its metadata must be YAML, with a licence and languages that exist."""
        try:
            metadata = yaml.safe_load(json.loads(self.body)["content"].split("---")[1]) or {}
        except (yaml.YAMLError, IndexError) as error:
            raise HubError(400, message=f"Invalid metadata in README.md: {error}") from None
        languages = metadata.get("language") or []
        wrong = [code for code in [languages] if isinstance(code, str)] or languages
        errors = [f"language {code!r} is no ISO 639 code" for code in wrong if not re.fullmatch("[a-z]{2,3}", code)]
        if metadata.get("license", "mit") not in LICENSES:
            errors.append(f"license must be one of {sorted(LICENSES)}")
        if errors:
            self.send({"error": "Invalid metadata", "errors": [{"message": error} for error in errors]}, 400)
            return
        self.send({"errors": [], "warnings": []})

    # Uploads.

    def preupload(self, name: str, revision: str) -> None:
        self.repository(name, write=True)
        stored = self.revision(name, revision)[1]
        files = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if LARGE.search(file["path"]) else "regular",
                "shouldIgnore": False,
                "oid": stored[file["path"]].oid if file["path"] in stored else None,
            }
            for file in json.loads(self.body)["files"]
        ]
        self.send({"files": files})

    def lfs_batch(self, name: str) -> None:
        self.repository(name, write=True)
        objects = []
        for wanted in json.loads(self.body)["objects"]:
            answer = {"oid": wanted["oid"], "size": wanted["size"]}
            if not (self.hub.folder / "lfs" / wanted["oid"]).exists():
                upload = {"href": f"{self.hub.storage}/{wanted['oid']}"}
                answer["actions"] = {"upload": upload, "verify": {"href": f"{self.hub.url}/verify"}}
            objects.append(answer)
        self.send({"transfer": "basic", "objects": objects})

    def store(self, oid: str) -> None:
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise HubError(400, message="the content is not what was announced")
        (self.hub.folder / "lfs" / oid).write_bytes(self.body)
        self.send({})

    def verify(self) -> None:
        wanted = json.loads(self.body)
        path = self.hub.folder / "lfs" / wanted["oid"]
        if not path.exists() or path.stat().st_size != wanted["size"]:
            raise HubError(400, message="the upload is not complete")
        self.send({})

    def xet_token(self, name: str, kind: str) -> None:
        self.repository(name, write=kind == "write")
        expires = int(time.time()) + 3600
        headers = {"X-Xet-Cas-Url": self.hub.xet_store, "X-Xet-Access-Token": "x", "X-Xet-Token-Expiration": expires}
        content = {"casUrl": self.hub.xet_store, "exp": expires, "accessToken": "x"}
        self.send(content, headers={key: str(value) for key, value in headers.items()})

    def commit(self, name: str, branch: str) -> None:
        repository = self.repository(name, write=True)
        files = dict(self.revision(name, branch)[1])
        header, *operations = [json.loads(line) for line in self.body.splitlines()]
        for operation in operations:
            value = operation["value"]
            if operation["key"] == "file":
                files[value["path"]] = regular_file(base64.b64decode(value["content"]))
            elif operation["key"] == "lfsFile":
                files[value["path"]] = self.large_file(value["oid"], value["size"])
            elif operation["key"] == "deletedFile":
                del files[value["path"]]
            else:
                raise HubError(400, message=f"unknown operation {operation['key']}")
        identity = repository.commit(branch, header["value"]["summary"], files)
        self.send({"commitUrl": f"{self.hub.url}/{name}/commit/{identity}", "commitOid": identity, "success": True})

    def large_file(self, oid: str, size: int) -> StoredFile:
        if (self.hub.folder / "lfs" / oid).exists():
            return StoredFile(size, oid)
        if xet_hash := self.hub.xet_hash(oid):
            return StoredFile(size, oid, xet_hash=xet_hash)
        raise HubError(400, message=f"the content of {oid} was never uploaded")

    # Downloads.

    def resolve(self, name: str, revision: str, path: str) -> None:
        identity, files = self.revision(name, revision)
        headers = {"X-Repo-Commit": identity}
        if path not in files:
            headers |= {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"}
            self.send({"error": "Entry not found"}, 404, headers)
            return
        file = files[path]
        if file.content is not None:
            self.send_file(file.content, {**headers, "ETag": f'"{file.oid}"'})
            return
        headers |= {"X-Linked-Etag": f'"{file.oid}"', "X-Linked-Size": str(file.size)}
        if file.xet_hash:
            route = f"{self.hub.url}/api/models/{name}/xet-read-token/{identity}"
            headers |= {"X-Xet-Hash": file.xet_hash, "Link": f'<{route}>; rel="xet-auth"'}
        self.send(b"", 302, {**headers, "Location": f"{self.hub.storage}/{file.oid}"})

    def send_large(self, oid: str) -> None:
        self.send_file((self.hub.folder / "lfs" / oid).read_bytes(), {"ETag": f'"{oid}"'})

    def send_file(self, content: bytes, headers: dict[str, str]) -> None:
        headers = {**headers, "Content-Type": "application/octet-stream", "Accept-Ranges": "bytes"}
        if match := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or ""):
            start = int(match[1])
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            self.send(content[start:], 206, headers)
            return
        self.send(content, 200, headers)


NAME = r"(?P<name>[\w.-]+/[\w.-]+)"
Handler.routes = [
    ("GET", "/api/whoami-v2", Handler.whoami),
    ("POST", "/api/repos/create", Handler.create),
    ("POST", "/api/validate-yaml", Handler.validate_card),
    ("POST", f"/api/models/{NAME}/branch/(?P<branch>.+)", Handler.branch),
    ("GET", f"/api/models/{NAME}", Handler.info),
    ("GET", f"/api/models/{NAME}/revision/(?P<revision>.+)", Handler.info),
    ("GET", f"/api/models/{NAME}/tree/(?P<revision>[^/]+)(?P<folder>/.+)?", Handler.tree),
    ("POST", f"/api/models/{NAME}/preupload/(?P<revision>.+)", Handler.preupload),
    ("GET", f"/api/models/{NAME}/xet-(?P<kind>read|write)-token/.+", Handler.xet_token),
    ("POST", f"/api/models/{NAME}/commit/(?P<branch>.+)", Handler.commit),
    ("POST", f"/{NAME}\\.git/info/lfs/objects/batch", Handler.lfs_batch),
    ("PUT", "/storage/(?P<oid>[0-9a-f]{64})", Handler.store),
    ("GET HEAD", "/storage/(?P<oid>[0-9a-f]{64})", Handler.send_large),
    ("POST", "/verify", Handler.verify),
    ("GET HEAD", f"/{NAME}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", Handler.resolve),
]
