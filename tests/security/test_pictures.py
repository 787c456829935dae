"""Pictures that are made to take memory or time: six visitors at once, and an honest one beside them."""

import io
import logging
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import numpy as np
import PIL.Image
import pytest

from tests.pages import REPLY
from tests.security.server_process import (
    ServerProcess,
    call_chat,
    picture_of,
    send_message,
    upload,
)

logger = logging.getLogger(__name__)

MEBIBYTE = 2**20
MOST_MEBIBYTES = 400
"""Above the idle server, with six visitors who send four large pictures each."""


def zeros_png(width: int, height: int, depth: int, colour: int) -> bytes:
    """A PNG of a few kilobytes that takes megabytes when it is decoded."""
    channels = {0: 1, 2: 3, 4: 2, 6: 4}[colour]
    row = b"\x00" + bytes(width * channels * depth // 8)
    packer = zlib.compressobj(9)
    pixels = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()

    def chunk(kind: bytes, data: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + checksum

    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    )


def progressive_jpeg_with_scans(count: int) -> bytes:
    """A JPEG whose last scan stands there many times; each makes a decoder go over all of it."""
    buffer = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    PIL.Image.fromarray(pixels).save(buffer, "JPEG", progressive=True)
    data = buffer.getvalue()
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * count + data[-2:]


DECODED = (
    zeros_png(4_000, 3_000, 16, 0),  # grey levels of 16 bits
    zeros_png(4_000, 3_000, 16, 6),  # 16 bits, with transparency
    zeros_png(4_000, 3_000, 8, 6),
    zeros_png(3_000, 4_000, 8, 2),
)
"""As large as a picture may be."""
REFUSED = (
    zeros_png(7_000, 5_671, 16, 0),  # the 39.7 megapixels that took 8.4 GB
    zeros_png(1, 1, 8, 2).replace(
        struct.pack(">II", 1, 1), struct.pack(">II", 65_535, 65_535), 1
    ),  # four gigapixels, says the header
)


@contextmanager
def peak(server: ServerProcess) -> Iterator[list[int]]:
    """Measure the largest resident memory until the block ends, in bytes."""
    highest = [server.resident_bytes()]
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.02):
            highest[0] = max(highest[0], server.resident_bytes())

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield highest
    finally:
        ended.set()
        watching.join()


@pytest.mark.timeout(300)
def test_six_hostile_visitors_take_less_than_400_mebibytes_and_delay_nobody_long(server):
    with server.visitor() as honest:
        small = upload(honest, "small.png", zeros_png(64, 64, 8, 2)).json()[0]
        assert REPLY in send_message(honest, "quick", [small])
    idle = server.resident_bytes()

    def attack() -> tuple[str, str]:
        with server.visitor() as burglar:
            burglar.timeout = httpx.Timeout(120)
            decoded = [upload(burglar, "x.png", data).json()[0] for data in DECODED]
            refused = [upload(burglar, "x.png", data).json()[0] for data in REFUSED]
            return send_message(burglar, "quick", decoded), send_message(burglar, "look", refused)

    with peak(server) as highest, ThreadPoolExecutor(7) as pool:
        attacks = [pool.submit(attack) for _ in range(6)]
        begun = time.monotonic()
        with server.visitor() as honest:
            honest.timeout = httpx.Timeout(60)
            path = upload(honest, "desk.png", zeros_png(640, 480, 8, 2)).json()[0]
            assert REPLY in send_message(honest, "quick", [path])
        waited = time.monotonic() - begun
        outcomes = [each.result() for each in attacks]

    assert all(REPLY in answered for answered, _ in outcomes)
    assert all("12 million pixels are the most" in refused for _, refused in outcomes)
    above = (highest[0] - idle) / MEBIBYTE
    logger.info("highest above idle: %.0f MiB; the honest visitor waited %.1f s", above, waited)
    assert above < MOST_MEBIBYTES
    assert waited < 30
    assert server.is_healthy()


def test_a_jpeg_of_a_thousand_scans_is_refused_at_once(server):
    with server.visitor() as client:
        path = upload(client, "x.jpg", progressive_jpeg_with_scans(1_000)).json()[0]
        begun = time.monotonic()
        kind, said = call_chat(client, image=picture_of(path))

    assert kind == "error"
    assert "scans" in str(said)
    assert time.monotonic() - begun < 5
