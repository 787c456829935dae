"""Images between upload and send: on disk for at most an hour, readable by their owner only.

The upload routes are ours, because gradio's accept any file of any size from anyone, name it by its
content so that strangers share it, and serve every file in the folder. Here a file lies in a folder
with an unguessable name, is served to and read for its owner only, and is deleted once sent. The
owner is the cookie's visitor, or the address if there is no cookie.
"""

import asyncio
import contextlib
import io
import logging
import os
import re
import secrets
import shutil
import stat
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from fastapi import Request
from fastapi.responses import PlainTextResponse, Response, StreamingResponse
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect

from compeer_core.errors import ImageError
from compeer_core.images import MAX_PIXELS, Image, read_image
from ui_components.server.visitors import site_of

logger = logging.getLogger(__name__)

UPLOAD_PATH = "/gradio_api/upload"
MAX_IMAGES = 4
"""Per message, and per upload."""
MAX_UPLOAD_BYTES = 10 * 2**20
"""Per upload, all files together."""
KEEP_SECONDS = 3000.0
"""With a sweep every minute, unsent images are gone within the promised hour."""
MAX_FILES = 12
MAX_BYTES = 40 * 2**20
"""Per owner; the oldest are evicted first."""
MAX_TOTAL_BYTES = 512 * 2**20
"""In total; the oldest of the address that holds most are evicted first."""
DECODED_AT_ONCE = 2
UPLOAD_SECONDS = 120.0
"""The time in which an upload must arrive: a slow phone sends 10 MB in 80 seconds."""
OF_ADDRESS, IN_ALL = 8, 64
"""Concurrent uploads."""

