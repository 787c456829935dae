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

from tests.page_client import call_chat, picture_of, send_message, upload
from tests.pages import REPLY
from tests.security.server_process import ServerProcess

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


def jpeg_with_a_scan_for_each_channel(width: int, height: int, channels: int) -> bytes:
    """A black JPEG that is not progressive, of which a decoder has to hold all coefficients."""

    def segment(mark: int, content: bytes) -> bytes:
        return struct.pack(">BBH", 0xFF, mark, len(content) + 2) + content

    codes = bytes([1] + [0] * 15) + b"\x00"  # one code, of one bit: nothing differs
    frame = struct.pack(">BHHB", 8, height, width, channels)
    frame += b"".join(bytes([channel, 0x11, 0]) for channel in range(1, channels + 1))
    data = b"\xff\xd8" + segment(0xDB, b"\x00" + b"\x01" * 64)
    data += segment(0xC4, b"\x00" + codes + b"\x10" + codes) + segment(0xC0, frame)
    pixels = bytes(-(-width // 8) * -(-height // 8) // 4 + 1)
    for channel in range(1, channels + 1):
        data += segment(0xDA, bytes([1, channel, 0, 0, 63, 0])) + pixels
    return data + b"\xff\xd9"


def tiff_of_one_tile(side: int) -> bytes:
    """A TIFF of one pixel in a tile that is much larger."""
    packer = zlib.compressobj(9)
    row = bytes(side)
    tile = b"".join(packer.compress(row) for _ in range(side)) + packer.flush()
    tags = {256: 1, 257: 1, 258: 8, 259: 8, 262: 1, 277: 1, 322: side, 323: side}
    tags |= {324: 8 + 2 + 12 * 10 + 4, 325: len(tile)}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    return b"II*\x00" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4) + tile


def decoded_pictures() -> list[bytes]:
    """As large as a picture may be."""
    return [
        zeros_png(4_000, 3_000, 16, 0),  # grey levels of 16 bits
        zeros_png(4_000, 3_000, 16, 6),  # 16 bits, with transparency
        zeros_png(4_000, 3_000, 8, 6),
        zeros_png(3_000, 4_000, 8, 2),
    ]


def refused_pictures() -> list[bytes]:
    """Larger than a picture may be."""
    return [
        zeros_png(7_000, 5_671, 16, 0),  # the 39.7 megapixels that took 8.4 GB
        zeros_png(1, 1, 8, 2).replace(
            struct.pack(">II", 1, 1), struct.pack(">II", 65_535, 65_535), 1
        ),  # four gigapixels, says the header
    ]


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
    decodable, refusable = decoded_pictures(), refused_pictures()

    def attack() -> tuple[str, str]:
        with server.visitor() as burglar:
            burglar.timeout = httpx.Timeout(120)
            decoded = [upload(burglar, "x.png", data).json()[0] for data in decodable]
            refused = [upload(burglar, "x.png", data).json()[0] for data in refusable]
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
    assert all("12 megapixels" in refused for _, refused in outcomes)
    above = (highest[0] - idle) / MEBIBYTE
    logger.info("highest above idle: %.0f MiB; the honest visitor waited %.1f s", above, waited)
    assert above < MOST_MEBIBYTES
    assert waited < 30
    assert server.is_healthy()


def test_a_jpeg_of_a_thousand_scans_is_refused_at_once(server):
    with server.visitor() as client:
        path = upload(client, "x.jpg", progressive_jpeg_with_scans(1_000)).json()[0]
        begun = time.monotonic()
        kind, answer = call_chat(client, image=picture_of(path))

    assert kind == "error"
    assert "scans" in str(answer)
    assert time.monotonic() - begun < 5


@pytest.mark.parametrize(
    "made",
    [lambda: jpeg_with_a_scan_for_each_channel(7_936, 7_936, 4), lambda: tiff_of_one_tile(16_000)],
    ids=["JPEG of four scans", "TIFF of one tile"],
)
def test_a_picture_whose_size_hides_in_its_parts_is_refused_before_it_is_decoded(server, made):
    bomb = made()
    idle = server.resident_bytes()
    with server.visitor() as client, peak(server) as highest:
        path = upload(client, "x.jpg", bomb).json()[0]
        kind, answer = call_chat(client, image=picture_of(path))

    assert kind == "error"
    assert "pixels, at most 12600000 are allowed" in str(answer)
    assert highest[0] - idle < 100 * MEBIBYTE


def test_a_photo_of_a_large_phone_camera_is_still_read(server):
    buffer = io.BytesIO()
    PIL.Image.new("RGB", (8_000, 6_000), "olive").save(buffer, "JPEG", exif=PIL.Image.Exif())
    with server.visitor() as client:
        path = upload(client, "x.jpg", buffer.getvalue()).json()[0]
        assert call_chat(client, image=picture_of(path))[0] == "complete"
