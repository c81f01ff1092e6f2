"""Read `model.bin`, the file of a CTranslate2 model: names, shapes and values, each within bounds."""

import math
import os
import struct
from pathlib import Path
from typing import BinaryIO

import torch

# The version of the file's layout, the architecture, and the version of its names that are read.
LAYOUT, ARCHITECTURE, REVISION = 6, "TransformerSpec", 7
# Types of values by their number in the file.
TYPES = (torch.float32, torch.int8, torch.int16, torch.int32, torch.float16, torch.bfloat16)
MAX_RANK = 8
OLDER = "convert the original again with a newer version of CTranslate2"


class Variables:
    """What a file has by name.

    Parameters
    ----------
    path : Path
        The file.
    tensors : dict[str, torch.Tensor]
        Its values by name.
    aliases : dict[str, str]
        Further names, each with the name that it stands for.

    Attributes
    ----------
    unread : set[str]
        Names that nobody asked for so far.
    """

    def __init__(self, path: Path, tensors: dict[str, torch.Tensor], aliases: dict[str, str]) -> None:
        self.path = path
        self.tensors = tensors
        self.aliases = aliases
        self.unread = {*tensors, *aliases}
        self._weights: dict[str, torch.Tensor] = {}

    def scalar(self, name: str, default: float | None = None) -> float:
        """Read a number.

        Parameters
        ----------
        name : str
            Its name.
        default : float | None, default=None
            What holds where it is missing. None means that it must be there.

        Returns
        -------
        float
            The number.

        Raises
        ------
        ValueError
            If it is missing, or is a tensor.
        """
        self.unread.discard(name)
        number = self.tensors.get(self.aliases.get(name, name))
        if number is None:
            if default is None:
                raise self.error(f"it has no {name}")
            return default
        if number.dim():
            raise self.error(f"{name} has the shape {tuple(number.shape)}; it must be a single number")
        return number.item()

    def weight(self, name: str, rank: int) -> torch.Tensor | None:
        """Read a weight in single precision; rows that are quantised are multiplied out.

        Parameters
        ----------
        name : str
            Its name.
        rank : int
            The number of dimensions that it must have.

        Returns
        -------
        torch.Tensor | None
            The weight, or None if there is none. What stands for the same weight is the same tensor.

        Raises
        ------
        ValueError
            If it has another number of dimensions, another type, the wrong scales, or values that are not finite.
        """
        self.unread -= {name, f"{name}_scale"}
        name = self.aliases.get(name, name)
        stored, scale = self.tensors.get(name), self.tensors.get(f"{name}_scale")
        if stored is None:
            return None
        if stored.dim() != rank:
            raise self.error(f"{name} has the shape {tuple(stored.shape)}; it must have {rank} dimensions")
        if name in self._weights:
            return self._weights[name]
        if stored.dtype in (torch.int8, torch.int16) and rank == 2:
            wanted = (len(stored), 1) if stored.dtype == torch.int8 else ()
            if scale is None or scale.shape != wanted[:1] or scale.dtype != torch.float32 or not (scale > 0).all():
                raise self.error(f"{name} is quantised, but does not have the positive scales for that")
            weight = stored / scale.reshape(wanted)
        elif stored.is_floating_point() and scale is None:
            weight = stored.float()
        else:
            raise self.error(f"{name} is of type {stored.dtype}, which it cannot have here")
        if not torch.isfinite(weight).all():
            raise self.error(f"{name} has values that are NaN or infinite")
        self._weights[name] = weight
        return weight

    def error(self, reason: str) -> ValueError:
        """Make an error that names the file.

        Parameters
        ----------
        reason : str
            What is wrong.

        Returns
        -------
        ValueError
            The error.
        """
        return ValueError(f"{self.path} cannot be converted: {reason}.")


