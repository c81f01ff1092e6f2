"""Inference: translations, the pipeline of transformers, and scores of translations."""

__all__: list[str] = []
