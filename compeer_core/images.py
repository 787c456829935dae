"""Pictures that visitors send: checked, turned upright, stripped, shrunk, and encoded anew.

Bytes from outside are never passed on. What a model or a screen gets is a PNG or JPEG that this
module wrote, so it holds pixels and nothing else: no position of the phone, no thumbnail, no script.
"""

import base64
import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import PIL.Image
import PIL.ImageOps

from compeer_core.errors import ImageError

MAX_PIXELS = 40_000_000
MAX_SIDE = 1024

_FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF")
_LOSSLESS = ("PNG", "GIF", "BMP", "TIFF")
_JPEG_QUALITY = 92


@dataclass(frozen=True)
class Image:
    """One picture, safe to show and to give to a model. `read_image` makes them.

    Attributes:
        data: A PNG or JPEG file without metadata.
        width: In pixels, upright.
        height: In pixels, upright.
        alt: What the picture shows, in the visitor's words; may be empty.
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
    """Read a picture from outside: PNG, JPEG, GIF, WebP, BMP or TIFF, whatever its file is called.

    It is turned the way its EXIF note says, laid on white where it is transparent, reduced to 8-bit
    RGB and shrunk, with its proportions, to ``max_side``. Of an animation the first frame counts.

    Args:
        source: The file's content, or where the file lies.
        max_pixels: Refuse larger pictures, by their header, before anything is decoded.
        max_side: The longer side of the result, in pixels; smaller pictures stay as they are.
        alt: See `Image`.

    Raises:
        ImageError: ``image_not_image`` (none of these formats), ``image_too_large`` (with
            ``limit`` and ``pixels``), ``image_unreadable`` (cut short, corrupt, or no such file).
    """
    try:
        data = source if isinstance(source, bytes) else source.read_bytes()
    except OSError as error:
        raise _unreadable(error) from error
    try:
        with PIL.Image.open(io.BytesIO(data), formats=_FORMATS) as picture:
            pixels = picture.width * picture.height
            if pixels > max_pixels:
                raise ImageError(
                    f"the picture has {pixels} pixels, at most {max_pixels} are allowed",
                    "image_too_large",
                    {"limit": max_pixels, "pixels": pixels},
                )
            lossless = picture.format in _LOSSLESS
            upright = _upright_rgb(picture, max_side)
    except ImageError:
        raise
    except PIL.UnidentifiedImageError as error:
        raise ImageError("the file is not a picture", "image_not_image") from error
    except (PIL.Image.DecompressionBombError, PIL.Image.DecompressionBombWarning) as error:
        raise ImageError(str(error), "image_too_large", {"limit": max_pixels}) from error
    except Exception as error:
        # Pillow's decoders raise nearly every built-in error on bytes that were made to break them.
        raise _unreadable(error) from error
    return _encoded(upright, alt, lossless=lossless)


def _unreadable(error: Exception) -> ImageError:
    return ImageError(f"the picture cannot be read: {error}", "image_unreadable")


def _upright_rgb(picture: PIL.Image.Image, max_side: int) -> PIL.Image.Image:
    # A JPEG can be decoded at a fraction of its size, which spares most of a phone photo's work.
    picture.draft(None, (max_side, max_side))
    upright = _rgb(PIL.ImageOps.exif_transpose(picture))
    upright.thumbnail((max_side, max_side), PIL.Image.Resampling.LANCZOS)
    return upright


def _rgb(picture: PIL.Image.Image) -> PIL.Image.Image:
    if picture.mode.startswith(("I", "F")):
        return _eight_bit(picture).convert("RGB")
    if picture.has_transparency_data:
        layer = picture.convert("RGBA")
        white = PIL.Image.new("RGBA", layer.size, "white")
        return PIL.Image.alpha_composite(white, layer).convert("RGB")
    return picture.convert("RGB")


def _eight_bit(picture: PIL.Image.Image) -> PIL.Image.Image:
    """Scale grey levels of more than 8 bits: Pillow's own conversion would clip them to white."""
    levels = np.nan_to_num(np.asarray(picture, dtype=np.float64)).clip(0)
    full = 255.0 if levels.max() <= 255 else max(65535.0, float(levels.max()))
    return PIL.Image.fromarray((levels * (255.0 / full)).astype(np.uint8))


def _encoded(picture: PIL.Image.Image, alt: str, *, lossless: bool) -> Image:
    picture.info.clear()  # comments and colour profiles would be written along
    buffer = io.BytesIO()
    if lossless:
        picture.save(buffer, "PNG")
    else:
        picture.save(buffer, "JPEG", quality=_JPEG_QUALITY)
    return Image(buffer.getvalue(), picture.width, picture.height, alt)
