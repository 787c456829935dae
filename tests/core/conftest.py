"""Tiny checkpoints for the tests of the core, built once a run."""

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

from compeer_core.images import Image, read_image

Picture = Callable[..., Image]


@pytest.fixture(scope="session")
def qwen_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen2.5-VL. Copy it before you change it."""
    from tests.checkpoints import build_qwen

    return build_qwen(tmp_path_factory.mktemp("checkpoints") / "tiny-qwen")


@pytest.fixture(scope="session")
def llava_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random LLaVA, whose template knows no system message."""
    from tests.checkpoints import build_llava

    return build_llava(tmp_path_factory.mktemp("checkpoints") / "tiny-llava")


@pytest.fixture(scope="module")
def pool() -> Any:
    from compeer_core.model_pool import ModelPool

    return ModelPool()


@pytest.fixture(scope="module")
def qwen(qwen_folder: Path, pool: Any) -> Iterator[Any]:
    """The tiny Qwen2.5-VL as a backend."""
    from compeer_core.model_pool import load_transformers

    backend = load_transformers(str(qwen_folder), pool=pool)
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def llava(llava_folder: Path, pool: Any) -> Iterator[Any]:
    """The tiny LLaVA as a backend."""
    from compeer_core.model_pool import load_transformers

    backend = load_transformers(str(llava_folder), pool=pool)
    yield backend
    backend.close()


@pytest.fixture(scope="session")
def adapter_folders(qwen_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two LoRA adapters for the tiny Qwen2.5-VL."""
    from tests.checkpoints import build_adapter

    folder = tmp_path_factory.mktemp("adapters")
    return [
        build_adapter(qwen_folder, folder / name, seed=seed)
        for seed, name in enumerate(("warm", "cool"), start=1)
    ]


@pytest.fixture(scope="module")
def one_core() -> Iterator[None]:
    """Models this small lose more by sharing an operation between cores than they gain."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def picture() -> Picture:
    """Make a picture of random pixels: `picture(seed=1, width=90, height=60)`."""

    def make(seed: int = 0, width: int = 90, height: int = 60) -> Image:
        pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
        buffer = io.BytesIO()
        PIL.Image.fromarray(pixels).save(buffer, "PNG")
        return read_image(buffer.getvalue())

    return make
