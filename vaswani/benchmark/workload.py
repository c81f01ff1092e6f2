"""The workload: which models translate or learn which sequences, and how many operations that needs at least."""

import itertools
import logging
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import AutoTokenizer

from ..configuration_vaswani import VaswaniConfig
from ..data.grammar import Grammar
from ..data.text_files import read_lines
from ..generation_vaswani import paper_generation_config
from ..modeling_vaswani import VaswaniForConditionalGeneration
from ..presets import preset
from ..tokenization_vaswani import VaswaniTokenizer, logger

SIZES = ("base", "tiny")
LENGTHS = ("equal", "ragged", "free")

# The paper's generation configuration, section 6.1: every engine has its beams, its length penalty and its limit.
PAPER: Any = paper_generation_config(VaswaniConfig())
BEAMS, LENGTH_PENALTY, TOKENS_BEYOND_SOURCE = PAPER.num_beams, PAPER.length_penalty, PAPER.max_tokens_beyond_input

# How many lines of a file are read, and how many sentences the package's own grammar makes.
LINES_READ, SENTENCES_MADE = 100_000, 5_000
# Sequences with more tokens are left out: the engines have tables of positions.
LONGEST = 900
# What the queries of random weights are multiplied by.
SHARPNESS = 8


@dataclass(frozen=True)
class Cell:
    """The settings of one measurement.

    Parameters
    ----------
    size : str
        "base", "tiny", or the folder of a trained model.
    batch : int
        Sequences in a batch.
    threads : int
        Threads of each engine.
    lengths : str
        "equal" where all outputs are forced to one length, "ragged" where each is forced to its own, "free" where the
        model ends them.
    beams : int, default=BEAMS
        Number of beams; 1 is greedy search.
    """

    task: ClassVar[str] = "generation"
    size: str
    batch: int
    threads: int
    lengths: str
    beams: int = BEAMS

    def __str__(self) -> str:
        shape = f"{self.size}, batch {self.batch}, beams {self.beams}"
        return f"{shape}, threads {self.threads}, {self.lengths} lengths"


@dataclass(frozen=True)
class Job:
    """A batch to translate.

    Parameters
    ----------
    sources : list[list[int]]
        Token ids of each sequence, with its EOS token.
    lengths : str
        "equal", "ragged" or "free".
    targets : list[int]
        Number of tokens of each output, with its EOS token; the most that it may have, if lengths are free.
    beams : int, default=BEAMS
        Number of beams; 1 is greedy search.
    """

    sources: list[list[int]]
    lengths: str
    targets: list[int]
    beams: int = BEAMS

    def smallest(self) -> "Job":
        """Return the job that warms an engine up.

        Returns
        -------
        "Job"
            The first sequence alone.
        """
        return make_job(self.sources[:1], self.lengths, self.beams)


def config_of(size: str) -> VaswaniConfig:
    """Return the configuration of a model with random weights, or of a trained one.

    Parameters
    ----------
    size : str
        "base", "tiny", or the folder of a trained model.

    Returns
    -------
    VaswaniConfig
        The configuration. In models with random weights the padding token starts the decoder and the epsilon of layer
        normalisation is 1e-5, as the peers have it by default.
    """
    if size in SIZES:
        return preset(size, layer_norm_eps=1e-5, decoder_start_token_id=0)
    return VaswaniConfig.from_pretrained(size)


def build_model(size: str) -> VaswaniForConditionalGeneration:
    """Build a model with random weights, always the same ones, or load a trained one.

    Parameters
    ----------
    size : str
        "base", "tiny", or the folder of a trained model.

    Returns
    -------
    VaswaniForConditionalGeneration
        The model, in evaluation mode, with the paper's generation configuration.
    """
    if size in SIZES:
        torch.manual_seed(0)
        model = VaswaniForConditionalGeneration(config_of(size))
        diversify(model)
    else:
        model = VaswaniForConditionalGeneration.from_pretrained(size)
    model.generation_config = paper_generation_config(model.config)
    return model.eval()


def diversify(model: VaswaniForConditionalGeneration) -> None:
    """Change random weights so that outputs tell engines apart.

    Parameters
    ----------
    model : VaswaniForConditionalGeneration
        The model, changed in place.

    Notes
    -----
    With fresh weights nearly every output repeats one token, the same for most sources, and wrong engines would agree.
    Sharp attention makes outputs depend on the source, and random signs in the last layer normalisation keep a token
    from being its own likeliest successor. Special tokens have a zero embedding, so that no engine finds them likely:
    some forbid them, some do not. All engines get the same changed weights.
    """
    config = model.config
    special = [
        token
        for token in (config.pad_token_id, config.bos_token_id, config.decoder_start_token_id)
        if token is not None
    ]
    last: Any = model.model.decoder.layers[-1]
    embedding: Any = model.get_input_embeddings()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("q_proj.weight"):
                weight.mul_(SHARPNESS)
        gain = last.feed_forward_layer_norm.weight
        gain.mul_(torch.randint(0, 2, gain.shape) * 2 - 1)
        embedding.weight[special] = 0


