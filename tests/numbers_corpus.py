"""A corpus for tests: numbers, spelled in English and in German."""

import random

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
    """Spell a number in English, from 0 to 999,999."""
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
    """Spell a number in German, where units come before tens, from 0 to 999,999."""
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
    """Make a parallel corpus of different numbers."""
    numbers = random.Random(seed).sample(range(1_000_000), size)
    return [{"en": in_english(number), "de": in_german(number)} for number in numbers]
