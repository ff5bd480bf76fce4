"""A directory at a URL: local paths, object stores, HDFS, mounted volumes; whole files, no rename, no append.

pyarrow's filesystems come first (file, s3, gs, hdfs, abfs, ...), fsspec's for every other scheme if it is
installed.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pyarrow import fs

from ..errors import CheckpointError

#: A scheme, as opposed to a drive letter.
_SCHEME = re.compile(r"^([a-zA-Z][a-zA-Z0-9+.-]+):")
_ARROW = ("file", "s3", "gs", "hdfs", "viewfs", "abfs", "abfss")
#: Other spellings of these.
_ALIASES = {"s3a": "s3", "s3n": "s3", "gcs": "gs"}
#: Stores that have no directories: making one would only add an object.
_FLAT = ("s3", "gcs", "abfs")


class Storage:
    """Files below one URL. Paths are relative, with "/". Failures are `CheckpointError`s that name URL and
    cause; a password in the URL is not shown."""

    def __init__(self, url: str | os.PathLike[str]):
        self.url = shown(os.fspath(url))
        with self._said("open", ""):
            self._fs, self._root = _opened(os.fspath(url))

    def write(self, path: str, data: bytes) -> None:
        with self._said("write", path):
            at = self._at(path)
            if self._fs.type_name not in _FLAT:
                self._fs.create_dir(at.rpartition("/")[0], recursive=True)
            with self._fs.open_output_stream(at) as stream:
                stream.write(data)

    def read(self, path: str) -> bytes:
        """Raises FileNotFoundError as it is: what is not there may be no failure."""
        with self._said("read", path), self._fs.open_input_stream(self._at(path)) as stream:
            data: bytes = stream.read()
        return data

    def folders(self) -> list[str]:
        """Names of the directories right below, sorted; [] if there is nothing at the URL."""
        with self._said("list", ""):
            found = self._fs.get_file_info(fs.FileSelector(self._root, allow_not_found=True))
            return sorted(f.base_name for f in found if f.type == fs.FileType.Directory)

    def delete(self, path: str) -> None:
        """A file, if it is there."""
        with self._said("delete", path):
            if self._fs.get_file_info(self._at(path)).type == fs.FileType.File:
                self._fs.delete_file(self._at(path))

    def delete_folder(self, path: str) -> None:
        with self._said("delete", path):
            self._fs.delete_dir(self._at(path))

    def check_writable(self) -> None:
        """Writes a small file and deletes it."""
        name = f".hvd-can-write-{secrets.token_hex(6)}"
        self.write(name, b"hvd")
        self.delete(name)

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    @contextmanager
    def _said(self, doing: str, path: str) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, CheckpointError) as error:
            if doing == "read" or isinstance(error, CheckpointError):
                raise
            raise self._error(doing, path, error) from error
        except Exception as error:
            raise self._error(doing, path, error) from error

    def _error(self, doing: str, path: str, error: Exception) -> CheckpointError:
        where = f"{self.url.rstrip('/')}/{path}" if path else self.url
        return CheckpointError(f"cannot {doing} {where}: {type(error).__name__}: {error}")


def shown(url: str) -> str:
    """The URL without user and password."""
    return re.sub(r"^([^/?#]*//)[^/@?#]*@", r"\1", url)


def child(url: str, path: str) -> str:
    """The URL of `path` below `url`, whose query (a store's options) stays at the end."""
    base, mark, query = url.partition("?")
    return f"{base.rstrip('/')}/{path}{mark}{query}"


def _opened(url: str) -> tuple[Any, str]:
    match = _SCHEME.match(url)
    if match is None:
        return fs.LocalFileSystem(), os.path.abspath(url)
    scheme = match.group(1).lower()
    if scheme == "dbfs" and (mounted := _mounted(url)) is not None:
        return fs.LocalFileSystem(), mounted
    if scheme in _ALIASES:
        url = _ALIASES[scheme] + url[len(scheme) :]
    if _ALIASES.get(scheme, scheme) in _ARROW:
        found, root = fs.FileSystem.from_uri(url)
    else:
        handler, root = _fsspec(scheme, url)
        found = fs.PyFileSystem(fs.FSSpecHandler(handler))
    return found, root.rstrip("/") or "/"


def _mounted(url: str) -> str | None:
    """Where Databricks mounts a dbfs: URL, if this is such a machine."""
    path = "/" + url.partition(":")[2].strip("/")
    if path.startswith("/Volumes/"):
        return path
    return f"/dbfs{path}" if Path("/dbfs").is_dir() else None


def _fsspec(scheme: str, url: str) -> tuple[Any, str]:
    try:
        import fsspec
    except ImportError:
        raise CheckpointError(
            f"pyarrow knows no {scheme}: URLs, only {', '.join(_ARROW)}; install fsspec for others"
        ) from None
    found: tuple[Any, str] = fsspec.core.url_to_fs(url)
    return found
