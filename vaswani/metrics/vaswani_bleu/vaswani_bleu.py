"""The metric for `evaluate.load`: BLEU with its signature, chrF, and BLEU as the paper's authors measured it."""

from typing import Any

import datasets
import evaluate

from vaswani.inference.evaluation import evaluate_translations

CITATION = """\
@inproceedings{post-2018-call,
  title = {A Call for Clarity in Reporting {BLEU} Scores},
  author = {Post, Matt},
  booktitle = {Proceedings of the Third Conference on Machine Translation: Research Papers},
  year = {2018},
  pages = {186--191},
  doi = {10.18653/v1/W18-6319}
}
@inproceedings{vaswani-2017-attention,
  title = {Attention Is All You Need},
  author = {Vaswani, Ashish and Shazeer, Noam and Parmar, Niki and Uszkoreit, Jakob and Jones, Llion and
    Gomez, Aidan N. and Kaiser, Lukasz and Polosukhin, Illia},
  booktitle = {Advances in Neural Information Processing Systems 30},
  year = {2017}
}
"""

INPUTS = """
Parameters
----------
predictions : list[str]
    The translations to score, a sentence each.
references : list[str] | list[list[str]]
    A reference translation for each of them, or several.
target_language : str, default="de"
    Code of their language.
tokenize : str | None, default=None
    Tokenizer of sacreBLEU; "none" means that the text is tokenised already.
"""


class VaswaniBleu(evaluate.Metric):
    """Score translations with `vaswani.inference.evaluation.evaluate_translations`."""

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description=str(__doc__),
            citation=CITATION,
            inputs_description=INPUTS,
            features=[
                datasets.Features({"predictions": text, "references": references})
                for references in (datasets.List(text), text)
            ],
            reference_urls=["https://aclanthology.org/W18-6319", "https://arxiv.org/abs/1706.03762"],
        )

    def _compute(self, predictions: list[str], references: list[Any], **options: Any) -> dict[str, Any]:
        return evaluate_translations(predictions, references, **options)
