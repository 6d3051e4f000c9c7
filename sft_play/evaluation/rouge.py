"""ROUGE-1, -2 and -L as a metric of the `evaluate` library, in any script; needs no network."""

import unicodedata

import datasets
import evaluate
import regex
from rouge_score.rouge_scorer import RougeScorer
from rouge_score.tokenizers import Tokenizer

# rouge-score's words, [a-z0-9]+, and what it drops: words of other scripts than Latin.
# Scripts without spaces between words give a word for each character.
_UNSPACED = (
    r"\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}\u30fc"  # U+30FC lengthens a vowel
    r"\p{Script=Thai}\p{Script=Lao}\p{Script=Khmer}\p{Script=Myanmar}\p{Script=Tibetan}"
)
# The script Common has letters that are signs of Latin texts too, such as the micro sign.
_LETTER = rf"[[\p{{L}}--[\p{{Script=Latin}}\p{{Script=Common}}{_UNSPACED}]]||[\p{{Nd}}--[0-9]]]"
_WORD = regex.compile(
    rf"[a-z0-9]+|[[{_UNSPACED}]&&[\p{{L}}\p{{Nd}}]]\p{{M}}*|{_LETTER}(?:{_LETTER}|\p{{M}}|\u200d)*",
    regex.VERSION1,
)


class UnicodeTokenizer(Tokenizer):
    """Splits a text of any script into words. Latin script is split as rouge-score splits it."""

    def tokenize(self, text: str) -> list[str]:
        """Return the words in lower case, one for each character of a script without spaces.

        >>> UnicodeTokenizer().tokenize("The cat, \u041a\u043e\u0442 \u732b\u3060")
        ['the', 'cat', '\u043a\u043e\u0442', '\u732b', '\u3060']
        """
        # a word may be written with composed or with combining characters
        return [unicodedata.normalize("NFKC", word) for word in _WORD.findall(text.lower())]


class Rouge(evaluate.Metric):
    """Scores in [0, 1] of each answer; `config_name` is the kind."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="F-measures of words that answers and references have in common",
            citation="Chin-Yew Lin. 2004. ROUGE: A Package for Automatic Evaluation of Summaries.",
            features=datasets.Features(
                {"predictions": datasets.Value("string"), "references": datasets.Value("string")}
            ),
        )

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, list[float]]:
        kind = self.config_name
        scorer = RougeScorer([kind], tokenizer=UnicodeTokenizer())
        pairs = zip(references, predictions, strict=True)
        scores = [scorer.score(expected, answer)[kind].fmeasure for expected, answer in pairs]
        return {"scores": scores}
