"""The check of a model folder: every part by itself, so that one broken part does not hide another."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from huggingface_hub import ModelCard
from huggingface_hub.constants import REPOCARD_NAME
from transformers import AutoConfig, GenerationConfig
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME

from ..configuration_vaswani import VaswaniConfig
from ..generation_checks_vaswani import check_saved_generation_config
from ..generation_vaswani import paper_generation_config
from ..modeling_vaswani import VaswaniForConditionalGeneration
from ..pretrained_vaswani import check_model_folder
from .loading import check_tokenizer, load_tokenizer, panics_as_errors
from .results import read_results
from .shipped import folder_or_name

# Real text for the tokenizer: letters with accents, figures, punctuation and quotation marks.
MAX_EXAMPLE_TOKENS = 2000
EXAMPLE = "Good morning! “It costs 3.50 €,” said Zoë; isn't that 10 % more?"


class Check(NamedTuple):
    """The result of one check.

    Parameters
    ----------
    name : str
        What was checked.
    passed : bool
        Whether all is well.
    text : str
        What was found.
    """

    name: str
    passed: bool
    text: str


class _Checked:
    """The parts of a folder, each loaded by its own check and used by later ones."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config: Any = None
        self.model: Any = None
        self.tokenizer: Any = None

    def files(self) -> str:
        check_model_folder(self.folder)
        files = [path for path in self.folder.iterdir() if path.is_file()]
        return f"{len(files)} files, none from outside the folder"

    def configuration(self) -> str:
        if not (self.folder / CONFIG_NAME).is_file():
            raise ValueError(f"there is no {CONFIG_NAME}")
        config = AutoConfig.from_pretrained(self.folder, trust_remote_code=False)
        if not isinstance(config, VaswaniConfig):
            raise ValueError(f"it is a model of type {config.model_type!r}, not {VaswaniConfig.model_type!r}")
        self.config = config
        layers = f"{config.encoder_layers} + {config.decoder_layers} layers"
        return f"{layers}, d_model {config.d_model}, {config.vocab_size} tokens"

    def weights(self) -> str:
        config = _needed(self.config, "configuration")
        # The paper's options instead of the folder's, which have a check of their own.
        options: dict[str, Any] = {"config": config, "generation_config": paper_generation_config(config)}
        self.model = VaswaniForConditionalGeneration.from_pretrained(self.folder, strict=True, **options)
        return f"{self.model.num_parameters():,} parameters, all there, of the right shape and finite"

    def tokens(self) -> str:
        config = _needed(self.config, "configuration")
        tokenizer = load_tokenizer(self.folder)
        check_tokenizer(tokenizer, config.vocab_size, config.source_vocab_size)
        self.tokenizer = tokenizer  # one that is refused is not used
        for name in ("pad_token_id", "eos_token_id"):
            ours, theirs = getattr(config, name), getattr(self.tokenizer, name)
            if theirs not in (ours if isinstance(ours, list) else [ours]):
                raise ValueError(f"{name} is {theirs} in the tokenizer and {ours} in the configuration")
        return f"{len(self.tokenizer)} tokens, all in the model's vocabulary"

    def round_trip(self) -> str:
        tokenizer = _needed(self.tokenizer, "tokenizer")
        text = _example(self.folder)
        with panics_as_errors("The tokenizer"):
            token_ids = tokenizer(text_target=text)["input_ids"]
            back = tokenizer.decode(token_ids, skip_special_tokens=True)
        if unknown := token_ids.count(tokenizer.unk_token_id) if tokenizer.unk_token_id is not None else 0:
            return f"{len(token_ids)} tokens, of which {unknown} unknown"
        if back.split() != text.split():
            raise ValueError(f"{text!r} becomes {back!r}")
        return f"{len(token_ids)} tokens and back"

    def generation(self) -> str:
        config = _needed(self.config, "configuration")
        file = self.folder / GENERATION_CONFIG_NAME
        if not file.is_file():
            raise ValueError(f"there is no {GENERATION_CONFIG_NAME}")
        with open(file, encoding="utf-8") as opened:
            fields = json.load(opened)
        if not isinstance(fields, dict):
            raise ValueError(f"{file} does not hold a JSON object")
        saved = GenerationConfig(**fields)
        check_saved_generation_config(saved, config.vocab_size)
        return f"{saved.num_beams or 1} beams, length penalty {saved.length_penalty or 1}"

    def translation(self) -> str:
        model, tokenizer = _needed(self.model, "weights"), _needed(self.tokenizer, "tokenizer")
        with panics_as_errors("The tokenizer"):
            token_ids = tokenizer(_example(self.folder))["input_ids"]
        if len(token_ids) > MAX_EXAMPLE_TOKENS:
            raise ValueError(f"the example has {len(token_ids)} tokens; at most {MAX_EXAMPLE_TOKENS} are translated")
        output = model.eval().generate(torch.tensor([token_ids]))
        return f"{output.shape[1] - 1} tokens for the example"

    def card(self) -> str:
        file = self.folder / REPOCARD_NAME
        if not file.is_file():
            return "none: `vaswani card` writes one, and `vaswani push` makes one"
        try:
            data = ModelCard(file.read_text(encoding="utf-8")).data
        except (ValueError, yaml.YAMLError) as error:
            raise ValueError(f"{file} is not a valid card: {error}") from None
        return f"license {data.get('license') or 'not given'}"


def _needed(part: Any, name: str) -> Any:
    if part is None:
        raise ValueError(f"not checked: the {name} could not be loaded")
    return part


def _example(folder: Path) -> str:
    """Return the example sentence of the model's results, or one in English; at most as long as a paragraph."""
    about = read_results(folder).get("about", {})
    return str(about.get("example", EXAMPLE))[:1000] if isinstance(about, dict) else EXAMPLE


def check_model(folder: str | os.PathLike[str]) -> list[Check]:
    """Check every part of a model folder.

    Parameters
    ----------
    folder : str | os.PathLike[str]
        The folder, or the name of a model of the package.

    Returns
    -------
    list[Check]
        The checks in their order: files (nothing outside the folder), configuration (within its bounds), weights (none
        missing, superfluous, misshapen, NaN or infinite), tokenizer (against the vocabulary), round trip (real text to
        token ids and back), generation (configuration within its bounds), translation (of that text), card.

    Raises
    ------
    ValueError
        If there is no such folder.

    Notes
    -----
    Where files lead out of the folder, nothing else is opened.
    """
    place = Path(folder_or_name(folder))
    if not place.is_dir():
        raise ValueError(f"There is no folder {place}.")
    parts = _Checked(place)
    steps: dict[str, Callable[[], str]] = {
        "files": parts.files,
        "configuration": parts.configuration,
        "weights": parts.weights,
        "tokenizer": parts.tokens,
        "round trip": parts.round_trip,
        "generation": parts.generation,
        "translation": parts.translation,
        "card": parts.card,
    }
    checks: list[Check] = []
    for name, step in steps.items():
        try:
            checks.append(Check(name, True, step()))
        except Exception as error:  # whatever a stranger's file makes a library do
            kind = "" if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: "
            checks.append(Check(name, False, f"{kind}{' '.join(str(error).split())}"))
        if name == "files" and not checks[-1].passed:
            break
    return checks


__all__ = ["Check", "check_model"]
