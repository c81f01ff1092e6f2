"""The demo: learn to translate numbers from English to German, from nothing to a translation in a minute."""

import random
import tempfile
from pathlib import Path
from typing import Any

from transformers import (
    AutoModelForSeq2SeqLM,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    set_seed,
)

from .modeling_vaswani import VaswaniForConditionalGeneration
from .presets import preset
from .tokenization_vaswani import VaswaniTokenizer

ENGLISH_SMALL = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen"
).split()
ENGLISH_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
GERMAN_SMALL = (
    "null eins zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn fünfzehn sechzehn "
    "siebzehn achtzehn neunzehn"
).split()
GERMAN_TENS = "zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig".split()


def in_english(number: int) -> str:
    """Spell a number in English.

    Parameters
    ----------
    number : int
        From 0 to 999,999.

    Returns
    -------
    str
        Such as "four hundred and two".
    """
    if number >= 1000:
        thousands, rest = divmod(number, 1000)
        return f"{in_english(thousands)} thousand" + (f" {in_english(rest)}" if rest else "")
    if number >= 100:
        hundreds, rest = divmod(number, 100)
        return f"{in_english(hundreds)} hundred" + (f" and {in_english(rest)}" if rest else "")
    if number >= 20:
        tens, rest = divmod(number, 10)
        return ENGLISH_TENS[tens - 2] + (f"-{in_english(rest)}" if rest else "")
    return ENGLISH_SMALL[number]


def in_german(number: int) -> str:
    """Spell a number in German, where units come before tens.

    Parameters
    ----------
    number : int
        From 0 to 999,999.

    Returns
    -------
    str
        Such as "vierhundertzwei".
    """
    if number >= 1000:
        thousands, rest = divmod(number, 1000)
        return f"{_german_factor(thousands)}tausend" + (in_german(rest) if rest else "")
    if number >= 100:
        hundreds, rest = divmod(number, 100)
        return f"{_german_factor(hundreds)}hundert" + (in_german(rest) if rest else "")
    if number >= 20:
        tens, rest = divmod(number, 10)
        return (f"{_german_factor(rest)}und" if rest else "") + GERMAN_TENS[tens - 2]
    return GERMAN_SMALL[number]


def _german_factor(number: int) -> str:
    return in_german(number).removesuffix("s") if number % 100 == 1 else in_german(number)


def number_corpus(size: int, seed: int = 0) -> list[dict[str, str]]:
    """Make a parallel corpus of different numbers.

    Parameters
    ----------
    size : int
        How many numbers, at most 1,000,000.
    seed : int, default=0
        Decides which numbers, and their order.

    Returns
    -------
    list[dict[str, str]]
        Entries with the keys "en" and "de".
    """
    numbers = random.Random(seed).sample(range(1_000_000), size)
    return [{"en": in_english(number), "de": in_german(number)} for number in numbers]


def run(output: Path | None = None, steps: int = 400) -> float:
    """Make a corpus, learn a tokenizer, train a model, save it and translate numbers that it has not seen.

    Parameters
    ----------
    output : Path | None, default=None
        Folder for the trained model; by default a temporary one.
    steps : int, default=400
        Updates to train for.

    Returns
    -------
    float
        Share of unseen numbers whose translation is right in every letter.
    """
    with tempfile.TemporaryDirectory() as scratch:
        return _run(output or Path(scratch), steps)


def _run(output: Path, steps: int) -> float:
    set_seed(1)
    pairs = number_corpus(20_100)
    train, unseen = pairs[:-100], pairs[-100:]

    tokenizer = VaswaniTokenizer.learn(train, vocab_size=400, show_progress=False)
    size = {"d_model": 128, "d_ff": 256, "encoder_layers": 2, "decoder_layers": 2, "dropout": 0.1}
    model = VaswaniForConditionalGeneration(preset("tiny", vocab_size=len(tokenizer), **size))
    print(f"{len(train):,} pairs, {len(tokenizer)} pieces, {model.num_parameters():,} parameters, {steps} updates")

    examples: Any = [dict(tokenizer(pair["en"], text_target=pair["de"])) for pair in train]
    trainer = Seq2SeqTrainer(
        model,
        Seq2SeqTrainingArguments(
            str(output),
            max_steps=steps,
            per_device_train_batch_size=64,
            learning_rate=3e-3,
            warmup_steps=min(100, steps),
            adam_beta2=0.98,
            logging_steps=100,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            use_cpu=True,
        ),
        data_collator=DataCollatorForSeq2Seq(tokenizer, model),
        train_dataset=examples,
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model()

    model = AutoModelForSeq2SeqLM.from_pretrained(output)
    inputs = tokenizer([pair["en"] for pair in unseen], return_tensors="pt", padding=True)
    outputs = model.generate(**inputs, num_beams=4, max_new_tokens=50)
    translations = tokenizer.batch_decode(outputs, skip_special_tokens=True)
    results = list(zip(unseen, translations, strict=True))
    for pair, translation in results[:5]:
        print(f"  {pair['en']}  ->  {translation}")
    right = sum(pair["de"] == translation for pair, translation in results)
    print(f"{right} of {len(unseen)} unseen numbers are right in every letter.")
    return right / len(unseen)
