"""Models by their name in the Hugging Face hub, from a hub of one model on this machine."""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub.constants
import huggingface_hub.file_download
import huggingface_hub.hf_api
import pytest

from harness.errors import UserError
from harness.inputs import models

COMMIT = "0" * 39 + "1"


class Hub(BaseHTTPRequestHandler):
    """What the client asks for: the list of files, and each file with its headers."""

    folder: Path

    def do_GET(self):
        self._answer(body=True)

    def do_HEAD(self):
        self._answer(body=False)

    def _answer(self, body):
        if self.path.startswith("/api/models/some/model/"):
            names = [{"rfilename": f.name} for f in sorted(self.folder.iterdir())]
            content = json.dumps(
                {"id": "some/model", "sha": COMMIT, "siblings": [*names, {"rfilename": "x/y.json"}]}
            ).encode()
            self._send(200, content, body)
        elif self.path.startswith(f"/some/model/resolve/{COMMIT}/"):
            content = (self.folder / self.path.rsplit("/", 1)[1]).read_bytes()
            self._send(200, content, body)
        elif "gated" in self.path:
            self._send(403, b"{}", body, {"X-Error-Code": "GatedRepo"})
        else:
            self._send(404, b"{}", body, {"X-Error-Code": "RepoNotFound"})

    def _send(self, status, content, body, headers=None):
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *_):
        pass


def use_endpoint(monkeypatch, url, cache):
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    for module in (constants, huggingface_hub.file_download):
        if hasattr(module, "HUGGINGFACE_CO_URL_TEMPLATE"):
            monkeypatch.setattr(module, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))


@pytest.fixture
def served(tiny_model, tmp_path, monkeypatch):
    Hub.folder = tiny_model
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    use_endpoint(monkeypatch, f"http://127.0.0.1:{server.server_port}", tmp_path / "hub")
    yield server
    server.shutdown()
    server.server_close()


def test_a_model_is_downloaded_and_found_again_without_the_hub(served, tiny_model, capsys):
    first = models.choose_model(Path("some/model"))
    assert first.name == "model" and first.config["hidden_size"] == 128
    assert "Looking for some/model" in capsys.readouterr().err
    assert not (first.path / "x").exists()
    for file in tiny_model.iterdir():
        assert (first.path / file.name).read_bytes() == file.read_bytes()
    served.shutdown()
    served.server_close()
    assert models.choose_model(Path("some/model")) == first


@pytest.mark.parametrize(
    ("name", "told"), [("other", "there is no such model"), ("gated", "asks for your consent")]
)
def test_models_that_are_not_for_you_are_refused(name, told, served):
    with pytest.raises(UserError, match=f"some/{name} cannot be downloaded .*{told}"):
        models.download(f"some/{name}")


def test_without_a_network_one_sentence_says_so(tmp_path, monkeypatch):
    use_endpoint(monkeypatch, "http://127.0.0.1:1", tmp_path)
    with pytest.raises(UserError, match="the hub cannot be reached from here"):
        models.download("some/model")
