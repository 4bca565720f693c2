"""Blobs in object storage: `--blobs s3://bucket/prefix`. A machine that is lost takes no blob with it.

    PREFIX/objects/SECRET     bytes, written once; every attempt to write has a key of its own that cannot be guessed
    PREFIX/refs/KEY.ref       which objects a key has, with their sizes and sha256: {"files": {name: {...}}}
    PREFIX/uploads/KEY        what a device has put there itself; it is copied before it is looked at, and then removed

A blob is there once its ref is, as a whole; a ref is replaced by writing it anew. Nothing rests on conditional
requests, which servers treat differently, and what is read is hashed. A folder of this machine keeps what this process
has read or written; it begins empty.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from coordinator.errors import Lost, StoreAway
from coordinator.settings import NO_URL
from coordinator.store.blobs import FOLDERS, DirectoryBlobs
from coordinator.store.presign import Credentials, presign
from edge_runtime.files import make_folder
from federation.errors import InputError, MissingPackage
from federation.wire import WireError

SCHEME = "s3://"
REFS, REF = "refs/", ".ref"  # a ref and those below its key differ in name, also where objects are files
UPLOADS = "uploads/"
OBJECTS = "objects/"
IMMUTABLE = "public, max-age=31536000, immutable"  # an object never changes, and who has its URL may read it
WINDOW = 900  # seconds in which all devices get the same URL of a blob
READ_SECONDS = 4 * WINDOW  # for which it is good
WRITE_SECONDS = 900  # ... and that of an upload
AT_ONCE = 8  # transfers
ATTEMPTS = 4  # of one request
SECONDS = 20.0  # until the server has to answer
LEFT_BEHIND = 120.0  # seconds after which a local file without a blob is one that another process has deleted
Files = dict[str, dict[str, Any]]  # of a ref: the name of a file in the folder, "" for a blob that is one file


class S3Blobs:
    """Blobs in a bucket, and a folder with those that this process has used."""

    def __init__(self, url: str, folder: Path, storage_url: str | None = None) -> None:
        """`folder` is emptied. Credentials and the address of another server than AWS come from the environment.

        Devices reach the server at `storage_url`, if that is another address; NO_URL: not at all.
        """
        self._bucket, _, prefix = url.removeprefix(SCHEME).partition("/")
        if not url.startswith(SCHEME) or not self._bucket:
            raise InputError(f"blobs: expected s3://BUCKET/PREFIX or the absolute path of a folder, got {url!r}")
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        shutil.rmtree(folder, ignore_errors=True)
        make_folder(folder)
        self._local = DirectoryBlobs(folder)
        self._client, self._credentials = _connect()
        self.has_uploads = storage_url != NO_URL
        self._for_devices = _connect(storage_url)[0] if storage_url and self.has_uploads else self._client
        self._urls: dict[str, tuple[int, str]] = {}  # of keys, with the window in which they were signed
        self._pool = ThreadPoolExecutor(AT_ONCE, "s3")
        self._deletions = ThreadPoolExecutor(AT_ONCE, "s3-delete")  # a round's bodies do not hold up those that arrive
        self._mutex = threading.Lock()
        self._fetches: dict[str, tuple[threading.Lock, int]] = {}  # keys that are being fetched, and how many want them
        with _told(f"bucket {self._bucket}"):
            self._client.head_bucket(Bucket=self._bucket)

    # --- the protocol ------------------------------------------------------------------------------------------------

    def draft(self, key: str, suffix: str = ".draft") -> Path:
        draft = self._local.draft(key, suffix)
        draft.parent.mkdir(parents=True, exist_ok=True)
        return draft

    def commit(self, draft: Path, key: str) -> None:
        paths = [path for path in sorted(draft.rglob("*")) if path.is_file()] if draft.is_dir() else [draft]
        names = [path.relative_to(draft).as_posix() if path != draft else "" for path in paths]
        self._write_ref(key, dict(zip(names, self._pool.map(self._upload, paths))))
        self._local.commit(draft, key)

    def commit_all(self, drafts: Sequence[tuple[Path, str]]) -> list[OSError | None]:
        return list(self._pool.map(self._commit_one, drafts))

    def _commit_one(self, pair: tuple[Path, str]) -> OSError | None:
        draft, key = pair
        try:
            self._write_ref(key, {"": self._upload(draft)})
            draft.replace(self._local.file(key))
        except OSError as error:
            return error
        return None

    def file(self, key: str) -> Path:
        path = self._local.file(key)
        if path.exists():
            return path
        with self._fetching(key):  # of several threads that want the same, one fetches it
            return path if path.exists() else self._fetch(key, path)

    def _fetch(self, key: str, path: Path) -> Path:
        refs = self._refs(key)
        while refs:
            draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
            try:
                for own, files in refs.items():
                    for name, facts in files.items():
                        if not self._download(facts, draft / own.removeprefix(key).strip("/") / name):
                            why = f"bucket {self._bucket} has other bytes than were written, with another sha256"
                            raise Lost(errno.ENOENT, why, facts["object"])
                draft.rename(path)
                break
            except FileNotFoundError:  # lost, unless another process has replaced or deleted the blob meanwhile
                before, refs = refs, self._refs(key)
                if refs == before:
                    raise
            finally:
                self._local.delete(str(draft.relative_to(self._local.root)))
        return path

    def link(self, key: str, other: str) -> None:
        if self._ref(other) is not None:
            return
        files = self._ref(key)
        if files is None:
            raise FileNotFoundError(errno.ENOENT, "there is no blob", key)
        self._write_ref(other, {name: self._copy(facts) for name, facts in files.items()})
        if self._local.file(key).exists():
            self._local.link(key, other)

    def delete(self, *keys: str) -> None:
        list(self._deletions.map(self._delete_one, dict.fromkeys(keys)))

    def _delete_one(self, key: str) -> None:
        refs = self._refs(key)
        for own, files in refs.items():
            self._remove(_ref_of(own))  # first: a ref never names what is gone
            for facts in files.values():
                self._remove(facts["object"])
        if not refs:  # of a blob the upload is gone, as a rule; if not, it is found again
            self._remove(UPLOADS + key)
        self._local.delete(key)

    def size(self, *keys: str) -> int:
        """Count bytes; a second key has a copy of its own here."""
        found = (files for key in keys for files in self._refs(key).values())
        return sum(int(facts["bytes"]) for files in found for facts in files.values())

    def list(self, folder: str) -> list[str]:
        names = {key.removeprefix(f"{folder}/").partition("/")[0] for key in self._keys(f"{folder}/")}
        return sorted({*(f"{folder}/{name}" for name in names), *self._local.list(folder)})

    def share(self, draft: str) -> None:
        self._write_ref(draft, {"": self._upload(self._local.file(draft))})

    def gather(self, draft: str) -> Path:
        for key in self._keys(f"{draft}/"):
            self.file(key)
        return self._local.file(draft)

    def drop(self, *keys: str) -> None:
        self._local.delete(*keys)

    def drop_deleted(self) -> None:
        """What is being written has no ref either, and is younger."""
        known, root, now = set(self._keys("")), self._local.root, time.time()
        for path in [path for folder in FOLDERS for path in (root / folder).rglob("*") if path.is_file()]:
            keys = [path.relative_to(root), *path.relative_to(root).parents]
            with suppress(FileNotFoundError):
                if known.isdisjoint(key.as_posix() for key in keys) and now - path.stat().st_mtime > LEFT_BEHIND:
                    path.unlink()

    def remove_unnamed(self, before: float) -> int:
        """A ref names only what was written just before it: what is old and has no ref now never gets one."""
        start = f"{self._prefix}{OBJECTS}"
        with _told(OBJECTS):
            pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=start)
            rows = [row for page in pages for row in page.get("Contents", ())]
        old = {str(row["Key"]).removeprefix(self._prefix) for row in rows if row["LastModified"].timestamp() < before}
        for key in self._keys("") if old else ():
            old -= {str(facts["object"]) for facts in (self._ref(key) or {}).values()}
        for name in old:
            self._remove(name)
        return len(old)

    @contextmanager
    def _fetching(self, key: str) -> Iterator[None]:
        with self._mutex:
            lock, users = self._fetches.get(key, (threading.Lock(), 0))
            self._fetches[key] = lock, users + 1
        try:
            with lock:
                yield
        finally:
            with self._mutex:
                lock, users = self._fetches.pop(key)
                if users > 1:
                    self._fetches[key] = lock, users - 1

    # --- what devices read and write themselves ----------------------------------------------------------------------

    def download_url(self, key: str) -> str | None:
        window = int(time.time()) // WINDOW
        with self._mutex:
            signed_in, url = self._urls.get(key, (0, ""))
        if not self.has_uploads or signed_in == window:
            return url or None
        facts = (self._ref(key) or {}).get("")
        if facts is None:
            return None
        url = self._sign("GET", facts["object"], window * WINDOW, READ_SECONDS)
        with self._mutex:
            self._urls = {
                **{other: known for other, known in self._urls.items() if known[0] == window},
                key: (window, url),
            }
        return url

    def upload_url(self, key: str, size: int) -> str | None:
        headers = {"Content-Length": str(size)}
        return self._sign("PUT", UPLOADS + key, time.time(), WRITE_SECONDS, headers) if self.has_uploads else None

    def take_upload(self, key: str, size: int, sha256: str) -> None:
        if self._ref(key) is None:
            if (found := self._size_of(UPLOADS + key)) == size:
                self._take(key, {"object": UPLOADS + key, "bytes": size, "sha256": sha256})
            elif self._ref(key) is None:  # else another process has taken it in between
                uploaded = "nothing" if found is None else f"{found} bytes"
                raise WireError(f"{uploaded} instead of {size} bytes lie in the object storage")
        self.file(key)  # the upload stays until the blob was read
        self._remove(UPLOADS + key)

    def _take(self, key: str, upload: dict[str, Any]) -> None:
        """Copy the upload first: its device could write to it again while it is looked at, or later."""
        try:
            facts = self._copy(upload)
        except Lost:
            if self._ref(key) is None:  # else another process has taken it in between
                raise
            return
        draft = self._local.draft(key, f".{secrets.token_hex(4)}.part")
        try:
            try:
                if not self._download(facts, draft):
                    raise WireError("what lies in the object storage has another sha256 than its device said")
            except BaseException:
                with suppress(StoreAway):
                    self._remove(facts["object"])
                raise
            self._write_ref(key, {"": facts})  # if this fails the ref may be there all the same: the object stays
            draft.replace(self._local.file(key))
        finally:
            draft.unlink(missing_ok=True)

    def uploads(self, folder: str) -> Sequence[str]:
        return [name.removeprefix(UPLOADS) for name in self._objects(f"{UPLOADS}{folder}/")]

    def _size_of(self, name: str) -> int | None:
        with _told(name):
            try:
                return int(self._client.head_object(Bucket=self._bucket, Key=self._prefix + name)["ContentLength"])
            except self._client.exceptions.ClientError as error:
                if _status(error) != 404:
                    raise
                return None

    def _sign(self, method: str, name: str, at: float, seconds: int, headers: dict[str, str] | None = None) -> str:
        place = {"Bucket": self._bucket, "Key": self._prefix + name}
        with _told(name):  # boto3 knows where an object is; its signature is not used
            url = self._for_devices.generate_presigned_url("get_object", Params=place).partition("?")[0]
            own = self._credentials.get_frozen_credentials()
        credentials = Credentials(own.access_key, own.secret_key, own.token)
        return presign(method, url, credentials, self._client.meta.region_name, at, seconds, headers)

    def close(self) -> None:
        self._pool.shutdown()
        self._deletions.shutdown()
        self._local.close()
        self._client.close()

    # --- objects and refs --------------------------------------------------------------------------------------------

    def _upload(self, path: Path) -> dict[str, Any]:
        """Write a file to a new object; describe it as a ref does."""
        with path.open("rb") as file:
            digest, size = hashlib.sha256(), 0
            while part := file.read(1 << 20):
                digest.update(part)
                size += len(part)
            name = self._new_object()
            file.seek(0)
            with _told(name):
                extra = {"CacheControl": IMMUTABLE}
                self._client.upload_fileobj(file, self._bucket, self._prefix + name, ExtraArgs=extra)
        return {"object": name, "sha256": digest.hexdigest(), "bytes": size}

    def _download(self, facts: dict[str, Any], to: Path) -> bool:
        """Read an object into a file, once more if that is not what was written; return whether it is."""
        to.parent.mkdir(parents=True, exist_ok=True)
        return self._read(facts, to) or self._read(facts, to)

    def _read(self, facts: dict[str, Any], to: Path) -> bool:
        digest, left = hashlib.sha256(), int(facts["bytes"])
        with _told(facts["object"]), to.open("wb") as file:
            try:
                answer = self._client.get_object(Bucket=self._bucket, Key=self._prefix + facts["object"])
            except self._client.exceptions.NoSuchKey:
                raise self._lost(facts["object"]) from None
            for part in answer["Body"].iter_chunks(1 << 20):
                digest.update(part)
                left -= len(part)
                if left < 0:
                    break
                file.write(part)
        return not left and bool(digest.hexdigest() == facts["sha256"])

    def _lost(self, name: str) -> Lost:
        return Lost(errno.ENOENT, f"bucket {self._bucket} has lost an object", name)

    def _copy(self, facts: dict[str, Any]) -> dict[str, Any]:
        """Copy an object to a new one without reading it."""
        name = self._new_object()
        source = {"Bucket": self._bucket, "Key": self._prefix + facts["object"]}
        with _told(facts["object"]):
            try:
                self._client.copy(source, self._bucket, self._prefix + name)
            except self._client.exceptions.ClientError as error:
                if _status(error) != 404:
                    raise
                raise self._lost(facts["object"]) from None
        return {**facts, "object": name}

    def _new_object(self) -> str:
        return f"{OBJECTS}{secrets.token_hex(24)}"

    def _remove(self, name: str) -> None:
        with _told(name):
            self._client.delete_object(Bucket=self._bucket, Key=self._prefix + name)

    def _write_ref(self, key: str, files: Files) -> None:
        """Give objects a key; those that had it before are removed afterwards."""
        before = self._ref(key)
        with _told(_ref_of(key)):
            body = json.dumps({"files": files}).encode()
            self._client.put_object(Bucket=self._bucket, Key=self._prefix + _ref_of(key), Body=body)
        for facts in (before or {}).values():
            self._remove(facts["object"])

    def _ref(self, key: str) -> Files | None:
        with _told(_ref_of(key)):
            try:
                answer = self._client.get_object(Bucket=self._bucket, Key=self._prefix + _ref_of(key))
                return dict(json.loads(answer["Body"].read())["files"])
            except self._client.exceptions.NoSuchKey:
                return None

    def _refs(self, key: str) -> dict[str, Files]:
        """Find the ref of a key, or those below it."""
        own = self._ref(key)
        found = {key: own} if own is not None else {}
        if own is None or "" not in own:  # a folder: files may have been added to it
            below = ((other, self._ref(other)) for other in self._keys(f"{key}/"))
            found |= {other: files for other, files in below if files is not None}
        return found

    def _keys(self, beginning: str) -> Iterator[str]:
        """List the keys of all refs that begin with a text."""
        names = self._objects(REFS + beginning)
        return (name.removeprefix(REFS).removesuffix(REF) for name in names if name.endswith(REF))

    def _objects(self, beginning: str) -> Iterator[str]:
        """List the names of all objects that begin with a text."""
        with _told(beginning):
            found = self._client.get_paginator("list_objects_v2")
            for page in found.paginate(Bucket=self._bucket, Prefix=self._prefix + beginning):
                yield from (str(row["Key"]).removeprefix(self._prefix) for row in page.get("Contents", ()))


def _status(error: Any) -> int:
    """Return the HTTP status of an answer that boto3 raised."""
    return int(error.response["ResponseMetadata"]["HTTPStatusCode"])


def _ref_of(key: str) -> str:
    return f"{REFS}{key}{REF}"


def _connect(url: str | None = None) -> tuple[Any, Any]:
    """Make a client and find its credentials; boto3 knows where these, and another address, may be given."""
    try:
        from boto3.session import Session
        from botocore.config import Config
    except ImportError:
        raise MissingPackage("boto3", "scale") from None
    elsewhere = bool(url or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"))
    config = Config(
        signature_version="s3v4",
        retries={"mode": "standard", "max_attempts": ATTEMPTS},
        connect_timeout=SECONDS,
        read_timeout=SECONDS,
        max_pool_connections=2 * AT_ONCE,
        # Other servers than AWS know neither buckets as hosts nor its newer checksums; the sha256 of refs is enough.
        s3={"addressing_style": "path" if elsewhere else "auto"},
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    session = Session()
    region = session.region_name or os.environ.get("AWS_REGION") or "us-east-1"
    return session.client("s3", config=config, region_name=region, endpoint_url=url), session.get_credentials()


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Turn what boto3 raises into one error that is waited for."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except (BotoCoreError, ClientError) as error:
        raise StoreAway(f"object storage, {what}: {error}") from None
