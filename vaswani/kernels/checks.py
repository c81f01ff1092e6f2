"""What is looked at before C sees a tensor: its type, its device, its shape, and how it lies in memory."""

from typing import Any

import torch

from . import library


def kernels() -> Any:
    """Return the library.

    Returns
    -------
    Any
        The library.

    Raises
    ------
    RuntimeError
        If there is none.
    """
    loaded = library.load()
    if loaded is None:
        raise RuntimeError(f"This needs the compiled kernels, and there are {library.status()}.")
    return loaded


def are_plain(*tensors: torch.Tensor | None) -> bool:
    """Tell whether an operation may call C at once instead of through torch's dispatcher.

    Parameters
    ----------
    *tensors : torch.Tensor | None
        The operation's tensors.

    Returns
    -------
    bool
        False while torch traces a graph, and for tensors that are more than their memory.

    Notes
    -----
    The dispatcher costs an operation of `torch.library.custom_op` 100 to 200 microseconds on the machine where this
    was measured, several times what the operation itself takes in small models.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    return all(each is None or type(each) in (torch.Tensor, torch.nn.Parameter) for each in tensors)


def checked(name: str, tensor: torch.Tensor, shape: tuple[int | None, ...], dtype: torch.dtype) -> torch.Tensor:
    """Check a tensor, and lay it out row by row.

    Parameters
    ----------
    name : str
        What errors call it.
    tensor : torch.Tensor
        The tensor.
    shape : tuple[int | None, ...]
        The shape that it must have; None stands for any size.
    dtype : torch.dtype
        The type that its numbers must have.

    Returns
    -------
    torch.Tensor
        The tensor, contiguous; a copy where it was not.

    Raises
    ------
    ValueError
        If it is another one.
    """
    sizes = tensor.shape
    if tensor.dtype != dtype or not tensor.is_cpu:
        raise ValueError(f"{name} has {tensor.dtype} on {tensor.device}; the kernels need {dtype} on a CPU.")
    if sizes != shape and not (
        len(sizes) == len(shape) and all(b is None or a == b for a, b in zip(sizes, shape, strict=True))
    ):
        expected = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} has the shape {tuple(sizes)}; the kernels need ({expected}).")
    return laid_out(name, tensor)


def laid_out(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Lay a tensor out row by row, at an address that is a multiple of a number's size.

    Parameters
    ----------
    name : str
        What errors call it.
    tensor : torch.Tensor
        The tensor.

    Returns
    -------
    torch.Tensor
        The tensor; a copy where it lies otherwise, as tensors of a file that is mapped into memory may.
    """
    tensor = with_memory(name, tensor).contiguous()
    return tensor.clone() if tensor.data_ptr() % tensor.itemsize else tensor


def with_memory(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Check that a tensor does not reach beyond its storage.

    Parameters
    ----------
    name : str
        What errors call it.
    tensor : torch.Tensor
        The tensor.

    Returns
    -------
    torch.Tensor
        The same tensor.

    Raises
    ------
    ValueError
        If it does: `untyped_storage().resize_(0)` frees memory, and the tensor does not know.
    """
    needed = tensor.nbytes if tensor.is_contiguous() else _extent(tensor)
    if needed and tensor.storage_offset() * tensor.itemsize + needed > tensor.untyped_storage().nbytes():
        raise ValueError(f"{name} has no memory for its shape {tuple(tensor.shape)}: its storage was made smaller.")
    return tensor


def _extent(tensor: torch.Tensor) -> int:
    """Return the bytes from a tensor's first number to the end of its last."""
    if not tensor.numel():
        return 0
    steps = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.itemsize


def memory(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return memory, whatever torch's defaults are.

    Parameters
    ----------
    shape : tuple[int, ...]
        The shape.
    dtype : torch.dtype
        The type of its numbers.

    Returns
    -------
    torch.Tensor
        A tensor on the CPU, not filled.

    Raises
    ------
    ValueError
        If a size is negative.
    MemoryError
        If there is not so much memory.
    """
    if any(size < 0 for size in shape):
        raise ValueError(f"A tensor of shape {shape} was asked for; sizes must be 0 or more.")
    try:
        return torch.empty(shape, dtype=dtype, device="cpu")
    except RuntimeError as error:
        raise MemoryError(f"There is no memory for a tensor of shape {shape}.") from error


def floats(*shape: int) -> torch.Tensor:
    """Return memory for numbers, whatever torch's defaults are.

    Parameters
    ----------
    *shape : int
        The shape.

    Returns
    -------
    torch.Tensor
        A tensor in single precision on the CPU, not filled.
    """
    return memory(shape, torch.float32)


def integers(*shape: int) -> torch.Tensor:
    """Return memory for whole numbers, whatever torch's defaults are.

    Parameters
    ----------
    *shape : int
        The shape.

    Returns
    -------
    torch.Tensor
        A tensor of int64 on the CPU, not filled.
    """
    return memory(shape, torch.int64)


__all__ = ["are_plain", "checked", "floats", "integers", "kernels", "laid_out", "memory", "with_memory"]
