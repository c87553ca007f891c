"""`--model owner/name`: a model of the hub is found in the cache, or fetched with consent, here from a small server."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from pagedkv.engine.checkpoint import BUNDLED, hub
from tests.records import DEMO_ANSWER

from .test_conversation import Terminal

COMMIT = "c" * 40
READ = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
OTHERS = {"README.md": b"#", "consolidated.safetensors": b"0" * 10**6, "pytorch_model.bin": b"0", "onnx/a.json": b"{}"}


class Hub(BaseHTTPRequestHandler):
    """The part of the hub's API that huggingface_hub calls to fetch a model."""

    files: dict[str, dict[str, bytes]]
    refused: set[str]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        _, _, path = self.path.partition("?")[0].strip("/").rpartition("api/models/")
        name, rest = "/".join(path.split("/")[:2]), path.split("/")[2:]
        files = self.files.get(name)
        if files is None:
            return self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})
        sizes = {file: len(data) for file, data in files.items()}
        if self.path.startswith("/api") and rest[:1] == ["tree"]:
            listed: Any = [{"type": "file", "path": f, "size": n, "oid": f"{n:040}"} for f, n in sizes.items()]
        elif self.path.startswith("/api"):
            siblings = [{"rfilename": file, "size": size} for file, size in sizes.items()]
            listed = {"_id": "0", "id": name, "modelId": name, "sha": COMMIT, "siblings": siblings, "tags": []}
        elif name in self.refused:
            return self._answer(403, b"", {"X-Error-Code": "GatedRepo"})
        else:
            file = "/".join(rest[2:])
            return self._answer(200, files[file], {"ETag": f'"{sizes[file]:040}"', "X-Repo-Commit": COMMIT})
        return self._answer(200, json.dumps(listed).encode(), {})

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body if self.command == "GET" else b"")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(tmp_path, monkeypatch):
    """Run a hub with a model that can be fetched, one that is gated, and two that the engine cannot load."""
    whole = {path.name: path.read_bytes() for path in BUNDLED.iterdir() if path.is_file()} | OTHERS
    config = json.loads(whole["config.json"])
    handler = type("_Hub", (Hub,), {"refused": {"owner/gated"}, "files": {
        "owner/name": whole, "owner/gated": whole,
        "owner/other": {**whole, "config.json": json.dumps(config | {"model_type": "mamba"}).encode()},
        "owner/old": {name: data for name, data in whole.items() if not name.endswith("safetensors")},
    }})  # fmt: skip
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{serving.server_port}"
        for name, value in {
            "ENDPOINT": url,
            "HUGGINGFACE_CO_URL_TEMPLATE": url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(tmp_path / "hub"),
            "HF_HUB_OFFLINE": False,
        }.items():
            monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
        yield handler
        serving.shutdown()


def cached(tmp_path: Path, model: str) -> set[str]:
    """Return the names of the files of a snapshot."""
    folder = tmp_path / "hub" / f"models--{model.replace('/', '--')}" / "snapshots" / COMMIT
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_model_is_fetched_once_and_only_the_files_that_the_engine_reads(command, server, tmp_path):
    assert command("generate", "--model", "owner/name", "--fetch").out == DEMO_ANSWER + "\n"
    assert cached(tmp_path, "owner/name") == READ
    server.files.clear()
    assert command("generate", "--model", "owner/name", "--speculate", "owner/name").out == DEMO_ANSWER + "\n"


def test_fit_fetches_the_config_alone_and_a_part_is_no_model(command, server, tmp_path):
    status, out, err = command("fit", "--model", "owner/name", "--memory", "1GB", "--json")
    assert (status, err, json.loads(out)["weight_bytes"]) == (0, "", 9_225_216)
    assert cached(tmp_path, "owner/name") == {"config.json"}
    assert "give --fetch, or fetch it with: hf download owner/name" in command("generate", "--model", "owner/name").err


def test_a_download_that_ended_goes_on(command, server):
    server.refused.add("owner/name")
    ask = ("generate", "--model", "owner/name", "--fetch")
    assert command(*ask).status == 2
    assert hub.find("owner/name") is None
    server.refused.clear()
    assert command(*ask).out == DEMO_ANSWER + "\n"


REFUSED = {
    "generate --model owner/name": "no whole snapshot of it in the Hugging Face cache HUB; give --fetch, or",
    "serve --model owner/name --port 0": "give --fetch, or fetch it with: hf download owner/name",
    "generate --speculate owner/name": "give --fetch, or fetch it with: hf download owner/name",
    "generate --model owner/none --fetch": "it cannot be fetched from the hub: the hub has no such model, or it is",
    "generate --model owner/gated --fetch": "it cannot be fetched from the hub: accept its terms at http://127",
    "generate --model owner/other --fetch": "model_type is 'mamba'; this decoder knows llama",
    "generate --model owner/old --fetch": "owner/old has no weights in safetensors format on the hub",
    "fit --model owner/none": "no folder owner/none, and it cannot be fetched from the hub: the hub has no such",
}


@pytest.mark.parametrize("line", REFUSED)
def test_a_model_that_cannot_be_fetched_is_refused_in_one_line(command, server, tmp_path, line):
    status, out, err = command(*line.split())
    assert (status, out, err.count("\n"), err[:15]) == (2, "", 1, "pagedkv: error:"), err
    assert REFUSED[line].replace("HUB", str(tmp_path / "hub")) in err
    assert cached(tmp_path, line.split()[2]) <= {"config.json"}


def test_without_a_network_or_the_library_the_line_says_so(command, server, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    ask = ("generate", "--model", "owner/name", "--fetch")
    assert "it cannot be fetched from the hub: ConnectError: [Errno" in command(*ask).err
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "it cannot be fetched from the hub: HF_HUB_OFFLINE forbids the network" in command(*ask).err
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "is not installed; give a folder, or install huggingface_hub" in command(*ask).err


def test_a_user_at_a_terminal_is_asked(server, tmp_path, monkeypatch):
    import huggingface_hub

    monkeypatch.setenv("HF_ENDPOINT", huggingface_hub.constants.ENDPOINT)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)  # set by tests/on_gpu for its process
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    for answer, shown, status in (
        ("n\n", "hf download owner/name", 2),
        ("\x04", "hf download", 2),
        ("\n", DEMO_ANSWER, 0),
    ):
        terminal = Terminal("generate", "--model", "owner/name")
        terminal.expect("owner/name is not on this machine. Fetch it from the hub (9.")
        terminal.expect("(y)")
        terminal.type(answer)
        terminal.expect(shown)
        assert terminal.end() == status
    shutil.rmtree(tmp_path / "hub")
