"""Where Deuteron keeps files, the one way it writes them, and its version number."""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from deuteron.errors import FileError
from deuteron.log import log

PACKAGE = Path(__file__).resolve().parent
VERSION = "0.1.0.dev0"
_lost: set[tuple[str, str]] = set()  # folders that could not be written to, and why: warned once


def cache_dir() -> Path:
    """The folder for measurements: ``$DEUTERON_CACHE``, else ``~/.cache/deuteron``."""
    named = os.environ.get("DEUTERON_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(named) if named else Path(base) / "deuteron"


@lru_cache
def source_digest(*folders: str, package: Path = PACKAGE) -> str:
    """Return a digest of the source in these folders of the package, or in all of it. It is part of
    the key of everything on disk that this source made."""
    digest = hashlib.sha256()
    for folder in folders or ("",):
        for path in sorted((package / folder).rglob("*.py")):
            digest.update(f"{path.relative_to(package).as_posix()}\n".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def write_atomic(path: str | Path, data: str | bytes) -> None:
    """Write to a temporary file beside ``path``, then rename it: ``path`` is never half a file."""
    with replacing(path) as temporary:
        temporary.write_bytes(data.encode() if isinstance(data, str) else data)


def remember(path: Path, data: str | bytes) -> None:
    """:func:`write_atomic` for data that can be made again. Failing to write it is not an error: a
    warning is logged, once for each folder and reason."""
    try:
        write_atomic(path, data)
    except OSError as error:
        why = (str(path.parent), error.strerror or str(error))
        if why not in _lost:
            _lost.add(why)
            again = "so it is made again in every process"
            remedy = "remove what is in the way, or let DEUTERON_CACHE name another folder"
            log.warning("%s cannot be kept (%s), %s; %s", path, why[1], again, remedy)


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``, and rename it to ``path`` if the block succeeds. If
    ``path`` is a symbolic link, the file that it points to is replaced, not the link."""
    path = Path(path)
    path = path.resolve() if path.is_symlink() else path
    if path.exists() and not path.is_file():
        what = "a folder" if path.is_dir() else "a device or a pipe"
        raise OSError(errno.EEXIST, f"it is {what}, which a file cannot take the place of")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    temporary.touch(exist_ok=False)
    usual = temporary.stat().st_mode  # the permissions that new files of this user get
    try:
        yield temporary
        os.chmod(temporary, usual)  # a library may have replaced the file by one of its own
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def saving(path: str | Path) -> Iterator[Path]:
    """:func:`replacing` for a file that the user named: if it cannot be written, a FileError says
    why."""
    try:
        with replacing(path) as temporary:
            yield temporary
    except OSError as error:
        wrong = f"{str(path)!r} cannot be written: {error.strerror or error}"
        remedy = "name a file in a folder that you may write to, with room for it"
        raise FileError(wrong, asked=f"write {str(path)!r}", remedy=remedy) from error


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Complete a FileError raised inside the block: with the file that was asked for, and with a
    remedy if it has none yet."""
    try:
        yield
    except FileError as error:
        error.asked = error.asked or f"load {str(path)!r}"
        both = "both files that save() wrote, .json and .safetensors"
        error.remedy = error.remedy or f"save it again, or restore {both}"
        raise


@contextmanager
def locked(path: str | Path) -> Iterator[None]:
    """Hold an advisory lock beside ``path`` while reading, merging and replacing it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(path.name + ".lock"), "a+b") as handle:
        try:
            import fcntl
        except ImportError:  # no fcntl: the rename alone keeps the file whole
            yield
            return
        fcntl.flock(handle, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(handle, fcntl.LOCK_UN)
