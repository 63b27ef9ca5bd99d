"""Texts: their normal form, by which two are equal, and the words of a query."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Collection
from typing import Final

UNRELATED: Final = (
    "The invoice of March was paid by bank transfer",
    "Whales breathe air at the surface of the sea",
    "Restart the web server after changing its certificate",
    "She plays the violin in a small orchestra",
    "The bridge is closed to trucks because of repairs",
    "Add two eggs and a cup of flour to the dough",
    "Our football team lost the final in overtime",
    "The patient takes one tablet before breakfast",
    "Volcanic soil is good for growing wine",
    "A passport is needed to enter the country",
    "The battery of the old phone lasts four hours",
    "Children under six travel free on the train",
    "The court rejected the appeal of the tenant",
    "Paint the wall only when the plaster is dry",
    "Quantum states collapse when they are measured",
    "The shop sells handmade leather shoes",
)
"""Sentences that have nothing in common but what all sentences have; they calibrate embedders."""

_MAX_WORDS: Final = 64
"""Largest number of words in a query; more do not improve it, and a long text as a query stays cheap."""


def word_set(text: str) -> frozenset[str]:
    return frozenset(text.split())


# The stop words of PostgreSQL's English dictionary, so that both databases search for the same words, and parts of
# contractions such as "don't".
_FUNCTION_WORDS = word_set(
    "i me my myself we our ours ourselves you your yours yourself yourselves he him his himself she her hers herself "
    "it its itself they them their theirs themselves what which who whom this that these those am is are was were be "
    "been being have has had having do does did doing a an the and but if or because as until while of at by for "
    "with about against between into through during before after above below to from up down in out on off over "
    "under again further then once here there when where why how all any both each few more most other some such no "
    "nor not only own same so than too very s t can will just don should now d m o re ll ve y ain aren couldn didn "
    "doesn hadn hasn haven isn ma mightn mustn needn shan shouldn wasn weren won wouldn could may might must shall "
    "would us"
)
_WRITTEN_NAME = re.compile(r"\b(?:[A-Z]{2,}|May)\b")
"""Function words that are written as a name: IT, US, WHO, May."""

_WORD = re.compile(r"[^\W_]+")

# Punctuation around words. "C#", "1.5", "-5", ".5" and "don't" keep theirs, and a question differs from a
# statement.
_AROUND = re.compile(r"""(?!(?<=\w).(?=\w))(?![.,]\d)[.,;:!"'`´()\[\]{}«»„“”‘’…]""")  # noqa: RUF001 - quotation marks
_SPACE = re.compile(r"\s+")


# Case carries meaning in short words ("5 mW" and "5 MW", "US" and "us"), but not at the start of a sentence.
_LONG_WORD = re.compile(r"[^\W\d_]{4,}")
_SENTENCE_START = re.compile(r"(?:^|[.!?\n])\W{0,16}[^\W\d_]")
_ARTICLE = re.compile(r"^the (?!few|little|least|less|many|more|most)")


def normal(text: str) -> str:
    """Return the text without parts that do not change its meaning; texts with the same normal form are merged.

    These parts are: composed or decomposed characters (NFC), spaces, punctuation around words, the case of words of
    four letters or more and of the first letter of a sentence, and "the" at the start of the text. In doubt, it stays.
    NFKC would turn 10² into 102, and a case folding "Maßen" into "Massen".
    """
    lower = unicodedata.normalize("NFC", text)
    for part in (_LONG_WORD, _SENTENCE_START):
        lower = part.sub(lambda match: match.group().lower(), lower)
    bare = _SPACE.sub(" ", _AROUND.sub(" ", lower)).strip()
    return _ARTICLE.sub("", bare) or lower.strip()


def digest(text: str, subject: str = "", source: str = "") -> str:
    """Return the hash by which equal texts of one subject and source are found."""
    whole = "\0".join((normal(text), subject, source)) if subject or source else normal(text)
    return hashlib.blake2b(whole.encode(), digest_size=16).hexdigest()


def words(query: str) -> list[str]:
    """Return the distinct words of a query: letters and digits only, so none is an operator of a query language."""
    folded = unicodedata.normalize("NFKC", query).casefold()
    return list(dict.fromkeys(_WORD.findall(folded)))[:_MAX_WORDS]


def content_words(query: str) -> list[str]:
    """Return the words of a query without English function words, which match any text."""
    names = {name.casefold() for name in _WRITTEN_NAME.findall(query)}
    return [word for word in words(query) if word not in _FUNCTION_WORDS or word in names]


def has_words(text: str, asked: Collection[str]) -> bool:
    """Return whether a text has all of these words, in the same forms. No words: False."""
    return bool(asked) and {*asked} <= {*_WORD.findall(unicodedata.normalize("NFKC", text).casefold())}


_NEGATIONS: Final = word_set(
    "not no never neither nothing none without hardly barely rarely "
    "nicht nie niemals kein keine keinen keinem keiner ohne pas jamais sans nunca jamás sin non mai senza"
)
"""Words that turn a statement into its opposite, of five languages."""

_FILLERS: Final = word_set(
    "do does did the a an longer any anymore yet ever already nor and both with always "
    "immer mit toujours avec ne siempre con sempre"
)
"""Words that come and go with a negation: "wants" and "does not want", "with" and "without", "always" and "never"."""

_OPPOSITES: Final = {
    word: (pair.split()[0], place)
    for pair in (
        "on off", "allow deny", "allowed denied", "start stop", "started stopped", "open closed", "before after",
        "true false", "more less", "most least", "accept reject", "accepted rejected", "agree refuse", "rise fall",
        "rose fell", "succeed fail", "enabled disabled", "legal illegal", "like dislike", "agree disagree",
    )
    for place, word in enumerate(pair.split())
}  # fmt: skip
_STATEMENT: Final = 1_000
"""Largest length of a statement in characters."""

_NEGATED: Final = re.compile(r"(?:un|in|im|dis)(?=[a-z]{4})")
_CONTRACTED: Final = {"can't": "can not", "cannot": "can not", "won't": "will not", "n't": " not"}
_PLURAL: Final = re.compile(r"(?<=\w{2})ies$|(?<=\w{2}[^\Ws])s$")


def contradict(one: str, other: str) -> bool:
    """Return whether two texts state the opposite: the same words in the same order, but for a negation.

    A text has "not", "never" or "without" where the other has none, a word with "un" or "dis" before it, or the other
    word of a pair such as "on" and "off". Another name, number or unit is no opposite: both statements may be true.
    Texts of more than 1,000 characters are no single statements.
    """
    if max(len(one), len(other)) > _STATEMENT:
        return False
    (mine, negated), (others, negated_other) = _statement(one), _statement(other)
    return bool(mine) and mine == others and negated != negated_other


def _statement(text: str) -> tuple[list[str], bool]:
    """Return the words of a text without its negations, and whether it has an odd number of these."""
    folded = unicodedata.normalize("NFC", text).casefold().replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")
    for short, whole in _CONTRACTED.items():
        folded = folded.replace(short, whole)
    kept, odd = list[str](), False
    for token in _AROUND.sub(" ", folded).split():
        word = _PLURAL.sub(lambda found: "y" if found[0] == "ies" else "", token)
        if token in _NEGATIONS:
            odd = not odd
        elif (opposite := _OPPOSITES.get(word)) is not None:
            kept.append(opposite[0])
            odd ^= opposite[1] == 1
        elif (bare := _NEGATED.sub("", word, count=1) if _NEGATED.match(word) else word) != word:
            kept.append(bare)
            odd = not odd
        elif token not in _FILLERS:
            kept.append(word)
    return kept, odd
