"""`generate()` with the paper's beam search, and `score()` for given translations.

Where this reaches into transformers, beside the public `GenerationMixin.generate`:

- `GenerationMixin._beam_search` is what `generate()` calls for beam search; it is replaced. With the paper's length
  penalty it is the paper's search; with that of transformers it finds what transformers finds, faster where a fast
  decoder takes the steps and nothing is recorded.
- `GenerationMixin._sample` is what `generate()` calls for greedy search too, which is faster under the same conditions.
- `GenerationMixin._prepare_generation_config` resolves the options of a call; it is extended by ours.
- `GenerationMixin._prepare_cache_for_generation` makes a cache, for which the paper's and greedy search have no use.
- `GenerationMixin._has_unfinished_sequences` and `_update_model_kwargs_for_generation` are called.
- `GenerationConfig._pad_token_tensor`, `_eos_token_tensor` and `_decoder_start_token_tensor` are read.
- `search_rules_vaswani.py` says which processors and criteria are read instead of calling them.

Dimension letters in shape comments: B batch, W beams, R = B W rows, T target length, V vocabulary.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
)
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import GenerateBeamEncoderDecoderOutput
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import ModelOutput

from .beam_search_vaswani import (
    BeamSearch,
    ModelDecoder,
    PaperSearch,
    SequenceSearch,
    StepDecoder,
    TransformersSearch,
    gnmt_penalty,
    mean_log_probs,
)
from .configuration_vaswani import IGNORE_INDEX, VaswaniConfig
from .fast_paths_vaswani import fast_decoder
from .generation_checks_vaswani import (
    ProbabilityWatch,
    check_batch,
    check_mask,
    check_power_penalty,
    check_search_options,
    check_token_fields,
    check_token_ids,
)
from .search_rules_vaswani import (
    MINIMUM_LENGTHS,
    OWN_CRITERIA,
    InputLengthLimit,
    TokenRules,
    endings_of,
    has_exact_power,
    min_columns_of,
    rules_of_transformers,
)

# Forms of the length penalty: GNMT's ((5 + |Y|) / 6)^alpha, which the paper uses, and transformers' |Y|^alpha.
LENGTH_PENALTY_FORMS = ("gnmt", "power")
# Attribute of a generation configuration whose caller reads sequences and their scores, and none of the other things
# that transformers returns with them, such as the cache.
SCORES_ONLY = "_scores_only"
# Rows whose probabilities are formed at a time when translations are scored.
ROWS_AT_A_TIME = 512


def paper_generation_config(config: VaswaniConfig) -> GenerationConfig:
    """Return the generation configuration with which `generate(**inputs)` is the paper's decoder.

    Parameters
    ----------
    config : VaswaniConfig
        Configuration of the model; gives the special tokens.

    Returns
    -------
    GenerationConfig
        Beam 4, length penalty 0.6 in GNMT's form, at most 50 tokens more than the input has.

    Notes
    -----
    Section 6.1. Two of its options are this project's own: `length_penalty_form`, "gnmt" or "power" (transformers'
    |Y|^alpha with transformers' own search), and `max_tokens_beyond_input`, which holds for each sequence by itself and
    in every generation mode, unless `max_length` or `max_new_tokens` is given.
    """
    return GenerationConfig(
        num_beams=4,
        length_penalty=0.6,
        length_penalty_form="gnmt",
        early_stopping="never",
        max_tokens_beyond_input=50,
        pad_token_id=config.pad_token_id,
        eos_token_id=config.eos_token_id,
        bos_token_id=config.bos_token_id,
        decoder_start_token_id=config.decoder_start_token_id,
    )


def chosen_or_paper_config(chosen: GenerationConfig | None, config: VaswaniConfig) -> GenerationConfig:
    """Return the paper's generation configuration unless another one was chosen.

    Parameters
    ----------
    chosen : GenerationConfig | None
        The generation configuration that a model has.
    config : VaswaniConfig
        Configuration of the model.

    Returns
    -------
    GenerationConfig
        `chosen`, unless it is what transformers makes of `config` by itself.
    """
    if chosen is None:
        return paper_generation_config(config)
    by_itself = GenerationConfig.from_model_config(config).to_diff_dict()
    differing = {name for name, value in chosen.to_diff_dict().items() if by_itself.get(name) != value}
    # The trainer of transformers switches the cache off, and versions come and go: that is not a choice.
    return chosen if differing - {"use_cache", "transformers_version"} else paper_generation_config(config)


@dataclass
class TranslationScores(ModelOutput):
    """How probable given translations are.

    Parameters
    ----------
    sequences_scores : torch.Tensor | None, default=None
        Log-probability divided by the length penalty, of shape (batch): what beam search calls by this name.
    log_probs : torch.Tensor | None, default=None
        Log-probability of each translation, of shape (batch).
    lengths : torch.Tensor | None, default=None
        Number of tokens of each translation, the end token included, of shape (batch).
    token_log_probs : torch.Tensor | None, default=None
        Log-probability of each token, of shape (batch, target); 0 where there is none.
    """

    sequences_scores: torch.Tensor | None = None
    log_probs: torch.Tensor | None = None
    lengths: torch.Tensor | None = None
    token_log_probs: torch.Tensor | None = None


class VaswaniGenerationMixin(GenerationMixin):
    """Generation mixin: `generate()` with the paper's beam search, and `score()`."""

    config: VaswaniConfig
    get_encoder: Callable[..., Any]
    get_input_embeddings: Callable[[], Any]
    get_output_embeddings: Callable[[], Any]
    prepare_decoder_input_ids_from_labels: Callable[[torch.Tensor], torch.Tensor]

    def generate(
        self,
        inputs: torch.Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        *args: Any,
        ensemble: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Generate translations, as transformers' `generate()`, which documents every option that is not listed here.

        Parameters
        ----------
        inputs : torch.Tensor | None, default=None
            Source token ids, of shape (batch, source); also under the name `input_ids`.
        generation_config : GenerationConfig | None, default=None
            Generation configuration. By default the model's; `paper_generation_config` makes the paper's.
        logits_processor : LogitsProcessorList | None, default=None
            Further processors of log-probabilities.
        stopping_criteria : StoppingCriteriaList | None, default=None
            Further criteria that end a translation.
        *args : Any
            Further arguments of `GenerationMixin.generate`.
        ensemble : Sequence[Any] | None, default=None
            Other models with the same vocabulary. Tokens are then scored by the mean of all models' probabilities.
        **kwargs : Any
            Further arguments of `GenerationMixin.generate`, generation options, and inputs of the model:
            `attention_mask`, and `decoder_input_ids` with `decoder_attention_mask` (padded on the left) to force
            how translations begin.

        Returns
        -------
        Any
            Token ids of shape (batch * num_return_sequences, length), or what `return_dict_in_generate` asks for.

        Raises
        ------
        ValueError
            If the batch is empty, a sequence has no token, a token id is outside the vocabulary, an option has an
            impossible value, or the probabilities are NaN because weights are not finite.

        Notes
        -----
        Inputs are checked once, before the encoder. The bounds of a saved generation configuration (200 beams, 10,000
        tokens) do not hold for options that are given here.
        """
        self._check_inputs(inputs, kwargs)
        settings: list[dict[str, Any]] = [vars(self.generation_config)]
        if generation_config is not None:
            settings.insert(0, vars(generation_config))
        settings.insert(0, kwargs)

        def setting(name: str) -> Any:
            return next((source[name] for source in settings if source.get(name) is not None), None)

        beyond = setting("max_tokens_beyond_input")
        if beyond is not None and (not isinstance(beyond, int) or beyond < 0):
            raise ValueError(f"max_tokens_beyond_input is {beyond!r}; it must be an integer, 0 or more.")
        if beyond is not None and setting("max_length") is None and setting("max_new_tokens") is None:
            columns = self._last_columns(beyond, inputs, kwargs)
            stopping_criteria = StoppingCriteriaList([*(stopping_criteria or ()), InputLengthLimit(columns)])
            prompt = kwargs.get("decoder_input_ids")
            max_length = max(int(columns.max()), 0 if prompt is None else prompt.shape[1] + 2)
            if generation_config is None:
                kwargs["max_length"] = max_length
            else:
                generation_config = copy.copy(generation_config)
                generation_config.max_length = max_length
        if ensemble:
            kwargs.update(ensemble=list(ensemble), custom_generate=type(self)._beam_search)
        return super().generate(  # type: ignore[misc]
            inputs, generation_config, logits_processor, stopping_criteria, *args, **kwargs
        )

    def _vocab_size(self) -> int:
        """Return the number of target token ids; refuse a model that produces others than it can read."""
        if self.config.source_vocab_size is not None:
            return self.config.vocab_size
        read, written = getattr(self.get_input_embeddings(), "weight", None), self.get_output_embeddings()
        rows = self.config.vocab_size if read is None else int(read.shape[0])
        produced = getattr(written, "weight", None)
        produced = int(getattr(written, "out_features", rows) if produced is None else produced.shape[0])
        if produced > rows:
            raise ValueError(f"lm_head has {produced} rows, and the embedding {rows}: lm_head must not have more.")
        return rows

    def _check_inputs(self, inputs: torch.Tensor | None, kwargs: dict[str, Any]) -> None:
        """Raise a ValueError for a source or a prompt that is empty or has token ids outside the vocabulary."""
        vocab_size = self._vocab_size()
        source_vocab_size = self.config.source_vocab_size or vocab_size
        encoded = kwargs.get("encoder_outputs")
        source = inputs if inputs is not None else kwargs.get("input_ids")
        if encoded is not None and not (isinstance(encoded, ModelOutput | tuple) and len(encoded)):
            raise ValueError(f"encoder_outputs is {type(encoded).__name__}; it must be the encoder's output.")
        states = kwargs.get("inputs_embeds") if encoded is None else encoded[0]
        if source is not None:
            check_token_ids("input_ids", source, source_vocab_size)
        elif states is not None:
            check_batch("inputs_embeds" if encoded is None else "encoder_outputs", states, dimensions=3)
            source = states
        prompt = kwargs.get("decoder_input_ids")
        if prompt is not None:
            check_token_ids("decoder_input_ids", prompt, vocab_size)
            if source is not None and len(prompt) != len(source):
                raise ValueError(f"decoder_input_ids has {len(prompt)} sequences; the source has {len(source)}.")
        elif kwargs.get("decoder_attention_mask") is not None:
            raise ValueError("decoder_attention_mask is given without decoder_input_ids.")
        for name, batch in (("attention_mask", source), ("decoder_attention_mask", prompt)):
            mask = kwargs.get(name)
            if batch is not None and mask is not None:
                check_mask(name, mask, batch)
        mask = kwargs.get("decoder_attention_mask")
        if mask is not None and mask.dim() != 2:  # each step makes it one token longer
            raise ValueError(f"decoder_attention_mask has {mask.dim()} dimensions; it must be (batch, prompt).")
        if mask is not None and not mask[:, -1].all():
            raise ValueError("decoder_attention_mask must pad on the left: each prompt's last token must be real.")

    def _last_columns(self, beyond: int, inputs: torch.Tensor | None, kwargs: dict[str, Any]) -> torch.Tensor:
        """Return for each sequence the number of columns, from the start token on, in which it must end."""
        mask = kwargs.get("attention_mask")
        if mask is not None:
            lengths = mask.long().sum(dim=-1)
        else:
            encoded = kwargs.get("encoder_outputs")
            given = (inputs, kwargs.get("input_ids"), kwargs.get("inputs_embeds"), encoded and encoded[0])
            source = next((each for each in given if each is not None), None)
            if source is None:
                raise ValueError("Give the source: input_ids, inputs_embeds or encoder_outputs.")
            lengths = torch.full(source.shape[:1], source.shape[1], device=source.device)
        limits = lengths + beyond
        if self.config.position_encoding != "sinusoidal":
            limits = limits.clamp(max=self.config.max_position_embeddings)
        prompt_mask = kwargs.get("decoder_attention_mask")
        padding = 0 if prompt_mask is None else (prompt_mask == 0).sum(dim=-1)
        return limits + padding + 1  # the start token is not part of the output

    def _prepare_generation_config(
        self, generation_config: GenerationConfig | None, **kwargs: Any
    ) -> tuple[GenerationConfig, dict[str, Any]]:
        """Resolve and check this project's own options too."""
        prepared, model_kwargs = super()._prepare_generation_config(generation_config, **kwargs)  # type: ignore[misc]
        for name in ("length_penalty_form", "max_tokens_beyond_input"):
            if name in model_kwargs:
                setattr(prepared, name, model_kwargs.pop(name))
        form = getattr(prepared, "length_penalty_form", None)
        if form not in (None, *LENGTH_PENALTY_FORMS):
            raise ValueError(f"length_penalty_form is {form!r}; it must be one of {LENGTH_PENALTY_FORMS}.")
        if prepared.eos_token_id == []:  # transformers' beam search asks for the first one
            prepared.eos_token_id = None
        if prepared.pad_token_id is None:
            prepared.pad_token_id = self.config.pad_token_id
        check_token_fields(prepared, self._vocab_size())
        check_search_options(prepared)
        return prepared, model_kwargs

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: GenerationMode,
        *args: Any,
    ) -> Any:
        """Make a cache where one is requested or the search is not ours; `forward` makes its own without one."""
        is_asked_for = model_kwargs.get("past_key_values") is not None or generation_config.cache_implementation
        is_papers = generation_mode == GenerationMode.BEAM_SEARCH and _is_papers_search(generation_config)
        if is_asked_for or not (is_papers or generation_mode == GenerationMode.GREEDY_SEARCH):
            options = (generation_config, model_kwargs, generation_mode, *args)
            super()._prepare_cache_for_generation(*options)  # type: ignore[misc]

    def _beam_search(
        self,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        inputs_tensor: torch.Tensor | None = None,
        ensemble: Sequence[Any] = (),
        **model_kwargs: Any,
    ) -> Any:
        """Search as the paper does where the options say so, otherwise as transformers does."""
        if not _is_papers_search(generation_config):
            if ensemble:
                raise ValueError(
                    "An ensemble needs the paper's search: length_penalty_form='gnmt' and do_sample=False."
                )
            check_power_penalty(generation_config)
            options = (stopping_criteria, generation_config, synced_gpus)
            found = _fast_search(self, input_ids, logits_processor, *options, model_kwargs)
            if found is not None:
                return found
            loop = super()._beam_search  # type: ignore[misc]
            return _watched(loop, input_ids, logits_processor, *options, **model_kwargs)
        beams = generation_config.num_beams
        prompt, prompt_mask = _prompt_of(input_ids, model_kwargs, beams)
        searches = _searches(PaperSearch, prompt_mask, stopping_criteria, generation_config)
        members = [(self, model_kwargs), *_encode_for(ensemble, self.config, inputs_tensor, model_kwargs, beams)]
        decoders = [_decoder_of(model, arguments, generation_config, synced_gpus) for model, arguments in members]
        is_simple = all(type(processor) in MINIMUM_LENGTHS for processor in logits_processor)
        rules = _papers_rules(generation_config, stopping_criteria, logits_processor if is_simple else ())
        pad = _pad_of(generation_config)
        search = BeamSearch(
            decoders,
            searches,
            prompt,
            count=max(2, 1 + len(rules.endings)) * beams,
            pad=pad,
            rules=rules,
            processors=LogitsProcessorList() if is_simple else logits_processor,
            criteria=StoppingCriteriaList(each for each in stopping_criteria if type(each) not in OWN_CRITERIA),
            output_scores=generation_config.return_dict_in_generate and generation_config.output_scores,
            output_logits=generation_config.return_dict_in_generate and generation_config.output_logits,
        )
        # Forced tokens are part of the translation, and so is their probability.
        forced = prompt[:, 1:].masked_fill(prompt_mask[:, :-1] == 0, IGNORE_INDEX)
        log_probs = torch.zeros(len(prompt), dtype=torch.float64, device=prompt.device)
        if forced.shape[1] > 0:
            unexpanded = [(model, _first_rows(arguments, beams)) for model, arguments in members]
            log_probs = _force_decode(unexpanded, prompt[:, :-1], prompt_mask[:, :-1], forced).double().sum(dim=-1)

        search.start(prompt, prompt_mask, log_probs)
        is_open = True
        while self._has_unfinished_sequences(not is_open, synced_gpus, device=prompt.device):
            is_open = is_open and search.step()
            if synced_gpus and not is_open:  # each process calls the model once in each round, or all would hang
                search.idle()
        for decoder in decoders:
            decoder.check_weights()
        return _collect(searches, prompt, pad, search, decoders[0], generation_config, model_kwargs)

    def _sample(
        self,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """Greedy search by a fast decoder where nothing is sampled or recorded, else as transformers does."""
        options = (stopping_criteria, generation_config, synced_gpus)
        is_watched = generation_config.return_dict_in_generate or streamer is not None
        found = None if is_watched else _fast_search(self, input_ids, logits_processor, *options, model_kwargs)
        if found is not None:
            return found
        loop = super()._sample  # type: ignore[misc]
        return _watched(loop, input_ids, logits_processor, *options, streamer, **model_kwargs)

    @torch.no_grad()
    def score(
        self,
        labels: torch.Tensor,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        ensemble: Sequence[Any] = (),
        length_penalty: float | None = None,
    ) -> TranslationScores:
        """Score given translations by forcing the model to produce them.

        Parameters
        ----------
        labels : torch.Tensor
            The translations with their end tokens, of shape (batch, target); padded with -100 on either side.
        input_ids : torch.Tensor | None, default=None
            Source token ids, of shape (batch, source).
        attention_mask : torch.Tensor | None, default=None
            1 for a real source token, 0 for padding. None means that all are real.
        ensemble : Sequence[Any], default=()
            Other models with the same vocabulary; tokens are then scored by the mean of all models' probabilities.
        length_penalty : float | None, default=None
            Exponent of the length penalty. By default as the generation configuration says.

        Returns
        -------
        TranslationScores
            Scores under GNMT's length penalty, log-probabilities, and lengths.

        Raises
        ------
        ValueError
            If a batch is empty, a sequence has no token, or a token id is outside the vocabulary.
        """
        self._check_inputs(input_ids, {"attention_mask": attention_mask})
        check_token_ids("labels", labels, self._vocab_size(), ignored=IGNORE_INDEX)
        if length_penalty is None:
            length_penalty = self.generation_config.length_penalty
        length_penalty = 1.0 if length_penalty is None else length_penalty
        check_search_options(GenerationConfig(length_penalty=length_penalty))
        arguments = {"attention_mask": attention_mask}
        encoded = self.get_encoder()(input_ids, **arguments)
        members = [
            (self, {"encoder_outputs": encoded, **arguments}),
            *_encode_for(ensemble, self.config, input_ids, arguments, beams=1),
        ]
        decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        decoder_attention_mask = ((labels != IGNORE_INDEX).cumsum(dim=-1) > 0).long()
        token_log_probs = _force_decode(members, decoder_input_ids, decoder_attention_mask, labels)
        log_probs = token_log_probs.sum(dim=-1)
        lengths = (labels != IGNORE_INDEX).sum(dim=-1)
        penalties = [gnmt_penalty(length, length_penalty) for length in lengths.tolist()]
        return TranslationScores(
            sequences_scores=(log_probs.cpu().double() / torch.tensor(penalties, dtype=torch.float64)).to(log_probs),
            log_probs=log_probs,
            lengths=lengths,
            token_log_probs=token_log_probs,
        )


def _fast_search(
    model: Any,
    input_ids: torch.Tensor,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: Any,
    synced_gpus: bool,
    arguments: dict[str, Any],
) -> Any:
    """Search as transformers does, greedily or by beams, with a fast decoder; None where its own loop has to."""
    beams, width = config.num_beams, input_ids.shape[1]
    is_recorded = config.return_dict_in_generate and not getattr(config, SCORES_ONLY, False)
    has_own_cache = getattr(arguments.get("past_key_values"), "_is_user_defined", False)
    if config.do_sample or is_recorded or has_own_cache or config.low_memory or config._pad_token_tensor is None:
        return None
    vocab_size = int(getattr(model.get_output_embeddings(), "out_features", 0))
    rules = rules_of_transformers(processors, criteria, config, width, vocab_size)
    if rules is None or (beams > 1 and not has_exact_power(config, width)):
        return None
    decoder = fast_decoder(model, arguments, config, synced_gpus)
    if decoder is None:
        return None
    prompt, prompt_mask = _prompt_of(input_ids, arguments, beams)
    searches = _searches(PaperSearch if beams == 1 else TransformersSearch, prompt_mask, criteria, config)
    pad = _pad_of(config) if beams == 1 else _fill_of(config)
    search = BeamSearch(
        [decoder],
        searches,
        prompt,
        # With one beam, the best token ends a hypothesis or continues it.
        count=1 if beams == 1 else max(2, 1 + len(rules.endings)) * beams,
        pad=pad,
        rules=rules,
        processors=LogitsProcessorList(),
        criteria=StoppingCriteriaList(),
        output_scores=False,
        output_logits=False,
    )
    search.start(prompt, prompt_mask, torch.zeros(len(prompt), dtype=torch.float64))
    while search.step():
        pass
    decoder.check_weights()
    return _collect(searches, prompt, pad, search, decoder, config, arguments)


def _watched(loop: Callable[..., Any], input_ids: torch.Tensor, processors: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a generation loop of transformers, and raise a ValueError if the model's probabilities were NaN."""
    watch = ProbabilityWatch()
    try:
        result = loop(input_ids, LogitsProcessorList([watch, *processors]), *args, **kwargs)
    except RuntimeError:  # torch does not sample from NaN
        watch.check()
        raise
    watch.check()
    return result


def _prompt_of(input_ids: torch.Tensor, arguments: dict[str, Any], beams: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the start token and forced tokens (B, T), with their mask; the rows of a sequence are copies."""
    prompt, mask = input_ids[::beams].long(), arguments.get("decoder_attention_mask")
    return prompt, torch.ones_like(prompt) if mask is None else mask[::beams]


def _papers_rules(config: Any, criteria: StoppingCriteriaList, processors: Sequence[Any]) -> TokenRules:
    """Return the rules of the paper's search: padding and start tokens are never produced."""
    endings = endings_of(criteria)
    never = {_pad_of(config), *config._decoder_start_token_tensor.flatten().tolist()} - endings
    return TokenRules(endings, sorted(never), min_columns_of(processors))


def _pad_of(config: Any) -> int:
    return int(config._pad_token_tensor)


def _fill_of(config: Any) -> int:
    """Return what transformers' beam search pads its output with: padding, but the first end token where that is 0."""
    return _pad_of(config) or int(config._eos_token_tensor.flatten()[0])


def _searches(
    kind: type[SequenceSearch], prompt_mask: torch.Tensor, criteria: StoppingCriteriaList, config: Any
) -> list[SequenceSearch]:
    """Begin the search for each sequence of a batch, whose prompts have a mask (B, T)."""
    width = prompt_mask.shape[1]
    columns = [min(each.max_length for each in criteria if isinstance(each, MaxLengthCriteria))] * len(prompt_mask)
    for criterion in criteria:
        if isinstance(criterion, InputLengthLimit):
            columns = [min(pair) for pair in zip(columns, criterion.columns.tolist(), strict=True)]
    is_papers = kind is PaperSearch
    searches = []
    for index, (real, last) in enumerate(zip(prompt_mask.sum(dim=-1).tolist(), columns, strict=True)):
        forced, limit = real - 1, last - 1 - (width - real)
        if (
            is_papers and config.num_beams > 1 and forced >= limit
        ):  # greedy search appends a token, as transformers' does
            raise ValueError(
                f"Translation {index} of the batch shall begin with {forced} given tokens, but may have at most "
                f"{limit} tokens. Give fewer, or raise max_new_tokens."
            )
        search = kind(
            length=forced,
            limit=max(limit, forced + 1),
            num_beams=config.num_beams,
            num_return_sequences=config.num_return_sequences,
            length_penalty=config.length_penalty,
            early_stopping=config.early_stopping,
        )
        if isinstance(search, TransformersSearch):
            search.farthest = config.max_length - width
        searches.append(search)
    return searches


def _first_rows(arguments: dict[str, Any], beams: int) -> dict[str, Any]:
    """Return the source of model arguments, with one row for each sequence instead of one for each beam."""
    mask = arguments.get("attention_mask")
    encoded = BaseModelOutput(arguments["encoder_outputs"].last_hidden_state[::beams])
    return {"encoder_outputs": encoded, "attention_mask": None if mask is None else mask[::beams]}


def _encode_for(
    models: Sequence[Any], config: VaswaniConfig, source: Any, arguments: dict[str, Any], beams: int
) -> list[tuple[Any, dict[str, Any]]]:
    """Return further members of an ensemble with the arguments for their decoders, expanded for beams."""
    mask = arguments.get("attention_mask")
    members = []
    for number, model in enumerate(models, start=2):
        for name in ("vocab_size", "source_vocab_size", "pad_token_id", "eos_token_id", "decoder_start_token_id"):
            ours, theirs = getattr(config, name), getattr(model.config, name)
            if ours != theirs:
                raise ValueError(
                    f"The models of an ensemble must have one vocabulary, but {name} is {ours} in the first model "
                    f"and {theirs} in model {number}."
                )
        encoded = model.get_encoder()(source, attention_mask=None if mask is None else mask[::beams])
        encoded = BaseModelOutput(encoded.last_hidden_state.repeat_interleave(beams, dim=0))
        names = ("attention_mask", "decoder_attention_mask", "use_cache")
        kept = {name: arguments[name] for name in names if name in arguments}
        members.append((model, {**kept, "encoder_outputs": encoded}))
    return members


def _is_papers_search(config: Any) -> bool:
    return getattr(config, "length_penalty_form", None) == "gnmt" and not config.do_sample


def _decoder_of(model: Any, arguments: dict[str, Any], config: Any, synced_gpus: bool) -> StepDecoder:
    """Return what takes the decoding steps of a model: a fast decoder where the door has one, or its `forward`."""
    decoder = fast_decoder(model, arguments, config, synced_gpus)
    return ModelDecoder(model, arguments, config.num_beams) if decoder is None else decoder


def _force_decode(
    members: Sequence[tuple[Any, dict[str, Any]]],
    decoder_input_ids: torch.Tensor,
    decoder_attention_mask: torch.Tensor,
    labels: torch.Tensor,
) -> torch.Tensor:
    """Return the log-probability of each label (B, T) under the mean of the models' probabilities, 0 at -100."""
    real = labels != IGNORE_INDEX
    tokens = labels[real].unsqueeze(-1)
    of_models = []
    for model, arguments in members:
        outputs = model.model(
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            use_cache=False,
            **arguments,
        )
        states = outputs.last_hidden_state[real]
        parts = [
            model.lm_head(rows).float().log_softmax(dim=-1).gather(1, ids)
            for rows, ids in zip(states.split(ROWS_AT_A_TIME), tokens.split(ROWS_AT_A_TIME), strict=True)
        ]
        of_models.append(torch.cat(parts).squeeze(-1) if parts else states.new_zeros(0))
    log_probs = mean_log_probs(of_models)
    return torch.zeros(labels.shape, dtype=log_probs.dtype, device=labels.device).masked_scatter(real, log_probs)


def _collect(
    searches: list[SequenceSearch],
    prompt: torch.Tensor,
    pad: int,
    search: BeamSearch,
    decoder: Any,
    config: Any,
    model_kwargs: dict[str, Any],
) -> Any:
    """Gather the best translations in the form that transformers' beam search returns."""
    sequences, scores, beam_indices = [], [], []
    for index, found in enumerate(searches):
        best = found.best()
        for hypothesis in best:
            tokens, parents = found.trace(hypothesis)
            sequences.append(torch.tensor(prompt[index].tolist() + tokens))
            beam_indices.append(torch.tensor([index * found.num_beams + parent for parent in parents]))
            scores.append(hypothesis.score)
        for _ in range(found.num_return_sequences - len(best)):  # there are no more
            sequences.append(prompt[index].cpu())
            beam_indices.append(torch.tensor([], dtype=torch.long))
            scores.append(float("-inf"))
    padded = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=pad).to(prompt.device)
    if not config.return_dict_in_generate:
        return padded

    steps = getattr(decoder, "outputs", [])
    encoded = model_kwargs["encoder_outputs"]
    beams = torch.nn.utils.rnn.pad_sequence(beam_indices, batch_first=True, padding_value=-1).to(prompt.device)
    of_search: dict[str, Any] = {"sequences": padded, "beam_indices": beams}
    of_search["sequences_scores"] = torch.tensor(scores, device=prompt.device)

    def of_steps(name: str, is_wanted: bool) -> Any:
        return tuple(step[name] for step in steps) if is_wanted else None

    return GenerateBeamEncoderDecoderOutput(
        **of_search,
        scores=search.scores,
        logits=search.logits,
        encoder_attentions=encoded.get("attentions") if config.output_attentions else None,
        encoder_hidden_states=encoded.get("hidden_states") if config.output_hidden_states else None,
        decoder_attentions=of_steps("decoder_attentions", config.output_attentions),
        cross_attentions=of_steps("cross_attentions", config.output_attentions),
        decoder_hidden_states=of_steps("decoder_hidden_states", config.output_hidden_states),
    )


__all__ = ["SCORES_ONLY", "VaswaniGenerationMixin", "chosen_or_paper_config", "paper_generation_config"]
