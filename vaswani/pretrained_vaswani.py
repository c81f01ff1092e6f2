"""What every class of the model shares: capabilities, initialisation, and safe loading and saving."""

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn
from transformers import GenerationConfig
from transformers import initialization as init
from transformers.dynamic_module_utils import custom_object_save
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME, cached_file

from .configuration_vaswani import VaswaniConfig
from .generation_checks_vaswani import check_saved_generation_config

# Which class each Auto class loads from a folder that carries this code.
AUTO_MAP = {
    "AutoConfig": "configuration_vaswani.VaswaniConfig",
    "AutoModel": "modeling_vaswani.VaswaniModel",
    "AutoModelForSeq2SeqLM": "modeling_vaswani.VaswaniForConditionalGeneration",
}


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
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str] | None,
        *args: Any,
        use_safetensors: bool | None = None,
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
        **kwargs : Any
            Options of `PreTrainedModel.from_pretrained`.

        Returns
        -------
        Any
            The model.

        Raises
        ------
        ValueError
            If another format is asked for, or a value of the saved generation configuration exceeds its bound or is a
            token id outside the vocabulary.
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
        try:
            with _without_conversion():
                loaded = super().from_pretrained(name, *args, use_safetensors=True, **kwargs)
        except OSError as error:
            if "use_safetensors" not in str(error):
                raise
            raise OSError(f"{name} has no model.safetensors, and weights are not loaded from other formats.") from None
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        if name is not None and kwargs.get("generation_config") is None and model.can_generate():
            _read_generation_config(name, model, kwargs)
            check_saved_generation_config(model.generation_config, model.config.vocab_size)
        return loaded

    @staticmethod
    def _load_pretrained_model(model: Any, state_dict: Any, checkpoint_files: Any, *args: Any, **kwargs: Any) -> Any:
        """Refuse files that an index or an adapter names and that are not safetensors, before they are opened."""
        for file in checkpoint_files or ():
            if not str(file).endswith(".safetensors"):
                raise OSError(f"{file} is not a safetensors file, and weights are not loaded from other formats.")
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
        resized = super()._resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        decoder = getattr(self.base_model, "decoder", None)
        if decoder is not None and not self.config.tie_word_embeddings:
            size = resized.weight.shape[0]
            decoder.embed_tokens = self._get_resized_embeddings(decoder.embed_tokens, size, mean_resizing=mean_resizing)
        return resized


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
    known = ("cache_dir", "force_download", "proxies", "local_files_only", "token", "revision", "subfolder")
    download = {key: options[key] for key in known if key in options}
    if has_file(name, GENERATION_CONFIG_NAME, **download):
        model.generation_config = GenerationConfig.from_pretrained(name, **download)


__all__ = ["VaswaniPreTrainedModel", "has_file"]
