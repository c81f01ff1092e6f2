"""`vaswani env`: what a bug report needs."""

import argparse
import importlib.metadata
import os
import platform
from typing import Any

PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "accelerate",
    "datasets",
    "huggingface_hub",
    "torchao",
    "ctranslate2",
)


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options of the command.

    Parameters
    ----------
    command : argparse.ArgumentParser
        Parser of the command.
    """
    command.add_argument("--model", help="model whose paths are explained (default: the one of this package)")


def run(options: argparse.Namespace) -> None:
    """Print the report.

    Parameters
    ----------
    options : argparse.Namespace
        Parsed arguments.
    """
    import torch
    from transformers import AutoModelForSeq2SeqLM

    import vaswani

    from ..fast_paths_vaswani import SWITCH, explain
    from ..hub.results import cpu_name, usable_cores
    from ..hub.shipped import DEFAULT_MODEL, folder_or_name
    from ..kernels import library

    name = options.model or DEFAULT_MODEL
    model = AutoModelForSeq2SeqLM.from_pretrained(folder_or_name(name))
    paths = explain(model.eval())
    paths.update({kind: path for kind, path in explain(model.train()).items() if kind in ("training step", "loss")})
    devices = [f"cuda:{index} {torch.cuda.get_device_name(index)}" for index in range(torch.cuda.device_count())]
    facts: dict[str, Any] = {
        "vaswani": vaswani.__version__,
        "python": f"{platform.python_version()} on {platform.platform()}",
        **{package: _version(package) for package in PACKAGES},
        "CPU": f"{cpu_name()}, {torch.backends.cpu.get_cpu_capability()}, {usable_cores()} usable cores",
        "threads": torch.get_num_threads(),
        "devices": ", ".join(["cpu", *devices]),
        "kernels": library.status(),
        SWITCH: os.environ.get(SWITCH, "not set"),
        **{f"{kind} of {name}": path for kind, path in paths.items()},
    }
    width = max(map(len, facts))
    for fact, value in facts.items():
        print(f"{fact:{width}}  {value}")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


__all__ = ["add_arguments", "run"]
