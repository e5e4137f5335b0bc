"""Models of the hub: from its cache when offline, one clear line when there is no way to them."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from toy_checkpoints import TOYS, write

from specter_runtime import hub
from specter_runtime.checkpoint import find_folder, open_checkpoint
from specter_traces import UsageError

COMMIT = "0123456789abcdef0123456789abcdef01234567"

SCRIPT = """
import json, sys
sys.path[:0] = {path!r}
from specter_traces import SpecterError
from specter_runtime.hub import snapshot
answers = []
for model in {models!r}:
    try:
        answers.append([0, str(snapshot(model))])
    except SpecterError as error:
        answers.append([error.exit_code, str(error)])
print(json.dumps(answers))
"""


def ask(models: list[str], **environment: str) -> list[tuple[int, str]]:
    """What a fresh process with `environment` says of each model: exit code and text."""
    script = SCRIPT.format(path=sys.path, models=models)
    run = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        env={"PATH": "/usr/bin:/bin", "HF_HUB_DISABLE_TELEMETRY": "1", **environment},
    )
    assert run.returncode == 0, run.stderr
    answers = [(code, text) for code, text in json.loads(run.stdout.splitlines()[-1])]
    assert all(len(text.splitlines()) == 1 for _, text in answers)
    return answers


def cached(cache: Path, model: str) -> Path:
    """A toy in a cache folder laid out as the hub's own; the folder of its files."""
    place = cache / f"models--{model.replace('/', '--')}"
    snapshot = place / "snapshots" / COMMIT
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text(COMMIT)
    blobs = place / "blobs"
    write(TOYS["mixtral"], blobs)
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    return snapshot


def test_a_cached_model_opens_offline_under_its_own_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = cached(tmp_path, "someone/partial")
    (broken / "model.safetensors").unlink()
    cached(tmp_path, "someone/toy-moe")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert open_checkpoint("someone/toy-moe").name == "someone/toy-moe"
    with pytest.raises(UsageError, match="holds no weights"):
        open_checkpoint("someone/partial")


def test_the_hubs_own_variables_are_honoured(tmp_path: Path) -> None:
    snapshot = cached(tmp_path, "someone/toy-moe")
    found, absent = ask(
        ["someone/toy-moe", "someone/else"], HF_HUB_CACHE=str(tmp_path), HF_HUB_OFFLINE="1"
    )
    assert found == (0, str(snapshot))
    assert absent[0] == 2
    assert absent[1] == (
        f"there is no folder someone/else, no such model in {tmp_path}, and the hub is switched "
        "off (HF_HUB_OFFLINE): give a folder, or download the model first"
    )


FILES = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "tokenizer.json": b"{}",
    "modeling_own.py": b"raise SystemExit",
    "pytorch_model.bin": b"pickle",
}


class Hub(BaseHTTPRequestHandler):
    """The few answers of the hub that a download needs."""

    asked: list[str]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.asked.append(self.path)
        _, _, organization, name, *_ = [*self.path.split("/"), "", ""]
        if self.path.startswith("/api/models/open/model/"):
            siblings = [{"rfilename": file} for file in FILES]
            tree = [
                {"type": "file", "path": f, "size": len(b), "oid": "0" * 40}
                for f, b in FILES.items()
            ]
            listing = "/tree/" in self.path
            info = {"id": "open/model", "sha": COMMIT, "siblings": siblings}
            self.answer(200, json.dumps(tree if listing else info).encode())
        elif self.path.startswith("/open/model/resolve/"):
            self.answer(200, FILES[self.path.rpartition("/")[2]])
        elif organization == "models" and name == "gated":
            self.answer(403, b"{}", "GatedRepo")
        elif organization == "models" and name == "down":
            self.answer(500, b"{}")
        else:
            self.answer(404, b"{}", "RepoNotFound")

    def answer(self, status: int, body: bytes, error: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{len(body):040}{self.path.rpartition("/")[2]}"')
        self.send_header("X-Repo-Commit", COMMIT)
        if error:
            self.send_header("X-Error-Code", error)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Silent."""


@pytest.fixture
def served() -> Iterator[tuple[str, list[str]]]:
    """A hub on this machine: its address, and the paths it is asked for."""
    asked: list[str] = []
    handler = type("Asked", (Hub,), {"asked": asked})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()


def test_what_the_hub_answers_is_told_in_one_line(
    served: tuple[str, list[str]], tmp_path: Path
) -> None:
    address, asked = served
    gated, absent, found = ask(
        ["gated/model", "absent/model", "open/model"],
        HF_ENDPOINT=address,
        HF_HUB_CACHE=str(tmp_path),
        HF_HUB_DISABLE_XET="1",
    )
    assert gated[0] == absent[0] == 2
    assert f"is gated: accept its terms at {address}/gated/model, then log in" in gated[1]
    assert "there is no folder absent/model, and no such model on the hub" in absent[1]
    assert found[0] == 0 and Path(found[1]).name == COMMIT
    names = {file.name for file in tmp_path.glob(f"models--open--model/snapshots/{COMMIT}/*")}
    assert names == {"config.json", "model.safetensors", "tokenizer.json"}
    assert not any(path.endswith((".py", ".bin")) for path in asked)


def test_a_hub_that_cannot_be_reached_is_said(tmp_path: Path) -> None:
    answer = ask(["some/model"], HF_ENDPOINT="http://127.0.0.1:9", HF_HUB_CACHE=str(tmp_path))
    assert answer[0][0] == 2 and "the hub cannot be reached" in answer[0][1]


def test_a_folder_goes_before_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "some" / "model"
    folder.mkdir(parents=True)
    assert find_folder("some/model") == folder.resolve()


def test_what_looks_like_a_hub_id() -> None:
    assert hub.is_hub_id("Qwen/Qwen3-30B-A3B") and hub.is_hub_id("a/b.c_d-e")
    for text in ("tiny-moe", "/a/b", "a/b/c", "./a/b", "../b", "a/", "/b", "~/b", "a b/c", "a/.."):
        assert not hub.is_hub_id(text)
