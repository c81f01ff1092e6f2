"""The converters: a model's weights for other libraries."""

__all__: list[str] = []
