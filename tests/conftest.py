"""What the tests share: seeds, tiny models in every shape that the paper allows, and batches with padding."""

import os
import textwrap
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if "PYTEST_XDIST_WORKER" in os.environ:  # there is a worker for each core
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback

from tests.numbers_corpus import number_corpus
from tests.opus import write_marian
from vaswani import VaswaniConfig, VaswaniForConditionalGeneration, VaswaniTokenizer, convert_model
from vaswani.data.corpora import load_corpus, tokenize
from vaswani.fast_paths.decoding import BeamDecoder, KernelStepDecoder
from vaswani.training import VaswaniTrainer, VaswaniTrainingArguments

VOCAB_SIZE = 41

# One table drives the tests that must hold for every shape of the model.
SHAPES = {
    "base": {},
    "d_k below d_v": {"d_k": 3, "d_v": 6},
    "deeper decoder": {"encoder_layers": 1, "decoder_layers": 3},
    "learned positions": {"position_encoding": "learned", "max_position_embeddings": 32},
    "biases": {"attention_bias": True},
    "final norms": {"final_layer_norm": True},
    "untied": {"tie_word_embeddings": False},
    "converted": {
        "activation_function": "swish",
        "attention_bias": True,
        "d_ff_decoder": 24,
        "max_position_embeddings": 40,
        "output_bias": True,
        "position_encoding": "fixed",
        "source_vocab_size": 53,
    },
}


def tiny_config(**changes: object) -> VaswaniConfig:
    fields = {
        "vocab_size": VOCAB_SIZE,
        "d_model": 16,
        "d_ff": 32,
        "num_attention_heads": 2,
        "d_k": 8,
        "d_v": 8,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "dropout": 0.0,
    }
    return VaswaniConfig(**{**fields, **changes})


def tiny_model(seed: int = 0, **changes: object) -> VaswaniForConditionalGeneration:
    """Build a model whose weights are far from their start, so that biases and norms matter too."""
    torch.manual_seed(seed)
    model = VaswaniForConditionalGeneration(tiny_config(**changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def ragged_batch(seed: int = 0) -> dict[str, torch.Tensor]:
    """Three pairs of unequal length, padded on the right."""
    generator = torch.Generator().manual_seed(seed)
    source_lengths, target_lengths = torch.tensor([7, 3, 5]), torch.tensor([4, 6, 2])
    input_ids = torch.randint(3, VOCAB_SIZE, (3, 7), generator=generator)
    labels = torch.randint(3, VOCAB_SIZE, (3, 6), generator=generator)
    attention_mask = (torch.arange(7) < source_lengths[:, None]).long()
    return {
        "input_ids": input_ids * attention_mask,
        "attention_mask": attention_mask,
        "labels": labels.masked_fill(torch.arange(6) >= target_lengths[:, None], -100),
    }


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=SHAPES.values(), ids=SHAPES.keys())
def model(request: pytest.FixtureRequest) -> VaswaniForConditionalGeneration:
    return tiny_model(**request.param)


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    return ragged_batch()


@pytest.fixture(scope="session")
def tokenizer() -> VaswaniTokenizer:
    return VaswaniTokenizer.learn(number_corpus(300), vocab_size=400, show_progress=False)


@pytest.fixture(scope="session")
def pairs(tokenizer: VaswaniTokenizer) -> Dataset:
    return tokenize(load_corpus(Dataset.from_list([{"translation": p} for p in number_corpus(400)])), tokenizer)


class Recorder(TrainerCallback):
    """Write down the learning rate that each update really used, and the loss of each."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.losses: list[float] = []

    def on_pre_optimizer_step(self, args, state, control, optimizer, **kwargs) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])

    def on_log(self, args, state, control, logs, **kwargs) -> None:
        if "loss" in logs:
            self.losses.append(logs["loss"])


def recipe(folder, model=None, pairs=None, eval_dataset=None, **options: object) -> tuple[VaswaniTrainer, Recorder]:
    """Build a trainer of the paper's recipe for a tiny model, and what records its updates."""
    defaults = {
        "max_steps": 12,
        "warmup_steps": 4,
        "source_tokens": 500,
        "target_tokens": 500,
        "logging_steps": 1,
        "report_to": "none",
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "save_minutes": 0,
        "disable_tqdm": True,
    }
    recorder = Recorder()
    trainer = VaswaniTrainer(
        model or tiny_model(vocab_size=400),
        VaswaniTrainingArguments(str(folder), **{**defaults, **options}),
        train_dataset=pairs,
        eval_dataset=eval_dataset,
        callbacks=[recorder],
    )
    return trainer, recorder


@pytest.fixture(scope="session")
def opus_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Marian folder with one vocabulary, pickled weights and a bias, as the first OPUS-MT models have."""
    pytest.importorskip("sentencepiece", reason="SentencePiece is not installed: pip install sentencepiece")
    folder = tmp_path_factory.mktemp("opus-mt-en-de")
    write_marian(folder)
    return folder


@pytest.fixture(scope="session")
def separate_opus_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Marian folder with two vocabularies, safetensors, ReLU and another width in the decoder."""
    pytest.importorskip("sentencepiece", reason="SentencePiece is not installed: pip install sentencepiece")
    folder = tmp_path_factory.mktemp("opus-mt-separate")
    write_marian(folder, True, False, False, activation_function="relu", decoder_ffn_dim=24)
    return folder


@pytest.fixture(scope="session")
def converted_folder(opus_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return what `opus_folder` becomes."""
    folder = tmp_path_factory.mktemp("converted") / "opus"
    convert_model(opus_folder, folder)
    return folder


@pytest.fixture(scope="session")
def converted_separate_folder(separate_opus_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return what `separate_opus_folder` becomes."""
    folder = tmp_path_factory.mktemp("converted") / "opus-separate"
    convert_model(separate_opus_folder, folder)
    return folder


@pytest.fixture(scope="session")
def saved_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: VaswaniTokenizer) -> str:
    """Return a folder with a model and its tokenizer, as `save_pretrained` leaves them."""
    folder = tmp_path_factory.mktemp("saved")
    tiny_model(vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def with_code_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: VaswaniTokenizer) -> str:
    """Return a folder that carries its code too."""
    folder = tmp_path_factory.mktemp("with_code")
    tiny_model(vocab_size=len(tokenizer)).save_pretrained(folder, include_code=True)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def without_vaswani(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder for PYTHONPATH in which `vaswani` cannot be imported, as if it were not installed."""
    folder = tmp_path_factory.mktemp("without")
    (folder / "sitecustomize.py").write_text(
        textwrap.dedent("""
            import sys
            class Absent:
                def find_spec(self, name, path=None, target=None):
                    if name.split(".")[0] in ("vaswani", "vaswani_autoload"):
                        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            sys.meta_path.insert(0, Absent())
            import os; os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
        """)
    )
    return str(folder)


@pytest.fixture
def fast_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the steps that the fast decoders take after the start."""
    steps: list[int] = []
    for decoder in (BeamDecoder, KernelStepDecoder):

        def counted(self, tokens, parents, advance=decoder.advance):
            if tokens.shape[1] > 1:
                steps.append(len(tokens))
            return advance(self, tokens, parents)

        monkeypatch.setattr(decoder, "advance", counted)
    return steps
