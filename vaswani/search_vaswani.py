"""The paper's beam search: hypotheses, and the steps that many sentences take together.

Dimension letters in shape comments: B sentences, W beams, R = B W rows, T target length, V vocabulary.
"""

import bisect
import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.generation import LogitsProcessorList, StoppingCriteriaList

from .decoding_vaswani import best_of_beams, largest
from .native_vaswani import NativeDecoder, largest_of_rows


def length_penalty(length: int, alpha: float) -> float:
    """Return what the log-probability of a translation is divided by.

    Parameters
    ----------
    length : int
        Number of words, the end symbol included.
    alpha : float
        Strength of the penalty.

    Returns
    -------
    float
        ((5 + length) / 6) ** alpha.
    """
    return ((5 + length) / 6) ** alpha


@dataclass
class Hypothesis:
    """A translation, stored as the last of its words and the beam that it continues.

    Parameters
    ----------
    score : float
        Log-probability divided by the length penalty.
    step : int
        Step of the search, from 0, in which the last word was found.
    parent : int
        Beam of the step before that the word continues.
    word : int
        The last word.
    """

    score: float
    step: int
    parent: int
    word: int


@dataclass
class Sentence:
    """The search for one sentence: its open beams, step by step, and what is finished.

    Parameters
    ----------
    length : int
        Number of words so far; at first, of those that are forced.
    limit : int
        Number of words that a translation may have, the end symbol included.
    beams : int
        Number of hypotheses that stay open.
    wanted : int
        Number of translations to return.
    alpha : float
        Strength of the length penalty.
    ends_when_full : bool
        Whether to end as soon as there are as many finished hypotheses as beams (`early_stopping=True`).
    finished : list[Hypothesis]
        Hypotheses that have ended, best first.
    unfinished : list[Hypothesis]
        Hypotheses that were still open at the limit, best first.
    steps : list[list[tuple[float, int, int]]]
        For each step the open beams, best first: log-probability, parent and word.
    is_over : bool, default=False
        Whether the search has ended.
    """

    length: int
    limit: int
    beams: int
    wanted: int
    alpha: float
    ends_when_full: bool
    finished: list[Hypothesis] = field(default_factory=list)
    unfinished: list[Hypothesis] = field(default_factory=list)
    steps: list[list[tuple[float, int, int]]] = field(default_factory=list)
    is_over: bool = False

    def take(self, candidates: list[tuple[float, int, int, bool]]) -> None:
        """Finish every candidate that ends, keep the best others open, and see whether the search is over.

        Parameters
        ----------
        candidates : list[tuple[float, int, int, bool]]
            The best continuations, best first: log-probability, parent, word, and whether it ends there.
        """
        self.length += 1
        penalty = length_penalty(self.length, self.alpha)
        still_open: list[tuple[float, int, int]] = []
        for log_prob, parent, word, ends in candidates:  # best first
            if log_prob == float("-inf"):
                break
            if ends:
                ended = Hypothesis(log_prob / penalty, len(self.steps), parent, word)
                bisect.insort(self.finished, ended, key=lambda hypothesis: -hypothesis.score)
            elif len(still_open) < self.beams:
                still_open.append((log_prob, parent, word))

        if self.length == self.limit:
            self.unfinished = [Hypothesis(log_prob / penalty, len(self.steps), *rest) for log_prob, *rest in still_open]
        self.steps.append(still_open)
        self.is_over = self.length == self.limit or not still_open or self._is_decided(still_open[0][0])

    def _is_decided(self, best_open: float) -> bool:
        if self.ends_when_full and len(self.finished) >= self.beams:
            return True
        if len(self.finished) < self.wanted:
            return False
        most_favourable = max(length_penalty(length, self.alpha) for length in (self.length + 1, self.limit))
        return self.finished[self.wanted - 1].score >= best_open / most_favourable

    def best(self) -> list[Hypothesis]:
        """Choose the translations to return.

        Returns
        -------
        list[Hypothesis]
            The wanted number, or all that there are, best first; unfinished ones only for want of finished ones.
        """
        missing = max(self.wanted - len(self.finished), 0)
        chosen = self.finished[: self.wanted] + self.unfinished[:missing]
        return sorted(chosen, key=lambda hypothesis: -hypothesis.score)

    def trace(self, hypothesis: Hypothesis) -> tuple[list[int], list[int]]:
        """Follow a hypothesis back to its beginning.

        Parameters
        ----------
        hypothesis : Hypothesis
            One of this sentence.

        Returns
        -------
        tuple[list[int], list[int]]
            Its words, and the beam that each of them continued.
        """
        words, parents = [hypothesis.word], [hypothesis.parent]
        for step in reversed(self.steps[: hypothesis.step]):
            _, parent, word = step[parents[-1]]
            words.append(word)
            parents.append(parent)
        return words[::-1], parents[::-1]


