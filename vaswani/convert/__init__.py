"""The converters: a model's weights and tokenizer from other libraries, and its weights for them."""

__all__: list[str] = []
