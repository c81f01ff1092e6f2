"""Unpack a package of Argos Translate: only the files of its model, each within bounds."""

import contextlib
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

# How its name ends.
SUFFIXES = (".argosmodel", ".zip")
VOCABULARIES = [f"{side}_vocabulary.{kind}" for side in ("shared", "source", "target") for kind in ("json", "txt")]
# What is unpacked, relative to the folder in the archive, and the most bytes that each file may have.
FILES = {
    "metadata.json": 1_000_000,
    "README.md": 1_000_000,
    "sentencepiece.model": 100_000_000,
    "bpe.model": 100_000_000,
    "model/config.json": 1_000_000,
    **{f"model/{name}": 100_000_000 for name in VOCABULARIES},
    "model/model.bin": 10_000_000_000,
}
# How many times its packed size a large file may have: weights can hardly be packed, zeros a thousand times.
MAX_RATIO, SMALL = 100, 10_000_000


@contextlib.contextmanager
def unpacked_package(path: Path) -> Iterator[Path]:
    """Unpack a package into a folder that is removed afterwards.

    Parameters
    ----------
    path : Path
        The archive, such as `translate-zh_en-1_9.argosmodel`.

    Yields
    ------
    Path
        The folder.

    Raises
    ------
    ValueError
        If it is not such a package, is damaged, or a file in it is too large.

    Notes
    -----
    Files get names from a list here, never from the archive, so that none can leave the folder; the rest of the
    archive, which may be code, is not unpacked.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / (path.stem or "package")
        try:
            with zipfile.ZipFile(path) as archive:
                for name, entry in _entries(path, archive).items():
                    (folder / name).parent.mkdir(parents=True, exist_ok=True)
                    with archive.open(entry) as packed, (folder / name).open("xb") as file:
                        shutil.copyfileobj(packed, file)
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
            raise ValueError(f"{path} is not a package of Argos Translate, or is damaged: {error}.") from None
        yield folder


def _entries(path: Path, archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """Return what is unpacked, by its name in the folder, after its size was checked."""
    found: dict[str, zipfile.ZipInfo] = {}
    for entry in archive.infolist():
        parts = PurePosixPath(entry.filename).parts
        name = "/".join(parts[1:])
        if name not in FILES or entry.is_dir():
            continue
        if name in found:
            raise ValueError(f"{path} has several files {name}; a package has one folder.")
        if entry.file_size > FILES[name]:
            raise ValueError(f"{path} has a {name} of {entry.file_size} bytes; there may be at most {FILES[name]}.")
        if entry.file_size > max(SMALL, MAX_RATIO * entry.compress_size):
            raise ValueError(f"{path} has a {name} that grows from {entry.compress_size} to {entry.file_size} bytes.")
        found[name] = entry
    if not {"metadata.json", "model/config.json", "model/model.bin"} <= found.keys():
        raise ValueError(f"{path} is not a package of Argos Translate: it has no metadata.json or no model.")
    return found


__all__ = ["SUFFIXES", "unpacked_package"]
