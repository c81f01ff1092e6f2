"""Data: from text files to batches of token ids."""

__all__: list[str] = []
