"""Make the converter of CTranslate2 for models of transformers know the model."""

from typing import Any

from ..configuration_vaswani import VaswaniConfig


def register_loader(converters: Any) -> None:
    """Register a loader, so that `ct2-transformers-converter` and `TransformersConverter` convert the model.

    Parameters
    ----------
    converters : Any
        The module `ctranslate2.converters.transformers`.
    """

    class VaswaniLoader(converters.ModelLoader):
        architecture_name = "AutoModelForSeq2SeqLM"

        def get_model_spec(self, model: Any) -> Any:
            raise NotImplementedError  # a specification needs the tokens too

        def __call__(self, model: Any, tokenizer: Any) -> Any:
            from .ctranslate2_writer import spec_with_tokens

            return spec_with_tokens(model, tokenizer)

    converters.register_loader(VaswaniConfig.__name__)(VaswaniLoader)


__all__ = ["register_loader"]
