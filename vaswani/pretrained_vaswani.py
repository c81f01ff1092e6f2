"""What every class of the model shares: capabilities, initialisation, and safe loading and saving."""

import contextlib
import json
import math
import os
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import GenerationConfig
from transformers import initialization as init
from transformers.dynamic_module_utils import custom_object_save
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME, cached_file

from .configuration_vaswani import VaswaniConfig
from .generation_checks_vaswani import check_saved_generation_config

# Which class each Auto class loads from a folder that carries this code.
AUTO_MAP = {
    "AutoConfig": "configuration_vaswani.VaswaniConfig",
    "AutoModel": "modeling_vaswani.VaswaniModel",
    "AutoModelForSeq2SeqLM": "modeling_vaswani.VaswaniForConditionalGeneration",
}
# The folder beside a tokenizer of which transformers reads the files.
TEMPLATES = "additional_chat_templates"
# The parameters that a model may have beyond twice those of its files, such as those of a new head.
NEW_PARAMETERS = 100_000_000
# Whether the model that is being loaded refuses weights of another shape by name (`strict=True`).
_CHECKS_SHAPES: ContextVar[bool] = ContextVar("_CHECKS_SHAPES", default=False)


def has_file(name: str | os.PathLike[str], file: str, **options: Any) -> bool:
    """Check whether a model repository or folder has a file, and fetch it.

    Parameters
    ----------
    name : str | os.PathLike[str]
        Folder or Hub name of the model.
    file : str
        Name of the file.
    **options : Any
        Download options.

    Returns
    -------
    bool
        Whether there is one.

    Raises
    ------
    OSError
        If the Hub does not answer, or does not give the file.
    """
    try:
        cached_file(name, file, **options)
    except OSError as error:
        if "does not appear to have a file named" not in str(error):
            raise
        return False
    return True


def check_inside(folder: str | os.PathLike[str], files: Iterable[str | os.PathLike[str]]) -> None:
    """Refuse files of a folder that stand elsewhere, behind a link or by their name.

    Parameters
    ----------
    folder : str | os.PathLike[str]
        The folder.
    files : Iterable[str | os.PathLike[str]]
        Names of files, relative to it.

    Raises
    ------
    ValueError
        If a file is outside the folder, or is neither a file nor a folder. It names the file.

    Notes
    -----
    In the Hub's cache, the links of a folder in `snapshots` lead to `blobs` beside it; these are allowed.
    """
    place = Path(folder).resolve()
    allowed = [place, *(parent.parent / "blobs" for parent in place.parents if parent.name == "snapshots")]
    for name in files:
        path = place / name
        target = path.resolve()
        if not any(target.is_relative_to(root) for root in allowed):
            raise ValueError(f"{path} leads to {target}, outside its folder: no file is read or uploaded from there.")
        if target.exists() and not (target.is_file() or target.is_dir()):
            raise ValueError(f"{path} is not a regular file.")


def check_model_folder(folder: str | os.PathLike[str], subfolder: str = "") -> None:
    """Refuse a model folder whose files, or files that its index names, stand elsewhere.

    Parameters
    ----------
    folder : str | os.PathLike[str]
        The folder.
    subfolder : str, default=""
        Where in the folder the model is.

    Raises
    ------
    ValueError
        If a file is outside the folder. It names the file.
    """
    check_inside(folder, [subfolder])
    place = Path(folder) / subfolder
    names = [path.name for path in place.iterdir() if not path.is_dir()] if place.is_dir() else []
    check_inside(folder, [Path(subfolder) / TEMPLATES])
    if (place / TEMPLATES).is_dir():
        names += [f"{TEMPLATES}/{path.name}" for path in (place / TEMPLATES).iterdir()]
    check_inside(folder, [Path(subfolder) / name for name in names])
    for name in names:
        if name.endswith(".index.json"):
            shards = _shards(place / name)
            check_inside(folder, [Path(subfolder) / shard for shard in shards])


