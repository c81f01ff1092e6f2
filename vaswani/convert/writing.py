"""The kinds of models as which a model can be written."""

from .ctranslate2_writer import CTRANSLATE2_WRITER
from .marian_writer import MARIAN_WRITER
from .onnx import ONNX_WRITER
from .writer import Writer

# The kinds to which a model can be exported.
WRITERS = (MARIAN_WRITER, ONNX_WRITER, CTRANSLATE2_WRITER)


def writer_of(kind: str) -> Writer:
    """Find the writer of a kind.

    Parameters
    ----------
    kind : str
        Its name.

    Returns
    -------
    Writer
        The writer.

    Raises
    ------
    ValueError
        If there is none.
    """
    found = {writer.kind: writer for writer in WRITERS}
    if kind not in found:
        raise ValueError(f"There is no export to {kind!r}; it must be one of {', '.join(found)}.")
    return found[kind]


__all__ = ["WRITERS", "writer_of"]
