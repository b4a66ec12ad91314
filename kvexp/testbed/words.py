"""The vocabulary of the testbed language: every word is one token."""

# ruff: noqa: SIM905  # a list of words is read more easily as a text
from __future__ import annotations

NAMES = (
    "alice bruno carla david elena felix greta henry irene jonas karla lewis maria niels olive pedro quinn rosa simon "
    "tilda ulric vera walter xenia yusuf zelda amir bella casper dora emil flora gustav hanna ivan julia kurt linda "
    "milo nora"
).split()

_COLORS = "red blue green yellow purple orange white black pink brown grey silver golden crimson violet teal".split()
_PETS = "cat dog horse parrot rabbit turtle hamster goat lizard falcon ferret donkey spaniel canary otter pony".split()
_FOODS = (
    "bread soup cheese rice honey apples olives salmon noodles plums beans mango pepper walnut garlic melon".split()
)
_PLACES = "haven ford mouth bridge castle wick stead minster pool field port combe".split()
_TRADES = "baker pilot doctor painter judge sailor tailor miner farmer lawyer singer broker".split()
_DIGITS = "zero one two three four five six seven eight nine".split()

# attribute -> the word lists its values are made of, one word of each list in turn
ATTRIBUTES: dict[str, tuple[list[str], ...]] = {
    "color": (_COLORS,),
    "pet": (_PETS,),
    "food": (_FOODS,),
    "city": ("north south east west upper lower new great".split(), _PLACES),
    "job": ("chief junior senior night deputy master acting royal".split(), _TRADES),
    "code": (_DIGITS, _DIGITS, _DIGITS),
}

# topic -> the nouns that a text about it prefers
TOPICS: dict[str, list[str]] = {
    "river": "river boat stone fish reed bank".split(),
    "forest": "forest tree path owl fox moss".split(),
    "town": "town market street tower bell clock".split(),
    "house": "house door window stove chair lamp".split(),
    "sea": "sea wave harbor gull sand storm".split(),
    "mountain": "mountain rock cloud eagle snow valley".split(),
    "garden": "garden rose fence bee well hedge".split(),
    "road": "road cart wheel inn dust mile".split(),
}
ADJECTIVES = "old small quiet tall cold bright narrow empty gentle heavy distant broken hidden early".split()
VERBS = "stood moved waited turned slept leaned shone rested drifted fell grew sang stayed vanished".split()
PREPOSITIONS = "near behind above beside under past beyond across".split()
ADVERBS = "slowly again alone softly often forever outside together".split()

START = "<s>"  # first token of every prompt
END = ";"  # closes every answer: the models' end token
PAD = "<pad>"
UNKNOWN = "<unk>"
ORDINALS = "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth".split()
GRAMMAR = "text talk summary ask recall now ann ben the then and some : . , ? !".split()


def vocabulary() -> list[str]:
    """Every token once, in a fixed order; special tokens first."""
    words = [PAD, START, END, UNKNOWN, *GRAMMAR, *ORDINALS, *NAMES, *ATTRIBUTES]
    for parts in ATTRIBUTES.values():
        for part in parts:
            words += part
    for nouns in TOPICS.values():
        words += nouns
    words += [*ADJECTIVES, *VERBS, *PREPOSITIONS, *ADVERBS]
    return list(dict.fromkeys(words))