def _shards(index: Path) -> list[str]:
    """Return the names of the files that an index names; none if it is not an index, which loading refuses."""
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return [str(file) for file in weight_map.values()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []


class VaswaniPreTrainedModel(PreTrainedModel):
    """Base class: what the model supports, how its weights are initialised, and how they are loaded and saved."""

    config: VaswaniConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["VaswaniEncoderLayer", "VaswaniDecoderLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True

    fast_paths = True  # whether the door in fast_paths_vaswani.py may choose another way of computing

    def set_fast_paths(self, enabled: bool) -> None:
        """Allow fast paths where they compute the same, or only `forward` of every module.

        Parameters
        ----------
        enabled : bool
            Whether fast paths may be taken. They may by default; the environment variable `VASWANI_FAST_PATHS=0`
            switches them off for the whole process.
        """
        for module in self.modules():
            if isinstance(module, VaswaniPreTrainedModel):
                module.fast_paths = enabled

    def _init_weights(self, module: nn.Module) -> None:
        """Initialise one module as the authors' code did: Glorot uniform, and embeddings with deviation D^-0.5."""
        if isinstance(module, nn.Embedding) or module is self.get_output_embeddings():
            init.normal_(module.weight, std=self.config.d_model**-0.5)
        elif isinstance(module, nn.Linear):
            fan_out = getattr(module, "joint_fan_out", module.out_features)
            limit = math.sqrt(6 / (module.in_features + fan_out))
            init.uniform_(module.weight, -limit, limit)
        if isinstance(module, nn.Linear) and module.bias is not None:
            init.zeros_(module.bias)
        if isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str] | None,
        *args: Any,
        use_safetensors: bool | None = None,
        strict: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Load a model, from safetensors files only.

        Parameters
        ----------
        pretrained_model_name_or_path : str | os.PathLike[str] | None
            Folder or Hub name of the model.
        *args : Any
            Options of `PreTrainedModel.from_pretrained`.
        use_safetensors : bool | None, default=None
            None or True.
        strict : bool, default=False
            Whether to refuse weights that are missing, that the model does not have, whose shape is another one, or
            that are NaN or infinite. By default as everywhere in transformers: missing weights are initialised and
            superfluous ones ignored, each with a warning, another shape is an error, and values are not looked at. The
            commands of this package are always strict.
        **kwargs : Any
            Options of `PreTrainedModel.from_pretrained`.

        Returns
        -------
        Any
            The model.

        Raises
        ------
        ValueError
            If another format is asked for, `strict` finds weights to refuse, a file of a local folder is a link out of
            it or its index names a file outside, the configuration describes a model far larger than its files, or a
            value of the saved generation configuration exceeds its bound or is a token id outside the vocabulary.
        OSError
            If there is no such model, or it has no safetensors files.

        Notes
        -----
        transformers would load pickled files too, and without safetensors it would send the model's name and the
        user's token to a service that converts it.
        """
        if use_safetensors is False:
            raise ValueError("use_safetensors=False: weights are loaded from safetensors files only.")
        name = pretrained_model_name_or_path
        if name is not None and os.path.isdir(name):
            check_model_folder(name, kwargs.get("subfolder") or "")
        options = dict(kwargs)
        if strict:
            options["output_loading_info"] = True
        try:
            with _without_conversion(), _shapes_checked(strict):
                loaded: Any = super().from_pretrained(name, *args, use_safetensors=True, **options)
        except OSError as error:
            if "use_safetensors" not in str(error):
                raise
            raise OSError(f"{name} has no model.safetensors, and weights are not loaded from other formats.") from None
        except SafetensorError as error:
            raise ValueError(f"A file with weights of {name} is damaged: {error}") from None
        except (TypeError, AttributeError, RecursionError) as error:
            _explain_files(name, kwargs)
            if isinstance(error, RecursionError):
                raise ValueError(f"A file in JSON of {name} is nested too deeply.") from None
            raise
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        if strict:
            _check_loading(loaded[1])
            check_finite_weights(model)
            loaded = loaded if kwargs.get("output_loading_info") else model
        if name is not None and kwargs.get("generation_config") is None and model.can_generate():
            _read_generation_config(name, model, kwargs)
            check_saved_generation_config(model.generation_config, model.config.vocab_size)
        return loaded

    @staticmethod
    def _load_pretrained_model(model: Any, state_dict: Any, checkpoint_files: Any, *args: Any, **kwargs: Any) -> Any:
        """Refuse other files than safetensors before they are opened, and a model far larger than its files."""
        stored: dict[str, tuple[int, ...]] = {}
        for file in checkpoint_files or ():
            if not str(file).endswith(".safetensors"):
                raise OSError(f"{file} is not a safetensors file, and weights are not loaded from other formats.")
            stored |= _stored_shapes(file)
        if checkpoint_files and not getattr(model, "is_quantized", False):
            needed, available = model.num_parameters(), sum(map(math.prod, stored.values()))
            if needed > 2 * available + NEW_PARAMETERS:
                raise ValueError(
                    f"config.json describes a model with {needed} parameters, but the files of its weights have "
                    f"{available}."
                )
            if _CHECKS_SHAPES.get():
                _check_shapes(model, stored)
        return PreTrainedModel._load_pretrained_model(model, state_dict, checkpoint_files, *args, **kwargs)

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        *args: Any,
        include_code: bool | None = None,
        **kwargs: Any,
    ) -> None:
        """Save configuration and weights, and on request the code that loads them.

        Parameters
        ----------
        save_directory : str | os.PathLike[str]
            Folder to save to.
        is_main_process : bool, default=True
            Whether this process, of several that train together, is the one that writes.
        *args : Any
            Options of `PreTrainedModel.save_pretrained`.
        include_code : bool | None, default=None
            Whether the folder shall load with `trust_remote_code=True` where `vaswani` is not installed. By default
            if the model was loaded from such a folder, or saved to one before.
        **kwargs : Any
            Options of `PreTrainedModel.save_pretrained`.
        """
        if include_code is None:
            include_code = hasattr(self.config, "auto_map")
        if include_code:
            self.config.auto_map = dict(AUTO_MAP)
            if is_main_process:
                Path(save_directory).mkdir(parents=True, exist_ok=True)
                custom_object_save(self, save_directory)
        elif hasattr(self.config, "auto_map"):
            del self.config.auto_map
        super().save_pretrained(save_directory, is_main_process, *args, **kwargs)

    def _resize_token_embeddings(
        self, new_num_tokens: int | None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Module:
        """Resize an untied target embedding too, which transformers does not know of."""
        if self.config.source_vocab_size is not None:
            raise ValueError(
                f"The model has a source vocabulary of {self.config.source_vocab_size} tokens and a target vocabulary "
                f"of {self.config.vocab_size}, but resize_token_embeddings resizes one that both sides share."
            )
        resized = super()._resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        decoder = getattr(self.base_model, "decoder", None)
        if decoder is not None and not self.config.tie_word_embeddings:
            size = resized.weight.shape[0]
            decoder.embed_tokens = self._get_resized_embeddings(decoder.embed_tokens, size, mean_resizing=mean_resizing)
        return resized


def _explain_files(name: Any, options: dict[str, Any]) -> None:
    """Raise a ValueError if it was a file in JSON that transformers failed over, and not an argument."""
    readers: dict[str, Any] = {GENERATION_CONFIG_NAME: GenerationConfig, CONFIG_NAME: VaswaniConfig}
    for file, kind in readers.items():
        try:
            kind.from_pretrained(name, **_download_options(options))
        except OSError:
            continue  # there is none
        except (TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{file} of {name} cannot be read: {error}") from None


def _download_options(options: dict[str, Any]) -> dict[str, Any]:
    known = ("cache_dir", "force_download", "proxies", "local_files_only", "token", "revision", "subfolder")
    return {key: options[key] for key in known if key in options}


def _stored_shapes(file: str | os.PathLike[str]) -> dict[str, tuple[int, ...]]:
    """Read the shapes in a safetensors file: eight bytes tell the length of its header, which has them."""
    try:
        with open(file, "rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(min(length, os.path.getsize(file))))
        return {name: tuple(map(int, entry["shape"])) for name, entry in header.items() if name != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{file} is damaged: its header cannot be read.") from None


@contextlib.contextmanager
def _shapes_checked(enabled: bool) -> Iterator[None]:
    """Have every model that is loaded meanwhile refuse weights of another shape."""
    token = _CHECKS_SHAPES.set(enabled)
    try:
        yield
    finally:
        _CHECKS_SHAPES.reset(token)


def _check_shapes(model: PreTrainedModel, stored: dict[str, tuple[int, ...]]) -> None:
    """Raise a ValueError that names a stored weight whose shape is not the model's."""
    prefix = f"{model.base_model_prefix}."
    expected = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    for name, shape in stored.items():
        names = (name, name.removeprefix(prefix), prefix + name)
        wanted = next((expected[key] for key in names if key in expected), shape)
        if shape != wanted:
            raise ValueError(f"the weight {name} has the shape {shape}; the configuration makes it {wanted}")


def _check_loading(found: dict[str, Any]) -> None:
    """Raise a ValueError that names a weight which is missing or superfluous."""
    for kind, text in (("missing_keys", "missing"), ("unexpected_keys", "not part of the model")):
        if keys := sorted(found[kind]):
            raise ValueError(f"{len(keys)} of its weights are {text}, such as {keys[0]}")


def check_finite_weights(model: nn.Module) -> None:
    """Refuse a model with weights that are NaN or infinite.

    Parameters
    ----------
    model : nn.Module
        The model, quantised or not.

    Raises
    ------
    ValueError
        If a weight is NaN or infinite. It names the weight.
    """
    for name, weight in model.named_parameters():
        try:
            is_finite = bool(torch.isfinite(weight).all())
        except (NotImplementedError, RuntimeError, TypeError):  # a quantised weight knows few operations
            is_finite = bool(torch.isfinite(weight.dequantize()).all())
        if not is_finite:
            raise ValueError(f"the weight {name} has values that are NaN or infinite")


@contextlib.contextmanager
def _without_conversion() -> Iterator[None]:
    """Keep transformers from asking a service to convert a model."""
    switch = "DISABLE_SAFETENSORS_CONVERSION"
    before = os.environ.get(switch)
    os.environ[switch] = "1"
    try:
        yield
    finally:
        os.environ.pop(switch)
        if before is not None:
            os.environ[switch] = before


def _read_generation_config(name: Any, model: Any, options: dict[str, Any]) -> None:
    """Read the saved generation configuration again if none was loaded: transformers ignores an unreadable one."""
    if not model.generation_config._from_model_config:
        return
    download = _download_options(options)
    if has_file(name, GENERATION_CONFIG_NAME, **download):
        model.generation_config = GenerationConfig.from_pretrained(name, **download)


__all__ = ["VaswaniPreTrainedModel", "check_finite_weights", "check_inside", "check_model_folder", "has_file"]
