"""Visitors' images: checked, rotated upright, stripped of metadata, shrunk, and re-encoded.

Bytes from outside are never passed on. Models and screens get a PNG or JPEG written by this module,
which contains only pixels: no GPS position, no thumbnail, no script.
"""

import base64
import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import PIL.Image
import PIL.ImageOps

from compeer_core.errors import ImageError

MAX_PIXELS = 12_600_000
"""Largest image that is decoded in full; a 12-megapixel camera has 4032 x 3024."""
_JPEG_FACTOR = 5
"""How many times larger a single-scan JPEG may be, since it is decoded at a reduced size."""
_MOST_SCANS = 64
"""Limit for progressive JPEGs: each scan is a pass over the whole image."""
_MARKER, _SCAN, _FRAMES = 0xFF, 0xDA, (0xC0, 0xC1)
"""Markers of JPEG segments; frames of other kinds are progressive or unsupported."""
_BARE = {0x00, 0x01, *range(0xD0, 0xDA)}
"""Markers without a segment."""
_TILE_WIDTH, _TILE_LENGTH = 322, 323
MAX_SIDE = 1024

_FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF")
_LOSSLESS = ("PNG", "GIF", "BMP", "TIFF")
_JPEG_QUALITY = 92
_ROWS = 64


@dataclass(frozen=True)
class Image:
    """One image, safe to show and to give to a model. `read_image` creates them.

    Attributes:
        data: A PNG or JPEG file without metadata.
        width: In pixels, upright.
        height: In pixels, upright.
        alt: The visitor's description; may be empty.
    """

    data: bytes
    width: int
    height: int
    alt: str = ""

    @property
    def media_type(self) -> str:
        """``image/png`` or ``image/jpeg``."""
        return "image/png" if self.data.startswith(b"\x89PNG") else "image/jpeg"

    def to_pil(self) -> PIL.Image.Image:
        """Return the pixels, RGB."""
        with PIL.Image.open(io.BytesIO(self.data)) as picture:
            return picture.convert("RGB")

    def data_url(self) -> str:
        """Return the file as a ``data:`` URL."""
        return f"data:{self.media_type};base64,{base64.b64encode(self.data).decode('ascii')}"


def read_image(
    source: bytes | Path,
    *,
    max_pixels: int = MAX_PIXELS,
    max_side: int = MAX_SIDE,
    alt: str = "",
) -> Image:
    """Read an image from outside: PNG, JPEG, GIF, WebP, BMP or TIFF, whatever its file name.

    It is rotated by its EXIF orientation, composited on white, converted to 8-bit RGB and shrunk to
    ``max_side``, keeping its proportions. Only the first frame of an animation is used. Peak memory
    is about 12 bytes per pixel of ``max_pixels``.

    Args:
        source: The file's content or path.
        max_pixels: Larger images are rejected by their header, before decoding. A single-scan JPEG
            may be five times as large, as it is decoded at a reduced size.
        max_side: Longer side of the result, in pixels; smaller images keep their size.
        alt: See `Image`.

    Raises:
        ImageError: ``image_not_image`` (none of these formats), ``image_too_large`` (with
            ``limit`` and ``pixels``), ``image_unreadable`` (truncated, corrupt, or no such file).
    """
    try:
        data = source if isinstance(source, bytes) else source.read_bytes()
    except OSError as error:
        raise _unreadable(error) from error
    try:
        with PIL.Image.open(io.BytesIO(data), formats=_FORMATS) as picture:
            _check_size(picture, data, max_pixels, max_side)
            lossless = picture.format in _LOSSLESS
            upright = _upright_rgb(picture, max_side)
    except ImageError:
        raise
    except PIL.UnidentifiedImageError as error:
        raise ImageError("the file is not an image", "image_not_image") from error
    except (PIL.Image.DecompressionBombError, PIL.Image.DecompressionBombWarning) as error:
        raise ImageError(str(error), "image_too_large", {"limit": max_pixels}) from error
    except Exception as error:
        # Pillow's decoders raise nearly every built-in error on malicious bytes.
        raise _unreadable(error) from error
    return _encoded(upright, alt, lossless=lossless)


