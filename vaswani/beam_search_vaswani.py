"""Beam search, the paper's and that of transformers: hypotheses, plain decoding steps, and the search of a batch.

Dimension letters in shape comments: B batch, W beams, R = B W rows, T target length, V vocabulary.
"""

import bisect
import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.generation import LogitsProcessorList, StoppingCriteriaList

from .generation_checks_vaswani import LARGEST_EXPONENT, check_probabilities
from .search_rules_vaswani import TokenRules


def gnmt_penalty(length: int, length_penalty: float) -> float:
    """GNMT's length penalty: what the log-probability of a hypothesis is divided by.

    Parameters
    ----------
    length : int
        Number of tokens, the end token included.
    length_penalty : float
        Exponent; the paper's alpha.

    Returns
    -------
    float
        ((5 + length) / 6) ** length_penalty, between e^-700 and e^700, which floating-point numbers can express.
    """
    base = (5 + length) / 6
    exponent = length_penalty * math.log(base)
    if abs(exponent) < LARGEST_EXPONENT:
        return base**length_penalty
    return math.exp(math.copysign(LARGEST_EXPONENT, exponent))


@dataclass
class Hypothesis:
    """A hypothesis, stored as its last token and the beam that it continues.

    Parameters
    ----------
    score : float
        Log-probability divided by the length penalty.
    step : int
        Step of the search, from 0, in which the last token was found.
    parent : int
        Beam of the step before that the token continues.
    token : int
        The last token.
    """

    score: float
    step: int
    parent: int
    token: int


@dataclass
class SequenceSearch:
    """The search for one sequence of a batch: its open beams, step by step, and the finished hypotheses.

    Its subclasses say which hypotheses finish, how they are scored and when the search is over.

    Parameters
    ----------
    length : int
        Number of tokens so far; at first, of those that are forced.
    limit : int
        Number of tokens that a hypothesis may have, the end token included.
    num_beams : int
        Number of hypotheses that stay open.
    num_return_sequences : int
        Number of hypotheses to return.
    length_penalty : float
        Exponent of the length penalty.
    early_stopping : bool | str
        True ends as soon as there are as many finished hypotheses as beams.
    finished : list[Hypothesis]
        Hypotheses that have ended, best first.
    unfinished : list[Hypothesis]
        Hypotheses that were still open at the limit, best first.
    steps : list[list[tuple[float, int, int]]]
        For each step the open beams, best first: log-probability, parent and token.
    is_over : bool, default=False
        Whether the search has ended.
    """

    length: int
    limit: int
    num_beams: int
    num_return_sequences: int
    length_penalty: float
    early_stopping: bool | str
    finished: list[Hypothesis] = field(default_factory=list)
    unfinished: list[Hypothesis] = field(default_factory=list)
    steps: list[list[tuple[float, int, int]]] = field(default_factory=list)
    is_over: bool = False

    def take(self, candidates: list[tuple[float, int, int, bool]]) -> None:
        """Finish candidates that end, keep the best others open, and see whether the search is over.

        Parameters
        ----------
        candidates : list[tuple[float, int, int, bool]]
            The best continuations, best first: log-probability, parent, token, and whether it ends there.
        """
        raise NotImplementedError

    def _finish(self, hypothesis: Hypothesis) -> None:
        bisect.insort(self.finished, hypothesis, key=lambda hypothesis: -hypothesis.score)

    def best(self) -> list[Hypothesis]:
        """Choose the hypotheses to return.

        Returns
        -------
        list[Hypothesis]
            `num_return_sequences` of them, or all that there are, best first; unfinished ones only if finished ones are
            too few.
        """
        missing = max(self.num_return_sequences - len(self.finished), 0)
        chosen = self.finished[: self.num_return_sequences] + self.unfinished[:missing]
        return sorted(chosen, key=lambda hypothesis: -hypothesis.score)

    def trace(self, hypothesis: Hypothesis) -> tuple[list[int], list[int]]:
        """Follow a hypothesis back to its beginning.

        Parameters
        ----------
        hypothesis : Hypothesis
            One of this sequence.

        Returns
        -------
        tuple[list[int], list[int]]
            Its tokens, and the beam that each of them continued.
        """
        tokens, parents = [hypothesis.token], [hypothesis.parent]
        for step in reversed(self.steps[: hypothesis.step]):
            _, parent, token = step[parents[-1]]
            tokens.append(token)
            parents.append(parent)
        return tokens[::-1], parents[::-1]


