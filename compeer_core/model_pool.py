"""One set of weights in memory for all policies and judges that use it.

The registry calls `load_transformers` and `load_label_scorer`. Models of the same checkpoint share its
weights and owner thread, and concurrent turns form one batch; LoRA adapters are switched from job to
job. A checkpoint that cannot be loaded raises a `CheckpointError` that names the file and the remedy.
Only safetensors are read, and code in a checkpoint is never executed. A language model without an image tower
is loaded too; it cannot read messages with pictures (`ModelEntry.sees_images`).
"""

import functools
import importlib.util
import json
import logging
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from compeer_core.backends.transformers_ import (
    ChatModel,
    OwnerThread,
    Scheduler,
    TransformersBackend,
    TransformersScorer,
)
from compeer_core.backends.transformers_.fused_step import speed_up
from compeer_core.backends.transformers_.packed_weights import PACKED, load_model
from compeer_core.errors import CheckpointError, CompeerError, ConfigError
from compeer_core.logs import brief
from compeer_core.processing import load_processor
from compeer_core.risk_classifier import RiskClassifier

logger = logging.getLogger(__name__)

Quantization = Literal["4bit", "8bit", "int8"]

SMALL = 200_000_000
"""Below this many parameters one core generates a single turn as fast as several (COMPEER-small on two
idle cores), and waiting for a core that another process uses costs far more. Passes over several tokens or rows use
all cores: a prompt of 311 tokens takes 0.94 s on two, 1.5 s on one."""

HALF_PRECISION_FROM = 1_000_000_000
"""From this many parameters on, weights stay in 16 bits on a CPU, too, to save memory. Below, 32 bits
are faster: 7.0 ms per token against 8.0 ms for a model of 10 million weights on a CPU with
AVX-512 bf16."""

TORCH_THREADS = torch.get_num_threads()
"""Torch's initial setting; new threads inherit what another thread has set."""