def _unreadable(error: Exception) -> ImageError:
    return ImageError(f"the image cannot be read: {error}", "image_unreadable")


def _check_size(picture: PIL.Image.Image, data: bytes, max_pixels: int, max_side: int) -> None:
    """Reject by the header what would take too much memory or time; set JPEGs to be reduced."""
    pixels, limit = picture.width * picture.height, max_pixels
    if picture.format == "TIFF":
        # A tile is decoded whole, however small the image is.
        tags = getattr(picture, "tag_v2", {})
        width, height = tags.get(_TILE_WIDTH, 1), tags.get(_TILE_LENGTH, 1)
        if not isinstance(width, int) or not isinstance(height, int):
            raise ImageError("the image's tiles have no size", "image_unreadable")
        pixels = max(pixels, width * height)
    if picture.format in ("JPEG", "MPO"):  # several JPEGs in one file, as some phones write
        # In compressed data no byte 0xFF is followed by 0xDA, so this counts the scans.
        scans = data.count(b"\xff\xda")
        if scans > _MOST_SCANS:
            raise ImageError(f"the image has {scans} scans", "image_unreadable")
        if not picture.info.get("progressive") and _first_scan_is_whole(data):
            limit *= _JPEG_FACTOR
    if pixels > limit:
        raise ImageError(
            f"the image has {pixels} pixels, at most {limit} are allowed",
            "image_too_large",
            {"limit": limit, "pixels": pixels},
        )
    # Decode a JPEG at a reduced size, which saves most of the time for a phone photo.
    picture.draft(None, (max_side, max_side))


def _first_scan_is_whole(data: bytes) -> bool:
    """Whether the first scan of a JPEG has all channels.

    Otherwise a decoder keeps every coefficient of the full-size image in memory.
    """
    place, channels = 2, 0
    while place + 10 <= len(data):
        kind = data[place + 1]
        if data[place] != _MARKER or kind == _MARKER:  # fill bytes
            place += 1
        elif kind in _BARE:
            place += 2
        elif kind == _SCAN:
            return data[place + 4] == channels
        else:
            if kind in _FRAMES:
                channels = data[place + 9]
            place += 2 + int.from_bytes(data[place + 2 : place + 4])
    return False


def _upright_rgb(picture: PIL.Image.Image, max_side: int) -> PIL.Image.Image:
    """Return the image in its final form. Shrinks first, since every step makes a copy."""
    box = (max_side, max_side)
    mode = "RGBA" if picture.has_transparency_data else "RGB"
    if picture.mode.startswith(("I", "F")):
        shrunk = _eight_bit(picture)
    else:
        shrunk = picture if picture.mode == mode else picture.convert(mode)
    shrunk.thumbnail(box, PIL.Image.Resampling.LANCZOS)
    if shrunk.mode == "RGBA":
        white = PIL.Image.new("RGBA", shrunk.size, "white")
        shrunk = PIL.Image.alpha_composite(white, shrunk)
    shrunk.info.update(picture.info)  # includes the EXIF orientation
    return PIL.ImageOps.exif_transpose(shrunk).convert("RGB")


def _eight_bit(picture: PIL.Image.Image) -> PIL.Image.Image:
    """Scale grey levels of more than 8 bits: Pillow's own conversion would clip them to white."""
    levels = np.asarray(picture)
    if levels.dtype.kind == "f":
        levels = np.nan_to_num(levels)
    highest = float(levels.max())
    full = 255.0 if highest <= 255 else max(65535.0, highest)
    scaled = np.empty(levels.shape, dtype=np.uint8)
    for first in range(0, len(levels), _ROWS):  # in strips, to save memory
        strip = levels[first : first + _ROWS].clip(0).astype(np.float32)
        scaled[first : first + _ROWS] = strip * np.float32(255.0 / full)
    return PIL.Image.fromarray(scaled)


def _encoded(picture: PIL.Image.Image, alt: str, *, lossless: bool) -> Image:
    picture.info.clear()  # comments and colour profiles would be saved, too
    buffer = io.BytesIO()
    if lossless:
        picture.save(buffer, "PNG")
    else:
        picture.save(buffer, "JPEG", quality=_JPEG_QUALITY)
    return Image(buffer.getvalue(), picture.width, picture.height, alt)
