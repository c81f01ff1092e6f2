"""The engines that translate: this model and its peers, with the same weights and the same work.

A further peer is one more subclass of `Translator` in `ENGINES`.
"""

import importlib.metadata
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import Any, ClassVar

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, LogitsProcessor

from ..convert import ctranslate2 as of_ctranslate2
from ..convert import marian as of_marian
from ..modeling_vaswani import VaswaniForConditionalGeneration
from .workload import LENGTH_PENALTY, LENGTHS, Job


class EndAt(LogitsProcessor):
    """Logits processor that ends each sequence at a length of its own.

    Parameters
    ----------
    targets : list[int]
        Number of tokens of each sequence, with its EOS token.
    end : int
        Id of the EOS token.
    """

    def __init__(self, targets: list[int], end: int) -> None:
        self.targets = torch.tensor(targets)
        self.end = end

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Forbid the EOS token before the end, and all others there.

        Parameters
        ----------
        input_ids : torch.Tensor
            Tokens so far, with the start token, of shape (batch times beams, length).
        scores : torch.Tensor
            Log-probabilities, of shape (batch times beams, vocabulary); changed in place.

        Returns
        -------
        torch.Tensor
            The log-probabilities.
        """
        ends = self.targets.repeat_interleave(len(input_ids) // len(self.targets)) <= input_ids.shape[1]
        of_end = scores[:, self.end].masked_fill(~ends, float("-inf"))
        scores.index_fill_(0, ends.nonzero().squeeze(-1), float("-inf"))
        scores[:, self.end] = of_end
        return scores


class Engine(ABC):
    """An engine: one library that does the work of one task.

    Parameters
    ----------
    model : VaswaniForConditionalGeneration
        The model whose weights the engine takes.
    threads : int
        Threads that it may use.
    """

    name: ClassVar[str]
    package: ClassVar[str]
    # Fields of the configuration for which it has the same choice as vaswani, if not all.
    expressed: ClassVar[Collection[str] | None] = ()

    @abstractmethod
    def __init__(self, model: VaswaniForConditionalGeneration, threads: int) -> None: ...

    @abstractmethod
    def prepare(self, job: Any) -> Callable[[], Any]:
        """Bring a batch into the form that the engine takes.

        Parameters
        ----------
        job : Any
            A `Job` to translate, or a `TrainingJob`.

        Returns
        -------
        Callable[[], Any]
            The function that does the work, and is timed.
        """

    @classmethod
    def version(cls) -> str | None:
        """Return the version of the engine's package.

        Returns
        -------
        str | None
            The version, None if it is not installed.
        """
        try:
            return importlib.metadata.version(cls.package)
        except importlib.metadata.PackageNotFoundError:
            return None


class Translator(Engine):
    """An engine that translates.

    Parameters
    ----------
    model : VaswaniForConditionalGeneration
        The model whose weights the engine takes.
    threads : int
        Threads that it may use.
    """

    lengths: ClassVar[tuple[str, ...]] = LENGTHS
    is_quantised: ClassVar[bool] = False  # outputs need not be those of single precision

    @abstractmethod
    def tokens(self, outputs: Any) -> list[list[int]]:
        """Read the token ids of outputs.

        Parameters
        ----------
        outputs : Any
            What the prepared function returned.

        Returns
        -------
        list[list[int]]
            Token ids of each output, without start, EOS and padding tokens.
        """


class _TorchTranslator(Translator):
    """An engine that translates with `generate()` of transformers."""

    model: Any

    def prepare(self, job: Job) -> Callable[[], Any]:
        """Pad the batch and set the options of `generate()`."""
        config = self.model.config
        sources = [torch.tensor(source) for source in job.sources]
        input_ids = pad_sequence(sources, batch_first=True, padding_value=config.pad_token_id)
        attention_mask = pad_sequence([torch.ones_like(source) for source in sources], batch_first=True)
        options = self._options(job)
        return lambda: self.model.generate(input_ids, attention_mask=attention_mask, **options)

    def tokens(self, outputs: Any) -> list[list[int]]:
        """Cut off the start token, and everything from the EOS token on."""
        config = self.model.config
        rows = []
        for row in outputs[:, 1:].tolist():
            until_end = row[: row.index(config.eos_token_id)] if config.eos_token_id in row else row
            while until_end and until_end[-1] == config.pad_token_id:
                until_end.pop()
            rows.append(until_end)
        return rows

    def _options(self, job: Job) -> dict[str, Any]:
        longest, options = max(job.targets), {"num_beams": job.beams}
        if job.lengths == "equal":
            return {**options, "min_new_tokens": longest, "max_new_tokens": longest}
        if job.lengths == "ragged":
            end_at = EndAt(job.targets, self.model.config.eos_token_id)
            return {**options, "max_new_tokens": longest + 1, "logits_processor": [end_at]}
        return {**options, "max_new_tokens": longest}


class Vaswani(_TorchTranslator):
    """Translate with this package: the paper's beam search.

    Parameters
    ----------
    model : VaswaniForConditionalGeneration
        The model.
    threads : int
        Not used: torch has its number of threads for the whole process.
    """

    name = "vaswani"
    package = "vaswani"
    expressed = None

    def __init__(self, model: VaswaniForConditionalGeneration, threads: int) -> None:  # noqa: ARG002
        self.model = model

    def _options(self, job: Job) -> dict[str, Any]:
        if job.lengths == "free":
            return {"num_beams": job.beams}  # the paper's generation configuration has the limit
        return super()._options(job)


class VaswaniInt8(Vaswani):
    """Translate with this package and weights that torchao quantises to eight bits.

    Parameters
    ----------
    model : VaswaniForConditionalGeneration
        The model, changed in place.
    threads : int
        Not used: torch has its number of threads for the whole process.
    """

    name = "vaswani-int8"
    package = "torchao"
    is_quantised = True

    def __init__(self, model: VaswaniForConditionalGeneration, threads: int) -> None:
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

        quantize_(model.model, Int8DynamicActivationInt8WeightConfig())
        super().__init__(model, threads)


class Marian(_TorchTranslator):
    """Translate with `MarianMTModel.generate()` of transformers.

    Parameters
    ----------
    model : VaswaniForConditionalGeneration
        The model whose weights are converted.
    threads : int
        Not used: torch has its number of threads for the whole process.
    """

    name = "marian"
    package = "transformers"
    expressed = of_marian.EXPRESSED

    def __init__(self, model: VaswaniForConditionalGeneration, threads: int) -> None:  # noqa: ARG002
        self.model = of_marian.to_marian(model)
        self.model.generation_config = GenerationConfig(
            early_stopping=False,
            pad_token_id=model.config.pad_token_id,
            eos_token_id=model.config.eos_token_id,
            decoder_start_token_id=model.config.decoder_start_token_id,
        )

    def _options(self, job: Job) -> dict[str, Any]:
        penalty = {"length_penalty": power_penalty(job)} if job.beams > 1 else {}
        return {**super()._options(job), **penalty}


class CTranslate2(Translator):
    """Translate with CTranslate2 in single precision.

    Parameters
    ----------
    model : VaswaniForConditionalGeneration
        The model whose weights are converted.
    threads : int
        Threads of its matrix products.

    Notes
    -----
    It cannot end each sequence at a length of its own. Where the EOS token is forbidden it divides the probability of
    that token among the others, which the other engines do not: with equal lengths its outputs are the same only where
    EOS is improbable, as with random weights and a large vocabulary.
    """

    name = "ctranslate2"
    package = "ctranslate2"
    expressed = of_ctranslate2.EXPRESSED
    lengths = ("equal", "free")
    compute_type: ClassVar[str] = "float32"

    def __init__(self, model: VaswaniForConditionalGeneration, threads: int) -> None:
        import ctranslate2

        with tempfile.TemporaryDirectory() as folder:
            of_ctranslate2.to_ctranslate2(model, folder)
            self._translator = ctranslate2.Translator(
                folder, device="cpu", compute_type=self.compute_type, inter_threads=1, intra_threads=threads
            )

    def prepare(self, job: Job) -> Callable[[], Any]:
        """Write the token ids in digits and set the options of beam search."""
        sources = [[str(token) for token in source] for source in job.sources]
        longest = max(job.targets)
        options = {
            "beam_size": job.beams,
            "length_penalty": power_penalty(job),
            "max_input_length": 0,
            "max_decoding_length": longest,
            "min_decoding_length": longest if job.lengths == "equal" else 1,
        }
        return lambda: self._translator.translate_batch(sources, **options)

    def tokens(self, outputs: Any) -> list[list[int]]:
        """Read the best hypotheses."""
        return [[int(token) for token in result.hypotheses[0]] for result in outputs]


class CTranslate2Int8(CTranslate2):
    """Translate with CTranslate2 and weights quantised to eight bits.

    Parameters
    ----------
    model : VaswaniForConditionalGeneration
        The model whose weights are converted.
    threads : int
        Threads of its matrix products.
    """

    name = "ctranslate2-int8"
    compute_type = "int8"
    is_quantised = True


def power_penalty(job: Job) -> float:
    """Return the exponent of the length penalty |Y|^a that grows as the paper's does at the length of a job.

    Parameters
    ----------
    job : Job
        The batch, whose mean source length counts.

    Returns
    -------
    float
        The exponent a. With each token, the paper's ((5 + L) / 6)^p grows by p / (5 + L) of its value, and L^a by
        a / L.
    """
    length = sum(map(len, job.sources)) / len(job.sources)
    return LENGTH_PENALTY * length / (5 + length)


ENGINES: dict[str, type[Translator]] = {
    engine.name: engine for engine in (Vaswani, Marian, CTranslate2, VaswaniInt8, CTranslate2Int8)
}

__all__ = ["ENGINES", "Engine", "Translator"]
