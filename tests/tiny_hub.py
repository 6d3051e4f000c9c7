"""A hub of models on the loopback interface, with its repositories in memory."""

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub import HfApi
from loopback import Silent, served_by

REPO = "me/desk"


class TinyHub(Silent):
    """Answers what a push asks; weights are listed as files of git-lfs."""

    files: dict[str, bytes]
    commits = 0

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        return body

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        sha = f"{self.commits:040}"
        if "/resolve/" in path:
            data = self.files[path.split("/", 5)[5]]
            digest = hashlib.sha1(data).hexdigest()
            self.answer(data, ETag=f'"{digest}"', X_Repo_Commit=sha)
        elif "/tree/" in path:
            self.answer([listed(name, data) for name, data in self.files.items()])
        else:
            self.answer({"id": REPO, "private": True, "sha": sha, "siblings": []})

    do_HEAD = do_GET

    def do_POST(self) -> None:
        body = self._body()
        if "/preupload/" in self.path:
            asked = json.loads(body)["files"]
            answer = {"uploadMode": "regular", "shouldIgnore": False}
            self.answer({"files": [{"path": file["path"], **answer} for file in asked]})
        elif "/commit/" in self.path:
            hub = type(self)
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    hub.files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "deletedFile":
                    del hub.files[value["path"]]
            hub.commits += 1
            url = f"http://127.0.0.1/{REPO}/commit/{hub.commits:040}"
            self.answer({"success": True, "commitOid": f"{hub.commits:040}", "commitUrl": url})
        else:
            self.answer({"url": f"http://127.0.0.1/{REPO}", "errors": [], "warnings": []})


def listed(name: str, data: bytes) -> dict[str, object]:
    facts = {"type": "file", "path": name, "size": len(data), "oid": "0" * 40}
    if name.endswith(".safetensors"):
        digest = hashlib.sha256(data).hexdigest()
        facts["lfs"] = {"oid": digest, "size": len(data), "pointerSize": 130}
    return facts


@contextmanager
def tiny_hub() -> Iterator[tuple[type[TinyHub], HfApi]]:
    """Serve an empty repository; yield what it has, and a client of it."""
    hub = type("Hub", (TinyHub,), {"files": {}})
    with served_by(hub) as url:
        yield hub, HfApi(endpoint=url, token="hf_not_a_token")
