"""Pictures from outside: what is one is turned, stripped and shrunk; what is none says so."""

import base64
import contextlib
import io
import struct
import tracemalloc
import zlib

import numpy as np
import PIL.Image
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import ImageDraw, PngImagePlugin

from compeer_core.errors import ImageError
from compeer_core.images import Image, read_image

RED, BLUE, WHITE, BLACK = (255, 0, 0), (0, 0, 255), (255, 255, 255), (0, 0, 0)
ORIENTATION, GPS, DESCRIPTION = 0x0112, 0x8825, 0x010E


def encoded(picture: PIL.Image.Image, kind: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def red_over_blue(size: tuple[int, int] = (40, 20)) -> PIL.Image.Image:
    picture = PIL.Image.new("RGB", size, BLUE)
    ImageDraw.Draw(picture).rectangle((0, 0, size[0], size[1] // 2 - 1), fill=RED)
    return picture


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and holds no pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + checksum

    size = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


def is_near(pixel: object, colour: tuple[int, int, int], tolerance: int = 12) -> bool:
    assert isinstance(pixel, tuple)
    return all(abs(one - other) <= tolerance for one, other in zip(pixel, colour, strict=True))


def code_of(data: bytes, **limits: int) -> str:
    with pytest.raises(ImageError) as caught:
        read_image(data, **limits)
    return caught.value.code


# --- Pictures ---------------------------------------------------------------------------------


def test_a_small_png_keeps_its_size_and_pixels():
    image = read_image(encoded(red_over_blue()), alt="two bands")

    assert (image.width, image.height, image.alt) == (40, 20, "two bands")
    assert image.media_type == "image/png"
    assert image.to_pil().mode == "RGB"
    assert image.to_pil().tobytes() == red_over_blue().tobytes()


def test_a_large_picture_is_shrunk_with_its_proportions():
    image = read_image(encoded(red_over_blue((3000, 1500)), "JPEG"), max_side=600)

    assert (image.width, image.height) == (600, 300)
    assert image.to_pil().size == (600, 300)
    assert image.media_type == "image/jpeg"
    assert is_near(image.to_pil().getpixel((300, 50)), RED)


def test_a_phone_photo_is_turned_upright_and_forgets_where_it_was_taken():
    exif = PIL.Image.Exif()
    exif[ORIENTATION] = 6  # the camera was held on its side: turn by 90 degrees, clockwise
    exif[DESCRIPTION] = "my kitchen"
    exif.get_ifd(GPS)[1] = "N"
    photo = encoded(red_over_blue((80, 40)), "JPEG", exif=exif, comment=b"mine", quality=95)

    image = read_image(photo)

    assert (image.width, image.height) == (40, 80)
    assert is_near(image.to_pil().getpixel((35, 40)), RED)  # what was above is now right
    assert is_near(image.to_pil().getpixel((4, 40)), BLUE)
    with PIL.Image.open(io.BytesIO(image.data)) as stripped:
        assert not stripped.getexif()
        assert not {"exif", "comment", "icc_profile", "xmp"} & set(stripped.info)
    assert b"kitchen" not in image.data


def test_text_and_profiles_of_a_png_are_dropped():
    notes = PngImagePlugin.PngInfo()
    notes.add_text("Author", "a name")
    notes.add_itxt("XML:com.adobe.xmp", "<x>secret</x>")
    data = encoded(red_over_blue(), "PNG", pnginfo=notes, icc_profile=b"profile")

    image = read_image(data)

    assert b"a name" not in image.data
    assert b"secret" not in image.data
    with PIL.Image.open(io.BytesIO(image.data)) as stripped:
        stripped.load()
        assert not set(stripped.info)


def test_transparent_images_are_composited_on_white():
    layer = PIL.Image.new("RGBA", (4, 1), (0, 0, 255, 255))
    layer.putpixel((0, 0), (255, 0, 0, 0))
    layer.putpixel((1, 0), (0, 0, 0, 51))  # a fifth of black over white: 255 * 0.8 = 204

    pixels = read_image(encoded(layer)).to_pil()

    assert [pixels.getpixel((x, 0)) for x in range(3)] == [WHITE, (204, 204, 204), BLUE]


def test_transparent_palette_colours_are_composited_on_white():
    palette = PIL.Image.new("P", (2, 1))
    palette.putpalette([*RED, *BLUE])
    palette.putpixel((1, 0), 1)

    pixels = read_image(encoded(palette, "PNG", transparency=0)).to_pil()

    assert [pixels.getpixel((x, 0)) for x in range(2)] == [WHITE, BLUE]


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA"])
def test_every_mode_of_png_becomes_rgb(mode):
    image = read_image(encoded(red_over_blue().convert(mode)))

    assert image.to_pil().mode == "RGB"
    assert (image.width, image.height) == (40, 20)


def test_a_cmyk_jpeg_keeps_its_colours():
    cmyk = encoded(red_over_blue().convert("CMYK"), "JPEG", quality=95)

    assert is_near(read_image(cmyk).to_pil().getpixel((20, 3)), RED, tolerance=30)


def test_sixteen_bit_grey_is_scaled_and_not_clipped():
    levels = np.array([[0, 257 * 100, 65535]], dtype=np.uint16)

    pixels = read_image(encoded(PIL.Image.fromarray(levels))).to_pil()

    assert [pixels.getpixel((x, 0)) for x in range(3)] == [BLACK, (100, 100, 100), WHITE]


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_deep_tiffs_are_scaled(dtype):
    levels = np.array([[0, 65535]], dtype=dtype)

    pixels = read_image(encoded(PIL.Image.fromarray(levels), "TIFF")).to_pil()

    assert [pixels.getpixel((x, 0)) for x in range(2)] == [BLACK, WHITE]


def test_a_nan_level_becomes_black():
    levels = np.array([[np.nan, 200.0]], dtype=np.float32)

    pixels = read_image(encoded(PIL.Image.fromarray(levels), "TIFF")).to_pil()

    assert [pixels.getpixel((x, 0)) for x in range(2)] == [BLACK, (200, 200, 200)]


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_the_first_frame_of_an_animation_is_used(kind):
    frames = [PIL.Image.new("RGB", (16, 16), colour) for colour in (RED, BLUE)]
    data = encoded(frames[0], kind, save_all=True, append_images=frames[1:], duration=100)

    assert is_near(read_image(data).to_pil().getpixel((8, 8)), RED)


@pytest.mark.parametrize(
    ("kind", "media_type"),
    [
        ("PNG", "image/png"),
        ("GIF", "image/png"),
        ("BMP", "image/png"),
        ("TIFF", "image/png"),
        ("JPEG", "image/jpeg"),
        ("WEBP", "image/jpeg"),
    ],
)
def test_drawings_become_png_and_photos_jpeg(kind, media_type):
    image = read_image(encoded(red_over_blue(), kind))

    assert image.media_type == media_type
    prefix, _, data = image.data_url().partition(",")
    assert prefix == f"data:{media_type};base64"
    assert base64.b64decode(data) == image.data


def test_a_file_is_judged_by_its_content_and_not_by_its_name(tmp_path):
    path = tmp_path / "photo.png"
    path.write_bytes(encoded(red_over_blue(), "JPEG"))

    assert read_image(path) == read_image(path.read_bytes())


def test_reading_a_picture_that_was_read_changes_no_pixel():
    once = read_image(encoded(red_over_blue()))

    assert read_image(once.data) == once


# --- What is refused --------------------------------------------------------------------------


def test_a_web_page_named_png_is_not_a_picture(tmp_path):
    path = tmp_path / "photo.png"
    path.write_text("<!doctype html><script>alert(1)</script>", encoding="utf-8")

    with pytest.raises(ImageError) as caught:
        read_image(path)

    assert caught.value.code == "image_not_image"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"%PDF-1.7",
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        b'<svg xmlns="http://www.w3.org/2000/svg"/>',
        encoded(red_over_blue(), "ICO"),
        encoded(red_over_blue(), "PPM"),
    ],
)
def test_unsupported_formats_are_not_images(data):
    assert code_of(data) == "image_not_image"


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF"])
def test_a_truncated_image_cannot_be_read(kind):
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    data = encoded(PIL.Image.fromarray(noise), kind)

    assert code_of(data[: len(data) * 2 // 3]) in {"image_unreadable", "image_not_image"}


def test_a_missing_file_cannot_be_read(tmp_path):
    with pytest.raises(ImageError) as caught:
        read_image(tmp_path / "nowhere.png")

    assert caught.value.code == "image_unreadable"


@pytest.mark.parametrize("side", [10_000, 15_000, 60_000])
def test_a_picture_of_a_hundred_megapixels_or_more_is_refused_before_it_is_decoded(side):
    tracemalloc.start()
    try:
        code = code_of(png_header(side, side))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert code == "image_too_large"
    assert peak < 5_000_000  # bytes; decoded, the smallest of them has 300 million


def test_the_pixel_limit_is_reported():
    data = encoded(red_over_blue((40, 20)))

    assert read_image(data, max_pixels=800).width == 40
    with pytest.raises(ImageError) as caught:
        read_image(data, max_pixels=799)

    assert caught.value.code == "image_too_large"
    assert caught.value.values == {"limit": 799, "pixels": 800}


SAMPLES = tuple(encoded(red_over_blue(), kind) for kind in ("PNG", "JPEG", "GIF", "WEBP", "TIFF"))


@settings(deadline=None)
@given(
    st.sampled_from(SAMPLES),
    st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=8),
    st.integers(0, 10_000),
)
def test_broken_bytes_are_read_or_refused_and_nothing_else(sample, changes, cut):
    broken = bytearray(sample)
    for position, byte in changes:
        broken[position % len(broken)] = byte

    try:
        image = read_image(bytes(broken[: max(1, cut)]))
    except ImageError as error:
        assert error.code in {"image_not_image", "image_unreadable", "image_too_large"}
    else:
        assert image.to_pil().size == (image.width, image.height)


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data):
    with contextlib.suppress(ImageError):
        read_image(data)


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 200))
def test_no_side_is_longer_than_the_limit_and_none_is_empty(width, height, max_side):
    image = read_image(encoded(PIL.Image.new("RGB", (width, height))), max_side=max_side)

    assert 1 <= image.width <= min(width, max_side)
    assert 1 <= image.height <= min(height, max_side)
    assert isinstance(image, Image)