def tokenized_sentences(size: str, file: Path | None, count: int) -> list[list[int]]:
    """Choose sentences at random, always the same ones, and tokenise them.

    Parameters
    ----------
    size : str
        "base" or "tiny", whose vocabulary is learnt from the sentences themselves, or the folder of a trained model.
    file : Path | None
        Text file with a sentence in each line. None takes English sentences from the package's own grammar.
    count : int
        How many sentences.

    Returns
    -------
    list[list[int]]
        Token ids of each sequence, with its EOS token.

    Raises
    ------
    ValueError
        If the file has too few sentences.
    """
    if file is None:
        texts = [pair["en"] for pair in Grammar().corpus(SENTENCES_MADE)]
    else:
        texts = [line for line in itertools.islice(read_lines(file), LINES_READ) if line.strip()]
    random.Random(0).shuffle(texts)
    tokenizer = learn_tokenizer(size, texts)
    chosen: list[list[int]] = []
    for text in texts:
        tokens = tokenizer(text)["input_ids"]
        if len(tokens) <= LONGEST:
            chosen.append(tokens)
        if len(chosen) == count:
            return chosen
    raise ValueError(f"{file} has {len(chosen)} sentences of at most {LONGEST} tokens; {count} are needed.")


def learn_tokenizer(size: str, texts: list[str]) -> Any:
    """Learn the tokenizer of a model with random weights, or load that of a trained one.

    Parameters
    ----------
    size : str
        "base", "tiny", or the folder of a trained model.
    texts : list[str]
        Sentences that the vocabulary is learnt from.

    Returns
    -------
    Any
        The tokenizer.

    Notes
    -----
    The tokenizer does not warn here that a vocabulary is smaller than asked for: that is expected.
    """
    if size not in SIZES:
        return AutoTokenizer.from_pretrained(size, trust_remote_code=False)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        return VaswaniTokenizer.learn(texts, config_of(size).vocab_size, show_progress=False)
    finally:
        logger.setLevel(level)


def make_job(sources: list[list[int]], lengths: str, beams: int = BEAMS) -> Job:
    """Make a batch with given output lengths.

    Parameters
    ----------
    sources : list[list[int]]
        Token ids of each sequence, with its EOS token.
    lengths : str
        "equal" for the mean length of the sources, "ragged" for the length of each source, "free" for the paper's
        limit.
    beams : int, default=BEAMS
        Number of beams.

    Returns
    -------
    Job
        The batch.
    """
    own = [len(source) for source in sources]
    if lengths == "equal":
        own = [round(sum(own) / len(own))] * len(own)
    elif lengths == "free":
        own = [length + TOKENS_BEYOND_SOURCE for length in own]
    return Job(sources, lengths, own, beams)


def operations(config: VaswaniConfig, sources: list[int], targets: list[int], beams: int = BEAMS) -> int:
    """Count the floating-point operations that a beam search needs, without any padding.

    Parameters
    ----------
    config : VaswaniConfig
        Dimensions of the model.
    sources : list[int]
        Number of tokens of each source.
    targets : list[int]
        Number of tokens of each output.
    beams : int, default=BEAMS
        Number of beams.

    Returns
    -------
    int
        Two for each multiplication in a matrix product: the encoder on every source token, keys and values of every
        source token for the decoder, and the decoder on every output token of every beam.
    """
    return 2 * _multiplications(config, sources, targets, beams)


def training_operations(config: VaswaniConfig, sources: list[int], targets: list[int]) -> int:
    """Count the floating-point operations that one training step needs, without any padding.

    Parameters
    ----------
    config : VaswaniConfig
        Dimensions of the model.
    sources : list[int]
        Number of tokens of each source.
    targets : list[int]
        Number of tokens of each target.

    Returns
    -------
    int
        Three times those of the forward pass: the gradient of a product needs two more, one for each factor.
    """
    return 3 * 2 * _multiplications(config, sources, targets, beams=1)


def _multiplications(config: VaswaniConfig, sources: list[int], targets: list[int], beams: int) -> int:
    """Count the multiplications of all matrix products, the decoder's once for each beam."""
    keys, values = config.num_attention_heads * config.d_k, config.num_attention_heads * config.d_v
    attention = config.d_model * (2 * keys + 2 * values)
    feed_forward = 2 * config.d_model * config.d_ff
    total = 0
    for source, target in zip(sources, targets, strict=True):
        encoder = attention + feed_forward + source * (keys + values)
        total += source * config.encoder_layers * encoder
        total += source * config.decoder_layers * config.d_model * (keys + values)
        past = target * (target + 1) // 2 * (keys + values)
        decoder = attention + config.d_model * (keys + values) + feed_forward + source * (keys + values)
        rows = target * (config.decoder_layers * decoder + config.d_model * config.vocab_size)
        total += beams * (rows + config.decoder_layers * past)
    return total


__all__ = [
    "BEAMS",
    "LENGTHS",
    "LENGTH_PENALTY",
    "LINES_READ",
    "LONGEST",
    "SENTENCES_MADE",
    "SIZES",
    "Cell",
    "Job",
    "build_model",
    "config_of",
    "diversify",
    "learn_tokenizer",
    "make_job",
    "operations",
    "tokenized_sentences",
    "training_operations",
]
