"""Small random models around `torch.nn.Transformer`, as others write them, and folders with their state dicts."""

import json
import math
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

SPECIAL = ["<unk>", "<pad>", "<bos>", "<eos>"]
SOURCE = [*SPECIAL, *"abcdefghijklmnopqrstuvwxyz ,.!?"]
TARGET = [*SPECIAL, *"абвгдежзийклмнопрстуфхцчшщъыьэюя ,.!?"]
PAD, BOS, EOS = 1, 2, 3
TEXTS = ["hello there", "a", "what is it, then?", "one two three."]


class Seq2Seq(nn.Module):
    """An `nn.Transformer` with embeddings, positions and an output layer."""

    def __init__(
        self,
        sizes: tuple[int, int] = (len(SOURCE), len(TARGET)),
        scaled: bool = True,
        table: str | None = None,
        is_shared: bool = False,
        is_tied: bool = False,
        output_bias: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        options = {"d_model": 24, "nhead": 4, "num_encoder_layers": 2, "num_decoder_layers": 3, **options}
        options = {"dim_feedforward": 40, "dropout": 0.0, "batch_first": True, **options}
        self.d_model, self.scaled, self.table = options["d_model"], scaled, table
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of nested tensors, which are a prototype
            self.transformer = nn.Transformer(**options)
        self.transformer.encoder.use_nested_tensor = False
        self.source = nn.Embedding(sizes[0], self.d_model)
        self.target = self.source if is_shared else nn.Embedding(sizes[1], self.d_model)
        self.generator = nn.Linear(self.d_model, sizes[1], bias=output_bias)
        if is_tied:
            self.generator.weight = self.target.weight
        if table == "learned":
            self.positions = nn.Parameter(torch.randn(70, self.d_model))
        elif table is not None:
            self.register_buffer("positions", torch.randn(1, 70, self.d_model))
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)

    def embed(self, embedding: nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
        states = embedding(ids) * (math.sqrt(self.d_model) if self.scaled else 1)
        length = ids.shape[1]
        if self.table is not None:
            return states + self.positions.reshape(-1, self.d_model)[:length]
        place = torch.arange(length).double().unsqueeze(1)
        angle = place / 10000 ** (torch.arange(0, self.d_model, 2).double() / self.d_model)
        encoding = torch.stack((angle.sin(), angle.cos()), -1).flatten(1)
        return states + encoding.to(states)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        hidden = source == PAD
        states = self.transformer(
            self.embed(self.source, source),
            self.embed(self.target, target),
            tgt_mask=torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1),
            src_key_padding_mask=hidden,
            tgt_key_padding_mask=target == PAD,
            memory_key_padding_mask=hidden,
        )
        return self.generator(states)


DESCRIPTION = {
    "weights": "model.pt",
    "nhead": 4,
    "norm_first": False,
    "dropout": 0.0,
    "scale_embeddings": True,
    "position_encoding": "sinusoidal",
    "source_embedding": "source.weight",
    "target_embedding": "target.weight",
    "output": "generator",
    "source_vocabulary": "source.json",
    "target_vocabulary": "target.txt",
    "split": "characters",
}
TABLES = {"source_positions": "positions", "target_positions": "positions"}


def write_folder(folder: Path, model: nn.Module, **changes: Any) -> Path:
    """Write description, state dict and vocabularies; a change to None takes a field out of the description."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = {name: value for name, value in {**DESCRIPTION, **changes}.items() if value is not None}
    (folder / "nn_transformer.json").write_text(json.dumps(fields))
    (folder / "source.json").write_text(json.dumps(SOURCE))
    (folder / "target.txt").write_text("\n".join(TARGET) + "\n", encoding="utf-8")
    state = {name: weight.clone() for name, weight in model.state_dict().items()}
    if fields.get("target_embedding") == "source.weight":
        del state["target.weight"]
    if str(fields.get("weights")).endswith(".safetensors"):
        save_file(state, folder / str(fields["weights"]))
    else:
        entry = fields.get("state_dict")
        torch.save({"epoch": 3, entry: state} if entry else state, folder / "model.pt")
    return folder
