"""The translation pipeline of transformers, as a task of its own."""

import os
from collections.abc import Iterable, Mapping, Sequence
from types import GeneratorType
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import Pipeline

from ..generation_vaswani import paper_generation_config
from .translator import search_config, without_idle_options

TASK = "vaswani-translation"


class VaswaniTranslationPipeline(Pipeline):
    """Translation pipeline: `pipeline("vaswani-translation", model=folder)`.

    Notes
    -----
    transformers has no translation pipeline any more and refuses its name. This one returns what that one did: a text
    gets a list of dictionaries with the key `translation_text`, one for each of `num_return_sequences`; a list of
    texts gets a list of those, or of single dictionaries if there is one for each text; a data set or a generator
    gets an iterator.

    Fields of the generation configuration may be given when it is made or called; those that are not are as in
    `search_config`. Inputs are not truncated. The translation of white space is empty.
    """

    model: Any
    tokenizer: Any

    _pipeline_calls_generate = True
    _load_tokenizer: Any = True
    _load_processor: Any = False
    _load_image_processor: Any = False
    _load_video_processor: Any = False
    _load_feature_extractor: Any = False

    def __call__(self, inputs: Any, **options: Any) -> Any:  # type: ignore[override]
        """Translate.

        Parameters
        ----------
        inputs : Any
            A text, a list or other sequence of texts, a generator, or a data set, such as a `KeyDataset`.
        **options : Any
            `batch_size`, `num_workers`, and arguments of `generate`.

        Returns
        -------
        Any
            The translations.
        """
        if isinstance(inputs, Sequence) and not isinstance(inputs, str | Dataset):
            inputs = list(inputs)
        elif isinstance(inputs, Iterable) and not isinstance(inputs, str | Mapping | Dataset | GeneratorType):
            inputs = (text for text in inputs)
        if not isinstance(inputs, list):
            return super().__call__(inputs, **options)
        answers = super().__call__(inputs, **options) if inputs else []
        return [answer[0] for answer in answers] if all(len(answer) == 1 for answer in answers) else answers

    def _sanitize_parameters(self, **options: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        return {}, options, {}

    def preprocess(self, text: Any) -> dict[str, Any]:  # type: ignore[override]
        """Encode a text.

        Parameters
        ----------
        text : Any
            The text.

        Returns
        -------
        dict[str, Any]
            Inputs of the model, and the text under `source`.

        Raises
        ------
        ValueError
            If it is not a text.
        """
        if not isinstance(text, str):
            raise ValueError(f"Only text (str) can be translated, not {type(text).__name__}: {text!r:.80}.")
        return {**self.tokenizer(text, return_tensors="pt"), "source": text}

    def _forward(self, inputs: dict[str, Any], **options: Any) -> dict[str, Any]:  # type: ignore[override]
        source = inputs.pop("source")
        options = {**self._generate_kwargs, **options}
        given = options.pop("generation_config", None)
        fields = options.keys() & vars(paper_generation_config(self.model.config)).keys()
        settings = {name: options.pop(name) for name in fields} | {"return_dict_in_generate": False}
        config = search_config(self.model, given, **settings)
        sequences = self.model.generate(**inputs, generation_config=without_idle_options(config), **options)
        return {"sequences": sequences.unflatten(0, (len(inputs["input_ids"]), -1)), "source": source}

    def postprocess(self, outputs: dict[str, Any]) -> list[dict[str, str]]:  # type: ignore[override]
        """Decode the translations of one text.

        Parameters
        ----------
        outputs : dict[str, Any]
            Token ids of shape (1, translations, length) under `sequences`, and the text under `source`.

        Returns
        -------
        list[dict[str, str]]
            The translations, best first.
        """
        sequences: torch.Tensor = outputs["sequences"][0]
        texts = self.tokenizer.batch_decode(sequences, skip_special_tokens=True)
        return [{"translation_text": text if outputs["source"].strip() else ""} for text in texts]

    def save_pretrained(self, save_directory: str | os.PathLike[str], **options: Any) -> None:
        """Save the model and the tokenizer.

        Parameters
        ----------
        save_directory : str | os.PathLike[str]
            The folder.
        **options : Any
            Options of the models' and tokenizers' `save_pretrained`.

        Notes
        -----
        transformers would copy the code of the pipeline beside them, and then run it only with
        `trust_remote_code=True`, although it is installed.
        """
        self.model.save_pretrained(save_directory, **options)
        self.tokenizer.save_pretrained(save_directory, **options)


__all__ = ["TASK", "VaswaniTranslationPipeline"]