TIED_WARNING = "Model has `tie_word_embeddings=True` and a tied layer is part of the adapter"
"""Start of peft's warning about adapters on tied embeddings."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def load_transformers(
    path_or_hub_name: str,
    *,
    adapter: Path | None = None,
    quantize: Quantization | None = None,
    device: str | None = None,
    pool: "ModelPool | None" = None,
) -> TransformersBackend:
    """Load a policy.

    Args:
        path_or_hub_name: A checkpoint folder or a Hub ID.
        adapter: Folder of a LoRA adapter for it.
        quantize: Load the weights in 4 or 8 bits (bitsandbytes), or with "int8" let single turns
            of a small model on a CPU read copies in 8 bits, see `packed_step`.
        device: "cpu", "cuda", "cuda:1", "mps"; None or "auto" is CUDA if available.
        pool: Shares weights; the process's own by default.

    Raises:
        CheckpointError: It cannot be loaded.
        ConfigError: The device does not exist.
    """
    lease = (pool or shared_pool()).lease(path_or_hub_name, adapter, quantize, device)
    return TransformersBackend(lease.name, lease.scheduler, lease.adapter, lease.release)


def load_label_scorer(
    path_or_hub_name: str,
    *,
    adapter: Path | None = None,
    quantize: Quantization | None = None,
    device: str | None = None,
    pool: "ModelPool | None" = None,
) -> TransformersScorer:
    """Load a judge. Like `load_transformers`, and shares weights with it."""
    lease = (pool or shared_pool()).lease(path_or_hub_name, adapter, quantize, device)
    return TransformersScorer(lease.name, lease.chat, lease.adapter, lease.release)


def load_risk_check(
    folder: str,
    file: Path,
    *,
    quantize: Quantization | None = None,
    device: str | None = None,
    pool: "ModelPool | None" = None,
) -> RiskClassifier:
    """Load the learned check for signs of danger. It keeps its base in memory.

    Raises:
        CheckpointError: The base cannot be loaded, or `file` does not fit it.
    """
    lease = (pool or shared_pool()).lease(folder, None, quantize, device)
    try:
        return RiskClassifier(lease.chat.model, lease.chat.tokenizer, file)
    except CheckpointError:
        lease.release()
        raise


@functools.cache
def shared_pool() -> "ModelPool":
    """Return the pool of this process."""
    return ModelPool()


# --- sharing -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lease:
    """The right to use a set of weights, until it is released."""

    name: str
    chat: ChatModel
    scheduler: Scheduler
    """Generates the turns of all models with these weights."""
    adapter: str | None
    release: Callable[[], None]


@dataclass
class _Base:
    chat: ChatModel
    scheduler: Scheduler
    adapters: dict[Path, str] = field(default_factory=dict)
    users: int = 0


class ModelPool:
    """Sets of weights in memory. Thread-safe; each is loaded once and freed with its last user."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bases: dict[tuple[str, str | None, str], _Base] = {}

    def lease(
        self, source: str, adapter: Path | None, quantize: Quantization | None, device: str | None
    ) -> Lease:
        """Get a set of weights with an adapter; see `load_transformers`."""
        place = resolve_device(device)
        folder = as_folder(source)
        key = (str(folder.resolve()) if folder else source, quantize, str(place))
        with self._lock:
            base = self._bases.get(key)
            if base is None:
                chat = _load_base(source, folder, quantize, place)
                base = _Base(chat, Scheduler(chat))
                self._bases[key] = base
            try:
                attached = None if adapter is None else _attached(base, Path(adapter).resolve())
            except BaseException:
                self._drop_unused(key)
                raise
            base.users += 1
        name = base.chat.name if adapter is None else f"{base.chat.name}+{Path(adapter).name}"
        release = functools.cache(lambda: self._release(key))
        return Lease(name, base.chat, base.scheduler, attached, release)

    def _release(self, key: tuple[str, str | None, str]) -> None:
        with self._lock:
            self._bases[key].users -= 1
            self._drop_unused(key)

    def _drop_unused(self, key: tuple[str, str | None, str]) -> None:
        if self._bases[key].users == 0:
            self._bases.pop(key).chat.owner.close()


def resolve_device(device: str | None) -> torch.device:
    """Return the device of a name.

    Raises:
        ConfigError: This machine has no such device.
    """
    if device in {None, "", "auto"}:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(str(device))
    except RuntimeError as error:
        raise ConfigError(f"device {device!r}: not a device; use cpu, cuda, cuda:1, mps") from error
    count = torch.cuda.device_count() if place.type == "cuda" else 1
    missing = (place.index or 0) >= count or (
        place.type == "mps" and not torch.backends.mps.is_available()
    )
    if missing or place.type not in {"cpu", "cuda", "mps"}:
        raise ConfigError(
            f"device {device!r}: not available on this machine; omit it to use the best one"
        )
    return place


# --- weights -----------------------------------------------------------------------------------


def as_folder(source: str) -> Path | None:
    """Return the folder of a source, or None if it is a Hub ID.

    Raises:
        CheckpointError: It can only be a folder, and does not exist.
    """
    path = Path(source).expanduser()
    if source and path.is_dir():
        return path
    looks_like_path = source.startswith((".", "~", "/")) or "\\" in source or source.count("/") > 1
    if not source or path.exists() or looks_like_path:
        raise CheckpointError(
            f"{source or '(nothing)'}: no such folder; give a checkpoint's folder"
        )
    return None


def check_folder(folder: Path) -> None:
    """Check that a checkpoint folder is complete, before anything large is read.

    Raises:
        CheckpointError: A file is missing or damaged; the message names it and the remedy.
    """
    _require_one(folder, ("config.json",), "it defines the model")
    _require_one(folder, TOKENIZER_FILES, "it defines the tokenizer")
    for path in sorted(folder.glob("*.json")):
        _read_json(path)
    if not _is_text_only(_read_json(folder / "config.json").get("model_type", "")):
        _require_one(folder, PROCESSOR_FILES, "it defines how images are prepared")
    index = folder / "model.safetensors.index.json"
    weights = [folder / "model.safetensors"]
    if (folder / PACKED).exists():
        weights = [folder / PACKED]
    elif index.exists() and not weights[0].exists():
        weights = [folder / name for name in sorted(set(_read_json(index)["weight_map"].values()))]
    for path in weights:
        _check_weights(path)