def read_variables(path: Path) -> Variables:
    """Read the file of a CTranslate2 model.

    Parameters
    ----------
    path : Path
        The file.

    Returns
    -------
    Variables
        What it has.

    Raises
    ------
    ValueError
        If it is cut off or damaged, or of another version or architecture.

    Notes
    -----
    All numbers have the byte order of x86. A name is its length in 16 bits, with the zero byte at its end, and its
    bytes. The version of the layout, the architecture and its revision come first, then a count of variables: each has
    a name, the number of dimensions in 8 bits and each in 32, the type in 8 bits, the number of bytes in 32, and the
    bytes. Then a count of aliases follows, each with its name and that of a variable. No more memory is taken than the
    file has bytes.
    """
    with path.open("rb") as file:
        contents = _Contents(path, file)
        layout = contents.number("I")
        if layout != LAYOUT:
            older = f": {OLDER}" if 0 < layout < LAYOUT else ""
            wanted = f"a CTranslate2 model with the layout {LAYOUT}"
            raise ValueError(f"{path} is not {wanted}: it begins with the number {layout}{older}.")
        architecture, revision = contents.name(), contents.number("I")
        if architecture != ARCHITECTURE:
            raise ValueError(f"{path} has the architecture {architecture[:60]!r}; only {ARCHITECTURE} is known.")
        if revision != REVISION:
            older = f": {OLDER}" if revision < REVISION else ""
            raise ValueError(f"{path} has the revision {revision} of {ARCHITECTURE}; only {REVISION} is known{older}.")
        tensors: dict[str, torch.Tensor] = {}
        for _ in range(contents.number("I")):
            name = contents.name()
            if name in tensors:
                raise contents.damaged(f"it has {name[:60]!r} twice")
            tensors[name] = contents.tensor(name)
        aliases: dict[str, str] = {}
        for _ in range(contents.number("I")):
            alias, name = contents.name(), contents.name()
            if alias in tensors or alias in aliases or name not in tensors:
                raise contents.damaged(f"its alias {alias[:60]!r} of {name[:60]!r} is not possible")
            aliases[alias] = name
        if contents.left:
            raise contents.damaged(f"{contents.left} bytes follow its end")
        return Variables(path, tensors, aliases)


def starts_from_zero(variables: Variables) -> bool:
    """Tell whether the decoder starts from a vector of zeros, not from the embedding of a token.

    Parameters
    ----------
    variables : Variables
        What the file of the model has.

    Returns
    -------
    bool
        Whether it does.
    """
    return bool(variables.scalar("decoder/start_from_zero_embedding", 0))


class _Contents:
    """The bytes of a file, of which none can be read that are not there."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self.file = file
        self.left = os.fstat(file.fileno()).st_size

    def damaged(self, reason: str) -> ValueError:
        return ValueError(f"{self.path} is not a CTranslate2 model, or is damaged: {reason}.")

    def read(self, size: int, what: str) -> bytes:
        if size > self.left:
            raise self.damaged(f"{what} has {size} bytes, {self.left} are left")
        self.left -= size
        data = self.file.read(size)
        if len(data) < size:
            raise self.damaged("it became shorter while it was read")
        return data

    def number(self, kind: str) -> int:
        return int(struct.unpack(f"<{kind}", self.read(struct.calcsize(kind), "a number"))[0])

    def name(self) -> str:
        data = self.read(self.number("H"), "a name")
        try:
            if not data.endswith(b"\0"):
                raise ValueError
            return data[:-1].decode()
        except ValueError:
            raise self.damaged("a name is not text with a zero byte at its end") from None

    def tensor(self, name: str) -> torch.Tensor:
        rank = self.number("B")
        if rank > MAX_RANK:
            raise self.damaged(f"{name[:60]!r} has {rank} dimensions, at most {MAX_RANK} are possible")
        shape = [self.number("I") for _ in range(rank)]
        kind = self.number("B")
        if kind >= len(TYPES):
            raise self.damaged(f"{name[:60]!r} has the type {kind}, known are 0 to {len(TYPES) - 1}")
        size, needed = self.number("I"), math.prod(shape) * TYPES[kind].itemsize
        if size != needed or not size:
            raise self.damaged(f"{name[:60]!r} has {size} bytes; its shape {tuple(shape)} makes it {needed}")
        return torch.frombuffer(bytearray(self.read(size, repr(name[:60]))), dtype=TYPES[kind]).reshape(shape)


__all__ = ["Variables", "read_variables", "starts_from_zero"]
