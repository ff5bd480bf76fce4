"""Directories at URLs: local, S3 (a server of our own), fsspec; and what is said when they do not work."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from hvd_core.errors import CheckpointError  # noqa: E402
from hvd_core.train import (  # noqa: E402
    CheckpointWarning,
    check_checkpoint_dir,
    fit_local,
    load_checkpoint,
)
from hvd_core.train.checkpoint import CheckpointDir  # noqa: E402
from hvd_core.train.storage import Storage, _opened, child, shown  # noqa: E402

from .runs import spec_of, table  # noqa: E402
from .test_resume import assert_same, cut, resumed  # noqa: E402

pytestmark = pytest.mark.timeout(60)

_SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """The options of URLs that lead to an S3 server of this machine, for as long as the module runs."""
    pytest.importorskip("moto")
    server = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", _SERVER],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert server.stdout is not None and server.stdin is not None
    port = server.stdout.readline().strip()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        yield f"?endpoint_override=127.0.0.1:{port}&scheme=http&region=us-east-1"
    server.stdin.close()
    server.stdout.close()
    server.wait()


def make_bucket(name: str, options: str) -> None:
    from pyarrow import fs

    found, _ = fs.FileSystem.from_uri(f"s3://x{options}&allow_bucket_creation=true")
    found.create_dir(name)


@pytest.fixture(params=["path", "file", "memory", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "path":
        return str(tmp_path / "deep" / "run")
    if request.param == "file":
        return (tmp_path / "with space").as_uri()
    if request.param == "memory":
        pytest.importorskip("fsspec")
        return f"memory://{uuid.uuid4().hex}/run"
    options = request.getfixturevalue("s3")
    make_bucket("runs", options)
    return f"s3://runs/{uuid.uuid4().hex}{options}"


def test_files_come_back_as_they_were_written(url: str) -> None:
    storage = Storage(url)
    assert storage.folders() == []
    check_checkpoint_dir(url)
    assert storage.folders() == []
    storage.write("a/x.bin", b"one")
    storage.write("a/x.bin", b"two")
    storage.write("b/y.bin", b"")
    assert storage.folders() == ["a", "b"]
    assert (storage.read("a/x.bin"), storage.read("b/y.bin")) == (b"two", b"")
    with pytest.raises(FileNotFoundError):
        storage.read("a/z.bin")
    storage.delete("a/x.bin")
    storage.delete("a/x.bin")
    with pytest.raises(FileNotFoundError):
        storage.read("a/x.bin")
    storage.delete_folder("b")
    assert "b" not in storage.folders()


def test_a_run_resumes_from_any_of_them(url: str) -> None:
    spec = spec_of(epochs=2)
    cut(spec, url, 9, checkpoint_every=4, keep_checkpoints=1)
    assert [c for c in CheckpointDir(url).names() if c != "step-0000000007"] == ["step-0000000008"]
    assert_same(resumed(spec, url), fit_local(spec, table()))
    last = load_checkpoint(url)
    assert last.facts["ended"] == "done"
    again = load_checkpoint(child(url, last.name))
    assert (again.name, again.weights) == (last.name, last.weights)


def test_what_cannot_be_written_names_url_and_cause(tmp_path: Path, s3: str) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(CheckpointError, match=rf"cannot write .*{blocked}/run/.*: \w+"):
        fit_local(spec_of(checkpoint_dir=str(blocked / "run")), table())
    with pytest.raises(CheckpointError, match=r"cannot write s3://nowhere/run.*bucket"):
        fit_local(spec_of(checkpoint_dir=f"s3://nowhere/run{s3}"), table())
    with pytest.raises(CheckpointError, match="cannot write /dev/full/run"):
        check_checkpoint_dir("/dev/full/run")
    with pytest.raises(CheckpointError, match="cannot open nonsense://x/y"):
        check_checkpoint_dir("nonsense://x/y")
    with pytest.raises(CheckpointError, match="there is no checkpoint that verifies"):
        load_checkpoint(str(tmp_path / "nothing"))


def test_a_full_disk_ends_the_run_with_url_and_cause(tmp_path: Path) -> None:
    """A file of the second checkpoint is a link to a device that is always full."""

    class Fill:
        def on_batch_end(self, run: Any, batch: Any) -> None:
            if run.step == 10:
                (tmp_path / "step-0000000014").mkdir()
                os.symlink("/dev/full", tmp_path / "step-0000000014" / "state.safetensors")

    with pytest.raises(
        CheckpointError, match=r"cannot write .*step-0000000014/state.safetensors: .*[Nn]o space"
    ):
        fit_local(spec_of(checkpoint_dir=str(tmp_path), callbacks=[Fill()]), table())
    (tmp_path / "step-0000000014" / "state.safetensors").unlink()
    with pytest.warns(CheckpointWarning, match="step-0000000014: there is no manifest.json"):
        result = resumed(spec_of(), tmp_path)
    assert "resumed at epoch 1, step 0" in result.summary


def test_urls() -> None:
    assert shown("s3://key:secret@bucket/a?region=x") == "s3://bucket/a?region=x"
    assert shown("/plain/a@b") == "/plain/a@b"
    assert child("s3://b/run?region=x", "step-1") == "s3://b/run/step-1?region=x"
    assert child("/a/b/", "c") == "/a/b/c"


def test_a_store_without_rename_and_append_has_the_manifest_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """As object stores and mounted volumes are."""
    from fsspec.implementations.memory import MemoryFileSystem

    written: list[str] = []
    plain = MemoryFileSystem._open

    def opened(self: Any, path: str, mode: str = "rb", **options: Any) -> Any:
        if mode != "rb":
            assert mode == "wb", mode
            written.append(path)
        return plain(self, path, mode, **options)

    def refused(*_: Any, **__: Any) -> None:
        raise NotImplementedError("this store only takes whole files")

    monkeypatch.setattr(MemoryFileSystem, "_open", opened)
    for name in ("mv", "move", "rename", "cp_file", "copy"):
        monkeypatch.setattr(MemoryFileSystem, name, refused)
    url = f"memory://{uuid.uuid4().hex}/run"
    spec = spec_of(epochs=2)
    cut(spec, url, 9)
    names = [path.rpartition("/")[2] for path in written if "/step-" in path]
    assert names == ["weights.safetensors", "state.safetensors", "ranks.safetensors", "manifest.json"]
    assert_same(resumed(spec, url), fit_local(spec, table()))


def test_where_databricks_mounts_dbfs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _opened("dbfs:/Volumes/main/runs/7")[1] == "/Volumes/main/runs/7"
    is_dir = Path.is_dir
    monkeypatch.setattr(Path, "is_dir", lambda self: str(self) == "/dbfs" or is_dir(self))
    found, root = _opened("dbfs:/ml/run/")
    assert (found.type_name, root) == ("local", "/dbfs/ml/run")