class PaperSearch(SequenceSearch):
    """The paper's search for one sequence: every candidate that ends finishes a hypothesis; GNMT's length penalty."""

    def take(self, candidates: list[tuple[float, int, int, bool]]) -> None:
        """Finish every candidate that ends, keep the best others open, and see whether the search is over.

        Parameters
        ----------
        candidates : list[tuple[float, int, int, bool]]
            The best continuations, best first: log-probability, parent, token, and whether it ends there.
        """
        self.length += 1
        penalty = gnmt_penalty(self.length, self.length_penalty)
        still_open: list[tuple[float, int, int]] = []
        for log_prob, parent, token, ends in candidates:  # best first
            if log_prob == float("-inf"):
                break
            if ends:
                self._finish(Hypothesis(log_prob / penalty, len(self.steps), parent, token))
            elif len(still_open) < self.num_beams:
                still_open.append((log_prob, parent, token))

        if self.length == self.limit:
            self.unfinished = [Hypothesis(log_prob / penalty, len(self.steps), *rest) for log_prob, *rest in still_open]
        self.steps.append(still_open)
        self.is_over = self.length == self.limit or not still_open or self._is_decided(still_open[0][0])

    def _is_decided(self, best_open: float) -> bool:
        if self.early_stopping is True and len(self.finished) >= self.num_beams:
            return True
        if len(self.finished) < self.num_return_sequences:
            return False
        most_favourable = max(gnmt_penalty(length, self.length_penalty) for length in (self.length + 1, self.limit))
        return self.finished[self.num_return_sequences - 1].score >= best_open / most_favourable


@dataclass
class TransformersSearch(SequenceSearch):
    """The search of transformers for one sequence, with its length penalty |Y|^length_penalty.

    What differs from the paper's: a candidate finishes a hypothesis only if it is among the `num_beams` best, and so do
    those that are open at the limit. As many hypotheses as beams are kept, and a better one replaces the worst. The
    search is over when all are there and the best open beam would not win with the number of tokens that it has now,
    or, with `early_stopping="never"`, with the most that it may have. Forced tokens are part of no score and no length.

    Parameters
    ----------
    farthest : int, default=0
        Number of tokens after the prompt that a hypothesis of the batch may have.
    """

    farthest: int = 0

    def take(self, candidates: list[tuple[float, int, int, bool]]) -> None:
        """Finish the best candidates that end, keep the best others open, and see whether the search is over.

        Parameters
        ----------
        candidates : list[tuple[float, int, int, bool]]
            The best continuations, best first: log-probability, parent, token, and whether it ends there.
        """
        self.length += 1
        length = len(self.steps) + 1
        penalty = length**self.length_penalty
        still_open: list[tuple[float, int, int]] = []
        for rank, (log_prob, parent, token, ends) in enumerate(candidates):  # best first
            if log_prob == float("-inf"):
                break
            if ends or self.length == self.limit:
                if rank < self.num_beams:
                    self._finish(Hypothesis(log_prob / penalty, len(self.steps), parent, token))
            elif len(still_open) < self.num_beams:
                still_open.append((log_prob, parent, token))

        del self.finished[self.num_beams :]
        self.steps.append(still_open)
        self.is_over = not still_open or self._is_decided(still_open[0][0], length)

    def _is_decided(self, best_open: float, length: int) -> bool:
        if len(self.finished) < self.num_beams:
            return False
        if self.early_stopping == "never" and self.length_penalty > 0:
            length = self.farthest
        return self.early_stopping is True or best_open / length**self.length_penalty <= self.finished[-1].score