def _require_one(folder: Path, names: tuple[str, ...], reason: str) -> None:
    if not any((folder / name).is_file() for name in names):
        raise CheckpointError(
            f"{folder / names[0]} is missing: {reason}; copy the whole checkpoint folder again"
        )


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} is not valid JSON ({error}); copy it again from where the checkpoint came from"
        ) from error


def _check_weights(path: Path) -> None:
    """Check a safetensors file's size against its header."""
    if not path.is_file():
        pickles = [file.name for kind in PICKLES for file in path.parent.glob(kind)]
        if pickles:
            raise CheckpointError(
                f"{path.parent} has pickled weights ({pickles[0]}), which can run code when "
                "loaded; convert them to safetensors (with save_pretrained) and try again"
            )
        raise CheckpointError(f"{path} is missing; copy the whole checkpoint folder again")
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length)) if 0 < length < size else None
        if header is None:
            raise ValueError("no header")
        ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"{path} is not a safetensors file ({error}); copy it again"
        ) from error
    if size != 8 + length + max(ends, default=0):
        raise CheckpointError(
            f"{path} is truncated: it has {size} bytes and should have "
            f"{8 + length + max(ends, default=0)}; copy it again"
        )


def _load_base(
    source: str, folder: Path | None, quantize: Quantization | None, place: torch.device
) -> ChatModel:
    name = folder.resolve().name if folder else source
    if folder is not None:
        check_folder(folder)
    owner = OwnerThread(name)
    try:
        return owner.call(lambda: _load(source, folder, name, quantize, place, owner))
    except BaseException:
        owner.close()
        raise


def _load(
    source: str,
    folder: Path | None,
    name: str,
    quantize: Quantization | None,
    place: torch.device,
    owner: OwnerThread,
) -> ChatModel:
    location = str(folder or source)
    try:
        text_only = _check_kind(location, name)
        processor = load_processor(location)
        loaded: Any = load_model(
            location,
            text_only=text_only,
            output_loading_info=True,
            device_map={"": place},
            **_precision(quantize, place),
        )
    except CompeerError:
        raise
    except Exception as error:
        # Loaders raise nearly any error on a broken checkpoint.
        raise CheckpointError(_advice(name, folder, quantize, error)) from error
    model, report = loaded
    problems = sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]]))
    if problems:
        raise CheckpointError(
            f"{name}: {len(problems)} weights are missing or of the wrong shape, first "
            f"{problems[0]}; config.json does not match the weights"
        )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    is_whole = quantize in {None, "int8"}
    if is_whole and place.type != "cuda" and parameters < HALF_PRECISION_FROM:
        model = model.float()
    model.eval().requires_grad_(False)
    speed_up(model, compress=quantize == "int8")
    torch.set_num_threads(TORCH_THREADS)
    chat = ChatModel(name, model, processor, owner)
    if place.type == "cpu" and parameters < SMALL:
        chat.threads = TORCH_THREADS
    try:
        chat.warm_up()
    except Exception as error:
        raise CheckpointError(_advice(name, folder, quantize, error)) from error
    logger.info("loaded %s: %.1f M parameters, %s, %s", name, parameters / 1e6, model.dtype, place)
    return chat


def _is_text_only(model_type: str) -> bool:
    return (
        model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        and model_type not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    )