class BeamSearch:
    """The search for a batch of sentences: one step after the other, until each sentence is over.

    A sentence that is over leaves its place to another, so that the decoders have rows only for open ones. What a
    user's processors and criteria see is laid out as in transformers nevertheless: all sentences in their order, the
    finished ones with their last rows.

    Parameters
    ----------
    decoders : Sequence[Any]
        A decoder for each model of an ensemble, or the one decoder.
    sentences : list[Sentence]
        The sentences, at their beginning.
    prompt : torch.Tensor
        Start symbol and forced words, of shape (sentences, length).
    count : int
        How many continuations of each sentence are looked at in each step.
    pad : int
        The padding.
    banned : list[int]
        Words that are never produced.
    endings : set[int]
        Words that end a translation.
    min_columns : int
        Number of columns, start symbol included, before which no translation ends.
    processors : LogitsProcessorList
        What changes log-probabilities.
    criteria : StoppingCriteriaList
        What ends hypotheses beside the endings and the limit.
    output_scores : bool
        Whether to keep the processed log-probabilities of each step.
    output_logits : bool
        Whether to keep the logits of each step.
    """

    def __init__(
        self,
        decoders: Sequence[Any],
        sentences: list[Sentence],
        prompt: torch.Tensor,
        count: int,
        pad: int,
        banned: list[int],
        endings: set[int],
        min_columns: int,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        output_scores: bool,
        output_logits: bool,
    ) -> None:
        self._decoders = decoders
        self._sentences = sentences
        self._beams = sentences[0].beams
        self._count = count
        self._places = list(range(len(sentences)))  # which sentence stands at each place of the decoders
        self._columns = prompt.shape[1]
        self._pad = pad
        self._banned = banned
        self._endings = endings
        self._min_columns = min_columns
        self._processors: Any = processors
        self._criteria = criteria
        self._sequences = prompt.unsqueeze(1).expand(-1, self._beams, -1)  # (B, W, T)
        self._candidates = prompt.unsqueeze(1).expand(-1, self._count, -1)  # (B, count, T)
        self._log_probs = torch.empty(0)  # (R, V), of all sentences
        self.scores: Any = () if output_scores else None
        self.logits: Any = () if output_logits else None
        self._keeps_steps = output_scores or output_logits
        is_plain = not self._processors and not self._keeps_steps
        self._asks_decoder = is_plain and len(decoders) == 1 and decoders[0].is_fast
        # A processor of a user may keep what it is given, which the next step would write over.
        self._reuses_memory = all(type(each).__module__.startswith("transformers.") for each in processors)
        self._is_private = is_plain and not self._criteria and all(decoder.is_fast for decoder in decoders)

    def start(self, prompt: torch.Tensor, attention_mask: torch.Tensor, log_probs: torch.Tensor) -> None:
        """Decode the prompts.

        Parameters
        ----------
        prompt : torch.Tensor
            Start symbol and forced words, of shape (sentences, length).
        attention_mask : torch.Tensor
            1 for a real word, 0 for the padding before it, of the same shape.
        log_probs : torch.Tensor
            Log-probability of what is forced, of shape (sentences).
        """
        self._states = [decoder.start(prompt, attention_mask) for decoder in self._decoders]
        self._scores = log_probs.unsqueeze(-1)  # (B, beams that are open)

    def step(self) -> bool:
        """Continue all open sentences by one word.

        Returns
        -------
        bool
            Whether one of them is still open.
        """
        # Inference mode spares torch some bookkeeping, but what comes out of it must stay in it.
        with torch.inference_mode() if self._is_private else contextlib.nullcontext():
            return self._step()

    def _step(self) -> bool:
        log_probs, parents, words = self._best_continuations()
        listed = words.tolist()
        endings = self._which_end(parents, words, listed)
        rows = zip(log_probs.tolist(), parents.tolist(), listed, endings, strict=True)
        for index, row in zip(self._places, rows, strict=True):
            if not self._sentences[index].is_over:
                self._sentences[index].take(list(zip(*row, strict=True)))
        if all(self._sentences[index].is_over for index in self._places):
            return False
        self._drop_what_is_over()
        self._advance()
        return True

    def idle(self) -> None:
        """Call the decoders for other processes, which still need this one's share of the weights."""
        self._advance()

    def _best_continuations(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return log P, parent and word (B, count) of the best continuations of each sentence."""
        banned = self._banned
        if self._columns < self._min_columns:
            banned = sorted({*banned, *self._endings})
        if self._asks_decoder:
            return self._decoders[0].best_continuations(self._states[0], self._scores, self._count, banned)
        count = self._count + len(banned)
        if self._processors or self._keeps_steps:
            values, words = self._best_processed_words(self._scores.shape[1], count)
        else:
            values, words = largest(mean_log_probs([each.log_softmax(dim=-1) for each in self._all_logits()]), count)
        return best_of_beams(values, words, self._scores, self._count, banned)

    def _all_logits(self) -> list[torch.Tensor]:
        return [decoder.logits(states) for decoder, states in zip(self._decoders, self._states, strict=True)]

    def _best_processed_words(self, width: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Let the user's processors change log-probabilities, record what was asked for, and find the best words.

        Processors see rows for the beams of all sentences, as in transformers; those of a finished sentence stay as
        they were. In the first step a sentence has but one row, and its beams are copies.
        """
        rows = torch.tensor([index * self._beams + beam for index in self._places for beam in range(width)])
        rows = rows.to(self._sequences.device)
        log_probs = self._log_probs
        if len(self._decoders) == 1 and isinstance(self._decoders[0], NativeDecoder) and self.logits is None:
            if not len(log_probs):
                shape = len(self._sentences) * self._beams, self._decoders[0].vocab_size
                log_probs = self._states[0].new_empty(shape)
            self._decoders[0].write_log_probs(self._states[0], log_probs, rows)
        else:
            logits = self._all_logits()
            of_rows = mean_log_probs([each.log_softmax(dim=-1) for each in logits])
            if not len(log_probs):
                log_probs = of_rows.new_empty(len(self._sentences) * self._beams, of_rows.shape[-1])
            log_probs.index_copy_(0, rows, of_rows)
            if self.logits is not None:
                self.logits += (logits[0].repeat_interleave(self._beams // width, dim=0),)
        if width < self._beams:
            of_beams = log_probs.unflatten(0, (-1, self._beams))  # (B, W, V)
            of_beams[:, 1:] = of_beams[:, :1]
        processed = self._processors(self._sequences.flatten(0, 1), log_probs)  # (R, V)
        if self.scores is not None:
            self.scores += (processed.clone(),)
        self._log_probs = log_probs if self._reuses_memory else log_probs.clone()
        return largest_of_rows(processed, rows, count)

    def _which_end(self, parents: torch.Tensor, words: torch.Tensor, listed: list[list[int]]) -> list[list[bool]]:
        """Tell of each continuation (B, count) whether it ends there; `listed` are the words once more."""
        endings = [[word in self._endings for word in row] for row in listed]
        if not self._criteria:
            return endings
        self._candidates = self._continue(self._candidates, parents, words)
        stopped = self._criteria(self._candidates.flatten(0, 1), self.scores).unflatten(0, (-1, self._count))
        return (torch.tensor(endings, device=stopped.device) | stopped[self._places]).tolist()

    def _continue(self, old: torch.Tensor, parents: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        """Return `old` (B, any, T) with one word more: open sentences continue their beams, others get padding."""
        new = torch.nn.functional.pad(old, (0, 1), value=self._pad)
        of_beams = self._sequences[self._places]
        past = of_beams.gather(1, parents.unsqueeze(-1).expand(-1, -1, of_beams.shape[-1]))
        new[self._places] = torch.cat((past, words.unsqueeze(-1)), dim=-1)
        return new

    def _drop_what_is_over(self) -> None:
        """Fill the places of sentences that are over with the last ones that are not."""
        # What is kept of the steps is of all sentences, to the end.
        if self._keeps_steps or not all(decoder.is_fast for decoder in self._decoders):
            return
        order = [place for place, index in enumerate(self._places) if not self._sentences[index].is_over]
        kept = len(order)
        if kept == len(self._places):
            return
        moving = [place for place in order if place >= kept]
        staying = {place for place in order if place < kept}
        order = [place if place in staying else moving.pop() for place in range(kept)]
        self._places = [self._places[place] for place in order]
        for decoder in self._decoders:
            decoder.keep(order)

    def _advance(self) -> None:
        """Hand the open beams of the last step to the decoders."""
        dead = (float("-inf"), 0, self._pad)
        beams = []
        for index in self._places:
            sentence = self._sentences[index]
            still_open = [] if sentence.is_over else sentence.steps[-1]
            beams.append(still_open + [dead] * (self._beams - len(still_open)))
        device = self._sequences.device
        parts = [[[beam[part] for beam in row] for row in beams] for part in range(3)]
        log_probs = torch.tensor(parts[0], dtype=torch.float64, device=device)
        parents, words = torch.tensor(parts[1:], device=device)
        if self._processors or self._criteria:
            self._sequences = self._continue(self._sequences, parents, words)
        self._columns += 1
        self._scores = log_probs
        self._states = [decoder.advance(words, parents) for decoder in self._decoders]


def mean_log_probs(log_probs: list[torch.Tensor]) -> torch.Tensor:
    """Average the probabilities of several models.

    Parameters
    ----------
    log_probs : list[torch.Tensor]
        Logarithms of probabilities, of one shape, for each model.

    Returns
    -------
    torch.Tensor
        Logarithms of the mean.
    """
    if len(log_probs) == 1:
        return log_probs[0]
    return torch.stack(log_probs).logsumexp(dim=0) - math.log(len(log_probs))
