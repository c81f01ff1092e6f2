"""The Hub: models that are loaded and pushed, their results and their cards."""

__all__: list[str] = []
