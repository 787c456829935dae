"""The processor of a checkpoint, which turns chat messages and images into model inputs.

`load_processor` uses the one from `transformers`, except for Qwen2.5-VL and InternVL: their processors also
prepare videos, which needs torchvision, and PyPI has no CPU build of torchvision. The two classes here leave
out videos. `ImageOnlyQwen2_5_VLProcessor` saves files under the library's own names, so the folder also loads
with `AutoProcessor` (and in vLLM) where torchvision is installed.
"""

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from transformers import (
    AutoProcessor,
    AutoTokenizer,
    InternVLProcessor,
    PretrainedConfig,
    ProcessorMixin,
    Qwen2_5_VLProcessor,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

_SHARED_WITH_VIDEO = (
    "do_convert_rgb",
    "do_normalize",
    "do_rescale",
    "do_resize",
    "image_mean",
    "image_std",
    "merge_size",
    "patch_size",
    "resample",
    "rescale_factor",
    "size",
    "temporal_patch_size",
)


class ImageOnlyQwen2_5_VLProcessor(Qwen2_5_VLProcessor):
    """`Qwen2_5_VLProcessor` without the video part, and so without torchvision.

    PIL prepares the images. Values differ from torchvision's by rounding, by at most 0.015 on a scale
    where an image spans about 4.
    """

    def __init__(
        self,
        image_processor: Qwen2VLImageProcessorPil | None = None,
        tokenizer: Any = None,
        chat_template: str | None = None,
    ) -> None:
        # The base class's __init__ without the video processor.
        self.image_token = getattr(tokenizer, "image_token", "<|image_pad|>")
        self.video_token = getattr(tokenizer, "video_token", "<|video_pad|>")
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        self.video_token_id = tokenizer.convert_tokens_to_ids(self.video_token)
        if chat_template is None:
            chat_template = getattr(tokenizer, "chat_template", None)
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)

    @classmethod
    def _get_arguments_from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        processor_dict: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        return [
            Qwen2VLImageProcessorPil.from_pretrained(pretrained_model_name_or_path, **kwargs),
            AutoTokenizer.from_pretrained(pretrained_model_name_or_path, **kwargs),
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the config as the library's own class would, with its video part."""
        description: dict[str, Any] = super().to_dict()
        image = dict(description["image_processor"], image_processor_type="Qwen2VLImageProcessor")
        video = {key: image[key] for key in _SHARED_WITH_VIDEO if key in image}
        description["image_processor"] = image
        description["video_processor"] = video | {"video_processor_type": "Qwen2VLVideoProcessor"}
        description["processor_class"] = Qwen2_5_VLProcessor.__name__
        return description

    def save_pretrained(
        self, save_directory: str | Path, push_to_hub: bool = False, **kwargs: Any
    ) -> list[str]:
        """Save the files for `from_pretrained`, `AutoProcessor` and older readers.

        Older releases of transformers and other programs read `preprocessor_config.json` instead of
        the nested `processor_config.json`; both are written.
        """
        files: list[str] = super().save_pretrained(save_directory, push_to_hub, **kwargs)
        # The base class writes this class's name into tokenizer_config.json.
        self.tokenizer._set_processor_class(Qwen2_5_VLProcessor.__name__)
        self.tokenizer.save_pretrained(save_directory)
        self._name_tokenizer_for_all_releases(Path(save_directory, "tokenizer_config.json"))
        description = self.to_dict()
        legacy = description["image_processor"] | {
            "processor_class": description["processor_class"]
        }
        path = Path(save_directory, "preprocessor_config.json")
        path.write_text(json.dumps(legacy, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        return [*files, str(path)]

    @staticmethod
    def _name_tokenizer_for_all_releases(path: Path) -> None:
        """Replace transformers 5's name of `PreTrainedTokenizerFast`, which release 4 does not know."""
        config = json.loads(path.read_text(encoding="utf-8"))
        if config.get("tokenizer_class") == "TokenizersBackend":
            config["tokenizer_class"] = "PreTrainedTokenizerFast"
            path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


class ImageOnlyInternVLProcessor(InternVLProcessor):
    """`InternVLProcessor` without the video part, and so without torchvision."""

    # The base class loads a part for each of these parameters.
    def __init__(
        self,
        image_processor: Any = None,
        tokenizer: Any = None,
        image_seq_length: int = 256,
        chat_template: str | None = None,
    ) -> None:
        super().__init__(image_processor, tokenizer, None, image_seq_length, chat_template)


IMAGE_ONLY: Mapping[str, type[ProcessorMixin]] = MappingProxyType(
    {"qwen2_5_vl": ImageOnlyQwen2_5_VLProcessor, "internvl": ImageOnlyInternVLProcessor}
)
"""By model type."""


def load_processor(path: str | Path, **kwargs: Any) -> Any:
    """Load the processor of the checkpoint at `path` (a folder or a Hub ID).

    If torchvision is missing, the models of `IMAGE_ONLY` get those processors; `AutoProcessor` loads all
    others. Of a text-only model it is the tokenizer. Code in a checkpoint is never executed.

    Args:
        path: The folder or Hub ID.
        kwargs: Passed to `from_pretrained`, for example `local_files_only=True`.

    Raises:
        OSError: A file is missing or unreadable, as reported by `transformers`.
    """
    config, _ = PretrainedConfig.get_config_dict(path, **kwargs)
    image_only = IMAGE_ONLY.get(config.get("model_type", ""))
    if image_only is not None and importlib.util.find_spec("torchvision") is None:
        return image_only.from_pretrained(path, **kwargs)
    return AutoProcessor.from_pretrained(path, trust_remote_code=False, **kwargs)