_MEDIA_TYPES = (
    (b"\x89PNG\r\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
)
_FRAME_BYTES = 16 * 1024  # the multipart form around the files
_NAME = re.compile(r"[^\w.-]+")
_NAME_CHARACTERS = 60  # of at most four bytes each; file systems accept 255 bytes
_PIECE_BYTES = 64 * 1024
_PLAIN_ONLY = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


@dataclass(frozen=True)
class _Upload:
    owner: str
    address: str
    size: int
    since: float


class Uploads:
    """The images of one server that wait to be sent."""

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Store them in a folder.

        Args:
            folder: Private to this server; `upload_folder` creates one. It need not exist yet.
            clock: In seconds.
        """
        self._folder = folder.resolve()
        self._clock = clock
        self._uploads: dict[str, _Upload] = {}
        self._on_their_way: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._decoders = ThreadPoolExecutor(DECODED_AT_ONCE, thread_name_prefix="picture")

    # --- over HTTP ---

    async def receive(self, request: Request, owner: str) -> list[str]:
        """Store the files of a form, and return their paths as gradio does.

        Raises:
            ImageError: There are too many (``too_many_images``), they are too large
                (``upload_too_large``) or did not arrive intact in time (``upload_unreadable``),
                others from the same network are in progress (``busy_network``), or the disk is full
                (``no_room``).
        """
        address = site_of(request)
        with self._place(address):
            try:
                async with asyncio.timeout(UPLOAD_SECONDS):
                    form = await _form(request)
            except (TimeoutError, ClientDisconnect) as error:
                raise _unreadable() from error
            files = [file for file in form.getlist("files") if isinstance(file, UploadFile)]
            try:
                if not files:
                    raise _unreadable()
                if sum(file.size or 0 for file in files) > MAX_UPLOAD_BYTES:
                    raise _too_large()
                return await asyncio.to_thread(self._keep, files, owner, address)
            except OSError as error:
                logger.error("an upload cannot be kept: %s", error.strerror)
                raise ImageError("the disk has no space for an upload", code="no_room") from error
            finally:
                await form.close()

    def show(self, path: str, owner: str) -> Response:
        """Serve an owner's unsent image; 404 for anyone else."""
        try:
            file = self._opened(path, owner)
        except ImageError:
            return PlainTextResponse("not found", status_code=404)
        start = file.read(_PIECE_BYTES)
        kinds = [kind for mark, kind in _MEDIA_TYPES if start.startswith(mark)]
        if start[:4] == b"RIFF" and start[8:12] == b"WEBP":
            kinds.append("image/webp")
        size = os.fstat(file.fileno()).st_size
        headers = {"cache-control": "private, no-store", "content-length": str(size)}
        if not kinds:
            headers["content-disposition"] = "attachment"
        media_type = kinds[0] if kinds else "application/octet-stream"

        def pieces() -> Iterator[bytes]:
            # Stream: whole files would stay in memory for clients that do not read the response.
            with file:
                piece = start
                while piece:
                    yield piece
                    piece = file.read(_PIECE_BYTES)

        return StreamingResponse(pieces(), media_type=media_type, headers=headers)

    # --- on the disk ---

    def add(self, name: str, data: bytes, owner: str, address: str) -> str:
        """Store a file, and return its path.

        Raises:
            OSError: It cannot be written.
        """
        return self._copy(name, io.BytesIO(data), owner, address)

    def _keep(self, files: Sequence[UploadFile], owner: str, address: str) -> list[str]:
        return [self._copy(file.filename or "", file.file, owner, address) for file in files]

    def _copy(self, name: str, source: IO[bytes], owner: str, address: str) -> str:
        folder = self._folder / secrets.token_hex(16)
        folder.mkdir(parents=True, mode=0o700)
        path = folder / (safe_name(name) or "picture")
        try:
            with path.open("wb") as file:
                shutil.copyfileobj(source, file)
                size = file.tell()
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        with self._lock:
            self._uploads[str(path)] = _Upload(owner, address, size, self._clock())
            superfluous = self._superfluous(owner)
        for old in superfluous:
            self._delete(old)
        return str(path)

    def holds(self, path: str, owner: str) -> bool:
        """Whether this is an existing upload of that owner."""
        with self._lock:
            upload = self._uploads.get(path)
            return upload is not None and upload.owner == owner

    def begin_reading(self, path: str, owner: str, alt: str = "") -> "Future[Image]":
        """Decode an image. At most `DECODED_AT_ONCE` run at a time: large ones need much memory.

        The result raises `ImageError`, with the file's name, if it is gone or unusable.
        """
        return self._decoders.submit(self._read, path, owner, alt)

    async def read(self, paths: Sequence[str], owner: str, alt: str) -> tuple[Image, ...]:
        """Read the images of one message.

        Raises:
            ImageError: There are too many, one is gone or not the owner's, or one is unusable.
        """
        if len(paths) > MAX_IMAGES:
            raise _too_many()
        reading = [self.begin_reading(path, owner, alt.strip()) for path in paths]
        return tuple([await asyncio.wrap_future(each) for each in reading])

    def forget(self, path: str, owner: str) -> None:
        """Delete an upload of that owner, which is in memory now or no longer needed."""
        if self.holds(path, owner):
            self._delete(path)

    def forget_owner(self, owner: str) -> None:
        """Delete an owner's unsent uploads."""
        with self._lock:
            paths = [path for path, upload in self._uploads.items() if upload.owner == owner]
        for path in paths:
            self._delete(path)

    def sweep(self) -> None:
        """Delete what was not sent in time, and anything else in the folder."""
        oldest = self._clock() - KEEP_SECONDS
        with self._lock:
            late = [path for path, upload in self._uploads.items() if upload.since < oldest]
        for path in late:
            self._delete(path)
        with self._lock:
            in_use = {Path(path).parent for path in self._uploads}
        if not self._folder.is_dir():
            return
        for entry in self._folder.iterdir():
            with contextlib.suppress(OSError):  # already gone
                is_old = time.time() - entry.lstat().st_mtime > KEEP_SECONDS
                if is_old and entry not in in_use and not entry.name.startswith("."):
                    shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

    def _delete(self, path: str) -> None:
        with self._lock:
            if self._uploads.pop(path, None) is None:
                return  # another thread does
        shutil.rmtree(Path(path).parent, ignore_errors=True)

    @contextlib.contextmanager
    def _place(self, address: str) -> Iterator[None]:
        """Count an upload in progress; each occupies a file before it is checked."""
        with self._lock:
            on_their_way = self._on_their_way
            if on_their_way[address] >= OF_ADDRESS or on_their_way.total() >= IN_ALL:
                raise ImageError("too many uploads at once", code="busy_network")
            on_their_way[address] += 1
        try:
            yield
        finally:
            with self._lock:
                self._on_their_way[address] -= 1
                self._on_their_way += Counter()  # drops zero counts

    def _superfluous(self, owner: str) -> list[str]:
        """The uploads to evict so that the limits hold; call with the lock held."""
        superfluous: list[str] = []
        remaining = dict(self._uploads)

        def drop(path: str) -> None:
            superfluous.append(path)
            del remaining[path]

        own = [path for path, upload in remaining.items() if upload.owner == owner]
        held = sum(remaining[path].size for path in own)
        while len(own) > 1 and (len(own) > MAX_FILES or held > MAX_BYTES):
            held -= remaining[own[0]].size
            drop(own.pop(0))
        while sum(upload.size for upload in remaining.values()) > MAX_TOTAL_BYTES:
            by_address: dict[str, int] = {}
            for upload in remaining.values():
                by_address[upload.address] = by_address.get(upload.address, 0) + upload.size
            greediest = max(by_address, key=lambda address: by_address[address])
            drop(next(path for path, upload in remaining.items() if upload.address == greediest))
        return superfluous

    def _read(self, path: str, owner: str, alt: str) -> Image:
        try:
            return read_image(self._content(path, owner), alt=alt)
        except ImageError as error:
            limit = error.values.get("limit", MAX_PIXELS)
            values = error.values | {"name": Path(path).name, "megapixels": limit // 10**6}
            raise ImageError(str(error), code=error.code, values=values) from error

    def _content(self, path: str, owner: str) -> bytes:
        """Return the bytes of an upload.

        Raises:
            ImageError: ``image_gone``.
        """
        try:
            with self._opened(path, owner) as file:
                return file.read(MAX_UPLOAD_BYTES + 1)
        except OSError as error:
            raise ImageError("the upload is gone", code="image_gone") from error

    def _opened(self, path: str, owner: str) -> IO[bytes]:
        """Open an upload, which must be a regular file.

        Raises:
            ImageError: ``image_gone``.
        """
        if self.holds(path, owner):
            with contextlib.suppress(OSError):
                file = os.fdopen(os.open(path, _PLAIN_ONLY), "rb")
                if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    return file
                file.close()
        raise ImageError("the upload is gone", code="image_gone")


def safe_name(name: str) -> str:
    """Return a visitor's file name without folders and odd characters; it may be empty."""
    return _NAME.sub("_", Path(name).name).strip("._")[-_NAME_CHARACTERS:]


async def _form(request: Request) -> FormData:
    """Read a multipart form; its files are on disk.

    Raises:
        ImageError: It is too large, has too many files, or is not such a form.
    """
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise _unreadable()

    async def bounded() -> AsyncGenerator[bytes, None]:
        size = 0
        async for chunk in request.stream():
            size += len(chunk)
            if size > MAX_UPLOAD_BYTES + _FRAME_BYTES:
                raise _too_large()
            yield chunk

    parser = MultiPartParser(
        request.headers, bounded(), max_files=MAX_IMAGES, max_fields=MAX_IMAGES
    )
    try:
        return await parser.parse()
    except MultiPartException as error:
        raise (_too_many() if "files" in error.message else _unreadable()) from error
    except UnicodeError as error:  # the form names a wrong encoding
        raise _unreadable() from error


def _too_large() -> ImageError:
    limit = MAX_UPLOAD_BYTES // 2**20
    return ImageError("too much at once", code="upload_too_large", values={"limit": limit})


def _unreadable() -> ImageError:
    return ImageError("the upload cannot be read", code="upload_unreadable")


def _too_many() -> ImageError:
    return ImageError("too many", code="too_many_images", values={"limit": MAX_IMAGES})
