"""Text files: lines from files and streams, JSON objects, and output files that a resumed run appends to."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

CHUNK = 65_536


def read_lines(path: Path) -> Iterator[str]:
    """Read the lines of a text file in UTF-8.

    Parameters
    ----------
    path : Path
        The file.

    Yields
    ------
    str
        A line without its end, and without a byte order mark.

    Raises
    ------
    ValueError
        If a line is not valid UTF-8, naming file and line.
    """
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            yield decode_line(line, number, str(path))


def decode_line(line: bytes, number: int, source: str) -> str:
    """Decode a line in UTF-8.

    Parameters
    ----------
    line : bytes
        The line; its end is dropped, and a byte order mark before the first one.
    number : int
        Its number, from 1.
    source : str
        Where it comes from, for errors.

    Returns
    -------
    str
        The text.

    Raises
    ------
    ValueError
        If it is not valid UTF-8, naming source and line.
    """
    try:
        return line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{source}, line {number}: not valid UTF-8 ({error.reason}).") from None


def read_aligned(paths: Sequence[Path]) -> list[list[str]]:
    """Read text files whose lines belong together.

    Parameters
    ----------
    paths : Sequence[Path]
        The files.

    Returns
    -------
    list[list[str]]
        The lines of each file.

    Raises
    ------
    ValueError
        If they have different numbers of lines, or a line is not valid UTF-8.
    """
    files = [list(read_lines(path)) for path in paths]
    for path, lines in zip(paths, files, strict=True):
        if len(lines) != len(files[0]):
            raise ValueError(f"{paths[0]} has {len(files[0])} lines, but {path} has {len(lines)}.")
    return files


def read_arriving(stream: BinaryIO, name: str = "standard input") -> Iterator[list[str]]:
    """Read lines in UTF-8 as they arrive.

    Parameters
    ----------
    stream : BinaryIO
        Where they come from, such as a pipe.
    name : str, default="standard input"
        Its name, for errors.

    Yields
    ------
    list[str]
        The lines that are there, without their ends: as many as the writer has written meanwhile.

    Raises
    ------
    ValueError
        If a line is not valid UTF-8, naming stream and line.

    Notes
    -----
    Lines end where those of `read_lines` do.
    """
    number, torn = 0, b""
    while chunk := stream.read1(CHUNK):  # type: ignore[attr-defined]
        *complete, torn = (torn + chunk).split(b"\n")
        if complete:
            yield [decode_line(line, number + rank, name) for rank, line in enumerate(complete, start=1)]
            number += len(complete)
    if torn:
        yield [decode_line(torn, number + 1, name)]


def check_output(path: Path, hint: str) -> None:
    """Check that an output file does not exist, before any work is done for it.

    Parameters
    ----------
    path : Path
        The file.
    hint : str
        What to do if it exists.

    Raises
    ------
    FileExistsError
        If it exists.
    """
    if path.exists():
        raise FileExistsError(f"{path} exists already: {hint}.")


def open_output(path: Path, resume: bool) -> tuple[BinaryIO, int]:
    """Open an output file of lines.

    Parameters
    ----------
    path : Path
        The file.
    resume : bool
        Whether to resume after the last complete line, cutting off what follows it.

    Returns
    -------
    tuple[BinaryIO, int]
        The file, and the number of lines that it has.
    """
    if not (resume and path.exists()):
        return path.open("wb"), 0
    file = path.open("r+b")
    lines = end = 0
    for line in file:
        if line.endswith(b"\n"):
            lines, end = lines + 1, end + len(line)
    file.truncate(end)
    file.seek(end)
    return file, lines


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Parameters
    ----------
    path : Path
        The file.

    Returns
    -------
    dict[str, Any]
        The object.

    Raises
    ------
    ValueError
        If there is no such file, or it holds something else.
    """
    if not path.is_file():
        raise ValueError(f"There is no {path.name} in {path.parent}.")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a JSON file: {error}.") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} does not hold a JSON object.")
    return value


__all__ = [
    "check_output",
    "decode_line",
    "open_output",
    "read_aligned",
    "read_arriving",
    "read_lines",
    "read_object",
]