class StepDecoder:
    """Base class of what takes decoding steps for the beams of a batch.

    Notes
    -----
    `start` and `advance` return states, whatever a decoder means by that; its other methods take them.
    """

    drops_finished = False  # whether finished sequences may leave the batch

    def check_weights(self) -> None:
        """Raise an error if weights changed since the decoder was made; by default a change has its effect in torch."""

    def start(self, prompt: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Decode the prompts, once for all beams of a sequence.

        Parameters
        ----------
        prompt : torch.Tensor
            Start token and forced tokens, of shape (batch, length).
        attention_mask : torch.Tensor
            1 for a real token, 0 for the padding before it, of the same shape.

        Returns
        -------
        torch.Tensor
            The states after the last token, one row for each sequence.
        """
        raise NotImplementedError

    def advance(self, tokens: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
        """Append one token to each beam.

        Parameters
        ----------
        tokens : torch.Tensor
            Token ids, of shape (batch, beams).
        parents : torch.Tensor
            Which beam of the last step each of them continues, of the same shape.

        Returns
        -------
        torch.Tensor
            The states after the tokens, one row for each beam.
        """
        raise NotImplementedError

    def keep(self, order: list[int]) -> None:
        """Drop finished sequences.

        Parameters
        ----------
        order : list[int]
            For each place that stays, the place of the sequence that shall stand there.
        """
        raise NotImplementedError

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Compute the logits of the next token.

        Parameters
        ----------
        states : torch.Tensor
            States of some rows.

        Returns
        -------
        torch.Tensor
            Logits of shape (rows, vocabulary).
        """
        raise NotImplementedError

    def write_log_probs(self, states: torch.Tensor, log_probs: torch.Tensor, rows: torch.Tensor) -> None:
        """Write the log-probabilities of all tokens into rows of a tensor.

        Parameters
        ----------
        states : torch.Tensor
            States of some rows.
        log_probs : torch.Tensor
            Where to write, of shape (any, vocabulary).
        rows : torch.Tensor
            The row for each state.
        """
        log_probs.index_copy_(0, rows, self.logits(states).log_softmax(dim=-1))

    def top_k(
        self, scores: torch.Tensor, count: int, rows: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Find the largest scores of each row, or of some rows.

        Parameters
        ----------
        scores : torch.Tensor
            Scores of shape (any, vocabulary).
        count : int
            How many to find for each row; all of a shorter one.
        rows : torch.Tensor | None, default=None
            Which rows. None means all.

        Returns
        -------
        tuple[torch.Tensor, torch.Tensor]
            The scores, largest first, and their columns, both of shape (rows, count).
        """
        scores = scores if rows is None else scores.index_select(0, rows)
        values, columns = scores.topk(min(count, scores.shape[1]))
        return values, columns

    def best_continuations(
        self, states: torch.Tensor, scores: torch.Tensor, count: int, banned: list[int], renormalise: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Find the most probable continuations of each sequence by one token.

        Parameters
        ----------
        states : torch.Tensor
            States of all beams.
        scores : torch.Tensor
            Log-probability of each beam, in double precision, of shape (batch, beams).
        count : int
            How many continuations to find for each sequence.
        banned : list[int]
            Tokens that none of them may have.
        renormalise : bool, default=False
            Whether the probabilities of the other tokens shall add up to 1.

        Returns
        -------
        tuple[torch.Tensor, torch.Tensor, torch.Tensor]
            Log-probability, beam and token, best first, each of shape (batch, count).
        """
        logits = self.logits(states)
        if renormalise and banned:
            logits = logits.index_fill(1, torch.tensor(banned, device=logits.device), float("-inf"))
        values, tokens = self.top_k(logits.log_softmax(dim=-1), count + len(banned))
        return best_of_beams(values, tokens, scores, count, banned)


class ModelDecoder(StepDecoder):
    """Take decoding steps through the model's `forward`, whatever wraps it, with a cache of transformers.

    Parameters
    ----------
    model : Any
        The model.
    model_kwargs : dict[str, Any]
        Its arguments, with the rows of a sequence repeated for its beams.
    num_beams : int
        Number of beams of each sequence.
    """

    def __init__(self, model: Any, model_kwargs: dict[str, Any], num_beams: int) -> None:
        self._model = model
        self._kwargs = model_kwargs
        self._beams = num_beams
        self.outputs: list[Any] = []
        self._records = model_kwargs.get("output_attentions") or model_kwargs.get("output_hidden_states")

    def start(self, prompt: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Decode the prompts; their mask stands among the model's arguments.

        Parameters
        ----------
        prompt : torch.Tensor
            Start token and forced tokens, of shape (batch, length).
        attention_mask : torch.Tensor
            Not used.

        Returns
        -------
        torch.Tensor
            Logits of shape (batch, vocabulary).
        """
        del attention_mask
        self._sequences = prompt.repeat_interleave(self._beams, dim=0)  # (R, T)
        cache = self._kwargs.get("past_key_values")
        new_length = None if cache is None else prompt.shape[1] - cache.get_seq_length()
        return self._forward(new_length, is_first_iteration=True)[:: self._beams]

    def advance(self, tokens: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
        """Append one token to each beam.

        Parameters
        ----------
        tokens : torch.Tensor
            Token ids, of shape (batch, beams).
        parents : torch.Tensor
            Which beam of the last step each of them continues, of the same shape.

        Returns
        -------
        torch.Tensor
            Logits of shape (batch * beams, vocabulary).
        """
        rows = (torch.arange(len(parents), device=parents.device).unsqueeze(-1) * self._beams + parents).flatten()
        self._sequences = torch.cat((self._sequences[rows], tokens.reshape(-1, 1)), dim=-1)
        cache = self._kwargs.get("past_key_values")
        if cache is not None:
            cache.reorder_cache(rows)
        return self._forward(None if cache is None else 1)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return logits in the precision of the search.

        Parameters
        ----------
        states : torch.Tensor
            Logits of some rows.

        Returns
        -------
        torch.Tensor
            The same, in float32 or float64.
        """
        return states.to(torch.promote_types(states.dtype, torch.float32))

    def _forward(self, new_length: int | None, **kwargs: Any) -> torch.Tensor:
        inputs = self._model.prepare_inputs_for_generation(
            self._sequences, next_sequence_length=new_length, **kwargs, **self._kwargs
        )
        outputs = self._model(**inputs, return_dict=True)
        self._kwargs = self._model._update_model_kwargs_for_generation(outputs, self._kwargs, is_encoder_decoder=True)
        if self._records:
            self.outputs.append(outputs)
        return outputs.logits[:, -1].to(self._sequences.device)


def best_of_beams(
    values: torch.Tensor, tokens: torch.Tensor, scores: torch.Tensor, count: int, banned: list[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Find the most probable continuations of each sequence among those of its beams.

    Parameters
    ----------
    values : torch.Tensor
        Log-probabilities of some tokens after each beam, of shape (batch * beams, tokens); they are changed.
    tokens : torch.Tensor
        The tokens, of the same shape.
    scores : torch.Tensor
        Log-probability of each beam, in double precision, of shape (batch, beams).
    count : int
        How many continuations to find for each sequence.
    banned : list[int]
        Tokens that none of them may have.

    Returns
    -------
    tuple[torch.Tensor, torch.Tensor, torch.Tensor]
        Log-probability, beam and token, best first, each of shape (batch, count); where there are no more, the
        log-probability is minus infinity.
    """
    for token in banned:
        values.masked_fill_(tokens == token, float("-inf"))
    per_beam = values.shape[-1]
    totals = (values.to(scores.dtype).view(*scores.shape, per_beam) + scores.unsqueeze(-1)).flatten(1)
    best, index = totals.topk(min(count, totals.shape[-1]))
    if best.shape[-1] < count:  # a small vocabulary
        missing = (0, count - best.shape[-1])
        best = torch.nn.functional.pad(best, missing, value=float("-inf"))
        index = torch.nn.functional.pad(index, missing)
    return best, index // per_beam, tokens.view(len(scores), -1).gather(1, index)


class BeamSearch:
    """The beam search of a batch: one step after the other, until every sequence is finished.

    A finished sequence leaves its place to another, so that the decoders have rows only for open ones. What a
    user's processors and criteria see is laid out as in transformers nevertheless: all sequences in their order, the
    finished ones with their last rows.

    Parameters
    ----------
    decoders : Sequence[Any]
        A `StepDecoder` for each model of an ensemble, or the one decoder.
    searches : list[SequenceSearch]
        The search for each sequence, at its beginning.
    prompt : torch.Tensor
        Start token and forced tokens, of shape (batch, length).
    count : int
        How many continuations of each sequence are looked at in each step.
    pad : int
        The padding token.
    rules : TokenRules
        Which tokens may be produced, and which end a hypothesis.
    processors : LogitsProcessorList
        Processors of log-probabilities.
    criteria : StoppingCriteriaList
        Criteria that end hypotheses, beside the endings and the limit.
    output_scores : bool
        Whether to keep the processed log-probabilities of each step.
    output_logits : bool
        Whether to keep the logits of each step.
    """

    def __init__(
        self,
        decoders: Sequence[Any],
        searches: list[SequenceSearch],
        prompt: torch.Tensor,
        count: int,
        pad: int,
        rules: TokenRules,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        output_scores: bool,
        output_logits: bool,
    ) -> None:
        self._decoders = decoders
        self._searches = searches
        self._beams = searches[0].num_beams
        self._count = count
        self._places = list(range(len(searches)))  # which sequence stands at each place of the decoders
        self._columns = prompt.shape[1]
        self._pad = pad
        self._rules = rules
        self._processors: Any = processors
        self._criteria = criteria
        self._sequences = prompt.unsqueeze(1).expand(-1, self._beams, -1)  # (B, W, T)
        self._candidates = prompt.unsqueeze(1).expand(-1, self._count, -1)  # (B, count, T)
        self._log_probs = torch.empty(0)  # (R, V), of all sequences
        self.scores: Any = () if output_scores else None
        self.logits: Any = () if output_logits else None
        self._keeps_steps = output_scores or output_logits
        is_plain = not self._processors and not self._keeps_steps
        self._asks_decoder = is_plain and len(decoders) == 1
        # A processor of a user may keep what it is given, which the next step would write over.
        self._reuses_memory = all(type(each).__module__.startswith("transformers.") for each in processors)
        self._is_private = is_plain and not self._criteria and all(decoder.drops_finished for decoder in decoders)

    def start(self, prompt: torch.Tensor, attention_mask: torch.Tensor, log_probs: torch.Tensor) -> None:
        """Decode the prompts.

        Parameters
        ----------
        prompt : torch.Tensor
            Start token and forced tokens, of shape (batch, length).
        attention_mask : torch.Tensor
            1 for a real token, 0 for the padding before it, of the same shape.
        log_probs : torch.Tensor
            Log-probability of the forced tokens, of shape (batch).
        """
        self._states = [decoder.start(prompt, attention_mask) for decoder in self._decoders]
        self._scores = log_probs.unsqueeze(-1)  # (B, beams that are open)

    def step(self) -> bool:
        """Continue all open sequences by one token.

        Returns
        -------
        bool
            Whether one of them is still open.
        """
        # Inference mode spares torch some bookkeeping, but what comes out of it must stay in it.
        with torch.inference_mode() if self._is_private else contextlib.nullcontext():
            return self._step()

    def _step(self) -> bool:
        log_probs, parents, tokens = self._best_continuations()
        listed = tokens.tolist()
        endings = self._which_end(parents, tokens, listed)
        rows = zip(log_probs.tolist(), parents.tolist(), listed, endings, strict=True)
        for index, row in zip(self._places, rows, strict=True):
            if not self._searches[index].is_over:
                if not row[0][0] > float("-inf"):  # NaN, or nothing that may follow
                    self._check_logits()
                self._searches[index].take(list(zip(*row, strict=True)))
        if all(self._searches[index].is_over for index in self._places):
            return False
        self._drop_finished()
        self._advance()
        return True

    def idle(self) -> None:
        """Call the decoders for other processes, which still need this one's shard of the weights."""
        self._advance()

    def _best_continuations(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return log P, parent and token (B, count) of the best continuations of each sequence."""
        banned = self._rules.banned_after(self._columns)
        if self._columns in self._rules.forced:
            return self._forced_continuations(self._rules.forced[self._columns])
        if self._asks_decoder:
            options = (self._count, banned, self._rules.renormalise)
            return self._decoders[0].best_continuations(self._states[0], self._scores, *options)
        count = self._count + len(banned)
        if self._processors or self._keeps_steps:
            values, tokens = self._best_processed_tokens(self._scores.shape[1], count)
        else:
            log_probs = mean_log_probs([each.log_softmax(dim=-1) for each in self._all_logits()])
            values, tokens = self._decoders[0].top_k(log_probs, count)
        return best_of_beams(values, tokens, self._scores, self._count, banned)

    def _forced_continuations(self, token: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return each open beam (B, beams) with one token of the probability 1; the beams are sorted already."""
        self._check_logits()
        parents = torch.arange(self._scores.shape[1], device=self._scores.device).expand(self._scores.shape)
        return self._scores, parents, torch.full_like(parents, token)

    def _check_logits(self) -> None:
        """Refuse NaN; that processors and banned tokens leave nothing is allowed."""
        for logits in self._all_logits():
            check_probabilities(logits)

    def _all_logits(self) -> list[torch.Tensor]:
        return [decoder.logits(states) for decoder, states in zip(self._decoders, self._states, strict=True)]

    def _best_processed_tokens(self, width: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Let the user's processors change log-probabilities, record what was requested, and find the best tokens.

        Processors see rows for the beams of all sequences, as in transformers; those of a finished sequence stay as
        they were. In the first step a sequence has only one row, and its beams are copies.
        """
        rows = torch.tensor([index * self._beams + beam for index in self._places for beam in range(width)])
        rows = rows.to(self._sequences.device)
        log_probs = self._log_probs
        if not len(log_probs):
            one = self._decoders[0].logits(self._states[0][:1])
            log_probs = one.new_empty(len(self._searches) * self._beams, one.shape[-1])
        if len(self._decoders) == 1 and self.logits is None:
            self._decoders[0].write_log_probs(self._states[0], log_probs, rows)
        else:
            logits = self._all_logits()
            log_probs.index_copy_(0, rows, mean_log_probs([each.log_softmax(dim=-1) for each in logits]))
            if self.logits is not None:
                self.logits += (logits[0].repeat_interleave(self._beams // width, dim=0),)
        if width < self._beams:
            of_beams = log_probs.unflatten(0, (-1, self._beams))  # (B, W, V)
            of_beams[:, 1:] = of_beams[:, :1]
        processed = self._processors(self._sequences.flatten(0, 1), log_probs)  # (R, V)
        if self.scores is not None:
            self.scores += (processed.clone(),)
        self._log_probs = log_probs if self._reuses_memory else log_probs.clone()
        return self._decoders[0].top_k(processed, count, rows)

    def _which_end(self, parents: torch.Tensor, tokens: torch.Tensor, listed: list[list[int]]) -> list[list[bool]]:
        """Tell of each continuation (B, count) whether it ends there; `listed` are the tokens once more."""
        endings = [[token in self._rules.endings for token in row] for row in listed]
        if not self._criteria:
            return endings
        self._candidates = self._continue(self._candidates, parents, tokens)
        stopped = self._criteria(self._candidates.flatten(0, 1), self.scores).unflatten(0, (-1, self._count))
        return (torch.tensor(endings, device=stopped.device) | stopped[self._places]).tolist()

    def _continue(self, old: torch.Tensor, parents: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return `old` (B, any, T) with one token more: open sequences continue their beams, others get padding."""
        new = torch.nn.functional.pad(old, (0, 1), value=self._pad)
        of_beams = self._sequences[self._places]
        past = of_beams.gather(1, parents.unsqueeze(-1).expand(-1, -1, of_beams.shape[-1]))
        new[self._places] = torch.cat((past, tokens.unsqueeze(-1)), dim=-1)
        return new

    def _drop_finished(self) -> None:
        """Fill the places of finished sequences with the last open ones."""
        # What is recorded of the steps is of all sequences, to the end.
        if self._keeps_steps or not all(decoder.drops_finished for decoder in self._decoders):
            return
        order = [place for place, index in enumerate(self._places) if not self._searches[index].is_over]
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
            search = self._searches[index]
            still_open = [] if search.is_over else search.steps[-1]
            beams.append(still_open + [dead] * (self._beams - len(still_open)))
        device = self._sequences.device
        parts = [[[beam[part] for beam in row] for row in beams] for part in range(3)]
        log_probs = torch.tensor(parts[0], dtype=torch.float64, device=device)
        parents, tokens = torch.tensor(parts[1:], device=device)
        if self._processors or self._criteria:
            self._sequences = self._continue(self._sequences, parents, tokens)
        self._columns += 1
        self._scores = log_probs
        self._states = [decoder.advance(tokens, parents) for decoder in self._decoders]


def mean_log_probs(log_probs: list[torch.Tensor]) -> torch.Tensor:
    """Average the probabilities of the models of an ensemble.

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
