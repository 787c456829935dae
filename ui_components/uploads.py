"""Photos that come with a message: read into memory, and deleted from the disk."""

import logging
from collections.abc import Sequence
from pathlib import Path

from compeer_core.errors import ImageError
from compeer_core.images import Image, read_image

logger = logging.getLogger(__name__)

MAX_IMAGES = 4


def read_images(files: Sequence[Path], alt: str) -> tuple[Image, ...]:
    """Read the photos of one message.

    Raises:
        ImageError: There are too many, one is gone, or one cannot be used.
    """
    if len(files) > MAX_IMAGES:
        raise ImageError("too many", code="too_many_images", values={"limit": MAX_IMAGES})
    return tuple(_read_named(path, alt.strip()) for path in files)


def _read_named(path: Path, alt: str) -> Image:
    if not path.is_file():
        raise ImageError("the upload is gone", code="image_gone")
    try:
        return read_image(path, alt=alt)
    except ImageError as error:
        megapixels = round(error.values.get("limit", 0) / 1e6)
        values = error.values | {"name": path.name, "megapixels": megapixels}
        raise ImageError(str(error), code=error.code, values=values) from error


def forget_upload(path: Path) -> None:
    """Delete an upload that is in memory now; gradio would keep it for an hour."""
    try:
        path.unlink(missing_ok=True)
        path.parent.rmdir()
    except OSError:
        logger.debug("an upload's folder is still in use")