def _check_kind(location: str, name: str) -> bool:
    """Check that a checkpoint is a chat model; return whether it is a language model without an image tower."""
    config = AutoConfig.from_pretrained(location, trust_remote_code=False)
    known = (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING)
    if not any(type(config) in mapping for mapping in known):
        raise CheckpointError(
            f"{name} is a {config.model_type} model; COMPEER needs a vision-language or language model that "
            "AutoModelForImageTextToText or AutoModelForCausalLM loads"
        )
    if config.is_encoder_decoder:
        raise CheckpointError(
            f"{name} is an encoder-decoder ({config.model_type}); COMPEER needs a chat model"
        )
    return _is_text_only(config.model_type)


def _precision(quantize: Quantization | None, place: torch.device) -> dict[str, Any]:
    dtype: Any = "auto"
    if place.type == "cuda":
        dtype = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    if quantize in {None, "int8"}:
        return {"dtype": dtype}
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError("quantize needs bitsandbytes: pip install 'compeer[quantize]'")
    from transformers import BitsAndBytesConfig

    compute = dtype if place.type == "cuda" else torch.float32
    settings = (
        BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute
        )
        if quantize == "4bit"
        else BitsAndBytesConfig(load_in_8bit=True)
    )
    return {"dtype": compute, "quantization_config": settings}


def _advice(name: str, folder: Path | None, quantize: Quantization | None, error: Exception) -> str:
    reason = brief(error)
    if quantize in {"4bit", "8bit"}:
        return (
            f"{name} cannot be loaded in {quantize} ({reason}); load it without --quantize, "
            "or on a CUDA device"
        )
    if folder is None:
        return (
            f"{name}: neither a local folder nor loadable from the Hub ({reason})"
            f"; check the name and the network, or run `hf download {name}` and give the folder"
        )
    return f"{folder} cannot be loaded ({reason}); check that the folder is complete and undamaged"


# --- adapters ----------------------------------------------------------------------------------


def _attached(base: _Base, folder: Path) -> str:
    """Return the name of an adapter in the peft model, after loading it if necessary."""
    if folder not in base.adapters:
        _require_one(folder, ("adapter_config.json",), "it defines the adapter")
        _read_json(folder / "adapter_config.json")
        _check_weights(folder / "adapter_model.safetensors")
        name = f"adapter{len(base.adapters)}"
        base.chat.owner.call(lambda: _attach(base.chat, folder, name))
        base.adapters[folder] = name
    return base.adapters[folder]


def _attach(chat: ChatModel, folder: Path, name: str) -> None:
    # peft imports bitsandbytes, which warns about a missing kernel of its own.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    import peft

    adapted = chat.adapted
    try:
        config = peft.PeftConfig.from_pretrained(str(folder))
        if config.is_prompt_learning:
            raise ValueError(f"{config.peft_type} is not a LoRA adapter")
        config.inference_mode = True
        config.base_model_name_or_path = None  # peft would search for it locally, then on the Hub
        weights = peft.load_peft_weights(str(folder), device="cpu")
        with warnings.catch_warnings():
            # peft 0.21 still reads a property that transformers 5.23 has renamed.
            warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`")
            warnings.filterwarnings("ignore", message=TIED_WARNING)  # nothing is merged here
            if adapted is None:
                adapted = peft.PeftModel(chat.model, config, adapter_name=name)
            else:
                adapted.add_adapter(name, config)
        chat.adopt(adapted)
        expected = peft.get_peft_model_state_dict(
            adapted, adapter_name=name, save_embedding_layers=False
        )
        if different := sorted(expected.keys() ^ weights.keys()):
            raise ValueError(f"{len(different)} weights differ, first {different[0]}")
        peft.set_peft_model_state_dict(adapted, weights, adapter_name=name)
        adapted.eval()
    except Exception as error:
        if adapted is not None and name in adapted.peft_config:
            adapted.delete_adapter(name)
        raise CheckpointError(
            f"{folder} does not fit {chat.name} ({type(error).__name__}: {error}); "
            "give the base model that the adapter was trained on"
        ) from error
