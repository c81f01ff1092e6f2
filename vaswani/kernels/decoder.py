"""The decoder for inference, step by step, for the beams of many sequences."""

from ctypes import c_int64
from typing import Any

import torch

from .checks import checked, floats, integers, kernels, memory
from .library import failure
from .weights import PackedWeights
from .workspace import CallWorkspace

# Rows of a step that read weights as fast where torch has them as from packed copies.
FEW_ROWS = 6
# Tokens of a beam for which the caches have memory at first; they double when they are full.
FIRST_LENGTH = 32


class KernelDecoder:
    """Decode the beams of many sequences step by step; a sequence that is finished costs nothing any more.

    Parameters
    ----------
    model : Any
        A model for conditional generation, with a decoder like that of the paper's model and an `lm_head`.
    encoder_hidden_states : torch.Tensor
        The encoder's output, of shape (sequences, source, d_model), in single precision.
    attention_mask : torch.Tensor | None
        1 for a real source token, 0 for padding, of shape (sequences, source). None means that all are real.
    num_beams : int
        Number of beams of each sequence.

    Notes
    -----
    A step goes to C without torch's dispatcher in between. A token that neither the embedding nor the output embedding
    knows is what pads a dead beam: it has no embedding, and is an error as soon as its beam is not dead.
    """

    def __init__(
        self, model: Any, encoder_hidden_states: torch.Tensor, attention_mask: torch.Tensor | None, num_beams: int
    ) -> None:
        if num_beams < 1:
            raise ValueError(f"num_beams is {num_beams}; it must be at least 1.")
        self._kernels = kernels()
        self._stack = model.model.decoder
        in_place = len(encoder_hidden_states) * num_beams <= FEW_ROWS
        self._weights = weights = PackedWeights.of(self._stack, model.lm_head, in_place)
        self.vocab_size = int(weights.structure.output.columns)
        shape = None, None, weights.structure.d_model
        encoded = checked("encoder_hidden_states", encoder_hidden_states.detach(), shape, torch.float32)
        if attention_mask is None:
            lengths, real = [encoded.shape[1]] * len(encoded), encoded
        else:
            is_real = checked("attention_mask", attention_mask.bool(), tuple(encoded.shape[:2]), torch.bool)
            lengths, real = is_real.sum(dim=-1).tolist(), encoded[is_real]
        self._chosen = torch.arange(len(encoded), device="cpu")
        self._beams = num_beams
        self._work = CallWorkspace(weights, lengths)
        self._work.structure.beams = num_beams
        self._work.make_source(weights.structure.layers)
        self._work.make_rows(sum(lengths))
        if self._kernels.project_source(weights.pointer, self._work.pointer, real.data_ptr()):
            raise failure()
        for name in ("used", "lengths"):
            self._work[name] = torch.zeros(len(encoded), dtype=torch.int64, device="cpu")
        self._work["pasts"] = memory((len(encoded), num_beams, 0), torch.int32)
        self._slots_in_use = 0
        self._make_slots(FIRST_LENGTH * num_beams)

    def start(self, prompt: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Decode the prompt, once for all beams of a sequence.

        Parameters
        ----------
        prompt : torch.Tensor
            Start symbol and forced tokens, of shape (sequences, length).
        attention_mask : torch.Tensor
            1 for a real token, 0 for the padding before it, of the same shape.

        Returns
        -------
        torch.Tensor
            The states after the last token, of shape (sequences, d_model).
        """
        everyone = self._chosen
        real = checked("attention_mask", attention_mask.bool(), tuple(prompt.shape), torch.bool)
        if not prompt.shape[1] or not bool(real[:, -1].all()):
            raise ValueError("The prompt of each sequence must end with a real token; padding stands before it.")
        embeddings = self._weights.structure.embeddings
        known = (prompt >= 0) & (prompt < embeddings) | ~real
        if not bool(known.all()):
            token = int(prompt[~known][0])
            raise IndexError(f"The prompt has the token {token}; the embedding has tokens from 0 to {embeddings - 1}.")
        for tokens, is_real in zip(prompt.unbind(1), real.unbind(1), strict=True):
            self._chosen = everyone[is_real]
            parents = torch.zeros(len(self._chosen), 1, dtype=torch.int64, device="cpu")
            states = self.advance(tokens[is_real].unsqueeze(-1), parents)
        return states

    def advance(self, tokens: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
        """Append one token to each beam.

        Parameters
        ----------
        tokens : torch.Tensor
            The tokens, of shape (sequences, beams), int64.
        parents : torch.Tensor
            Which beam of the last step each of them continues, of the same shape.

        Returns
        -------
        torch.Tensor
            The states after the tokens, of shape (sequences * beams, d_model), that last until the next step.

        Raises
        ------
        IndexError
            If a token was generated that the embedding does not have, or a parent was not there.
        RuntimeError
            If the embedding's storage was resized since the decoder was made.
        """
        sequences, beams = tokens.shape
        shape = self._chosen.shape[0], beams
        tokens = checked("tokens", tokens, shape, torch.int64)
        parents = checked("parents", parents, shape, torch.int64)
        if self._slots_in_use + beams > self._slots:
            self._make_slots(max(2 * self._slots, self._slots_in_use + beams))
        pointers = self._chosen.data_ptr(), tokens.data_ptr(), parents.data_ptr()
        self._weights.check_places()
        if self._kernels.decode_step(self._weights.pointer, self._work.pointer, sequences, beams, *pointers):
            raise failure()
        self._slots_in_use += beams
        return self._states[: sequences * beams]

    def keep(self, order: list[int]) -> None:
        """Drop finished sequences.

        Parameters
        ----------
        order : list[int]
            For each place that stays, the place of the sequence that shall stand there.
        """
        if len(set(order)) < len(order) or not all(0 <= place < len(self._chosen) for place in order):
            raise IndexError(f"order is {order}; it must have different places from 0 to {len(self._chosen) - 1}.")
        self._chosen = self._chosen[order]

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Score every token.

        Parameters
        ----------
        states : torch.Tensor
            What the last step returned.

        Returns
        -------
        torch.Tensor
            Scores before the softmax, of shape (rows, vocabulary).
        """
        logits = floats(len(states), self.vocab_size)
        self._score(states, torch.arange(len(states), device="cpu"), False, logits)
        return logits

    def write_log_probs(self, states: torch.Tensor, log_probs: torch.Tensor, rows: torch.Tensor) -> None:
        """Write the logarithms of the probabilities of all tokens into rows of a tensor.

        Parameters
        ----------
        states : torch.Tensor
            What the last step returned.
        log_probs : torch.Tensor
            Where to write, of shape (any, vocabulary), in single precision and contiguous.
        rows : torch.Tensor
            The row for each state.
        """
        if not log_probs.is_contiguous():
            raise ValueError(f"log_probs has the strides {log_probs.stride()}; it is written and must be contiguous.")
        self._score(states, rows, True, log_probs)

    def _score(self, states: torch.Tensor, rows: torch.Tensor, normalise: bool, scores: torch.Tensor) -> None:
        count = self._set_states(states)
        checked("log_probs", scores, (None, self.vocab_size), torch.float32)
        rows = checked("rows", rows, (count,), torch.int64)
        sizes = count, len(scores), rows.data_ptr(), normalise, scores.data_ptr()
        if self._kernels.score_tokens(self._weights.pointer, self._work.pointer, *sizes):
            raise failure()

    def best_continuations(
        self, states: torch.Tensor, scores: torch.Tensor, count: int, banned: list[int], renormalise: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Find the most probable continuations of each sequence by one token.

        Parameters
        ----------
        states : torch.Tensor
            What the last step returned.
        scores : torch.Tensor
            Log-probability of each beam, in double precision, of shape (sequences, beams).
        count : int
            How many continuations to find for each sequence.
        banned : list[int]
            Tokens that none of them may have.
        renormalise : bool, default=False
            Whether the probabilities of the other tokens shall add up to 1.

        Returns
        -------
        tuple[torch.Tensor, torch.Tensor, torch.Tensor]
            Log-probability, beam and token, best first, each of shape (sequences, count).

        Raises
        ------
        IndexError
            If the last token of a beam that is not dead has no embedding.
        """
        rows = self._set_states(states)
        sequences, beams = checked("scores", scores, (None, None), torch.float64).shape
        if sequences * beams != rows:
            raise ValueError(f"scores has the shape {tuple(scores.shape)}; there are {rows} states.")
        scores = scores.contiguous()
        sums = memory((sequences, count), torch.float64)
        parents, tokens = integers(sequences, count), integers(sequences, count)
        never = (c_int64 * len(banned))(*banned) if banned else None
        sizes = sequences, beams, count, scores.data_ptr(), len(banned), never, renormalise
        found = sums.data_ptr(), parents.data_ptr(), tokens.data_ptr()
        if self._kernels.best_continuations(self._weights.pointer, self._work.pointer, *sizes, *found):
            raise failure()
        return sums, parents, tokens

    def _set_states(self, states: torch.Tensor) -> int:
        """Copy states into the workspace, unless they are its own, and return how many there are."""
        self._weights.check_places()
        states = checked("states", states, (None, self._states.shape[1]), torch.float32)
        rows = states.shape[0]
        if rows > self._states.shape[0]:
            raise ValueError(f"states has {rows} rows; the last step had up to {self._states.shape[0]}.")
        if states.data_ptr() != self._states.data_ptr():
            self._states[:rows] = states
        return rows

    def _make_slots(self, slots: int) -> None:
        """Make memory for the keys and values of some slots in each sequence, and keep those that are there."""
        work, stack = self._work, self._weights.structure
        sequences, old = work.structure.sequences, work["pasts"].shape[-1]
        for name, width in (("self_keys", stack.d_k), ("self_values", stack.d_v)):
            cache = floats(stack.layers, sequences, slots, stack.heads * width)
            if old:
                cache[:, :, :old] = work[name]
            work[name] = cache
        pasts = memory((sequences, self._beams, slots), torch.int32).zero_()
        pasts[:, :, :old] = work["pasts"]
        work["pasts"] = pasts
        work["old_pasts"] = torch.empty_like(work["pasts"][:1])
        work["positions"] = positions = self._weights.positions(self._stack, slots)
        work.structure.encoded = len(positions)
        work.structure.slots = slots
        work.make_rows(sequences * self._beams)
        self._slots, self._states = slots, work["states"]


__all__ = ["KernelDecoder"]
