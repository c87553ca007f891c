"""The small language of the bundled checkpoint: words, answers, and documents with questions. Standard library only.

    Mira is a baker from Lisbon. She keeps a red lamp in the cellar.      records: sentences that state facts
    Where is the lamp of Mira?                                            a question
    Mira keeps a red lamp in the cellar.                                  its answer, then the stop token

The circuit in scripts/bundled relies on these rules:
  - A record names its person (or town) before it states a fact, and a colour before its thing.
  - "she" and "her" mean the last person named. A fact stands at most 30 tokens behind the name it belongs to.
  - A marker ("Where", "colour", "job" ...) determines what a question asks. Only questions contain markers, and the
    last one counts.
  - "owner" and "Whose" stand for a person, found by a colour and a thing. "town" stands for the town of the person in
    the question.
  - If no record answers the question, the answer is `UNKNOWN`.
Words that are not in the vocabulary are read as <unk> and change nothing.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field
from typing import Final

from pagedkv.errors import InvalidRequest

WOMEN: Final = """
Mira Anna Berta Clara Dora Edith Elena Emma Esther Eva Fatima Flora Freya Gerda Greta Hanna Hazel Heidi Helga Hilda Ida
Ines Ingrid Irene Iris Isabel Jana Jasmin Johanna Josefa Judith Julia Karin Katja Lara Laura Leila Lena Lidia Linda
Louise Lucia Magda Maria Marta Matilda Maya Mina Miriam Monika Nadia Nina Nora Olga Paula Petra Rahel Rita Rosa Ruth
Sabine Salome Sara Selma Signe Silvia Simone Stella Susan Tamara Tania Tilda Ursula Vera Vilma Yara Yasmin Yvonne Zara
Zoe Amara Aiko Asha Beatriz Chiara Daniela Erika Fiona Gloria Hiroko Indira Keiko Latifa Meena Noemi Odile Priya Ramona
Sunita Teresa Ulrika Valeria Wanda Xenia Zelda
""".split()
MEN: Final = """
Otto Adam Albert Anton Arthur Bruno Carl Caspar Daniel David Emil Erik Felix Frank Fritz Georg Gustav Hans Harald Henrik
Hugo Igor Ivan Jakob Jan Jonas Josef Julian Karim Konrad Lars Leo Leon Linus Lorenz Louis Lukas Magnus Marco Martin Max
Milan Moritz Niels Nils Noah Olaf Oscar Pablo Paul Pedro Peter Philip Rafael Ralf Robert Roman Ruben Samuel Sergei Simon
Stefan Sven Theo Thomas Tobias Tom Ulrich Umberto Viktor Walter Werner Yusuf Zeno Abdul Ahmed Arjun Basil Boris Cesar
Diego Edgar Farid Gregor Hamid Hiro Ibrahim Ismail Javier Kenji Kofi Luca Mateo Nikolai Omar Pavel Quentin Rashid Salim
Tariq Uwe Vincent William Xavier Yannick
""".split()
OBJECTS: Final = """
lamp kettle violin clock mirror basket ladder carpet chair table vase drum flute trumpet lantern candle compass
telescope globe map saddle bicycle umbrella scarf hat coat cloak mask jug bowl cup plate teapot barrel bucket broom rake
spade hammer anvil kite doll puppet sled boat rope net diary painting statue banner tent blanket pillow curtain harp
cello piano radio camera trunk stove bench wheel
""".split()
COLOURS: Final = (
    "red green blue yellow white black brown grey purple pink golden silver scarlet crimson turquoise violet".split()
)
PLACES: Final = """
cellar attic kitchen pantry barn garden hall library studio workshop stable tower mill chapel shed bedroom parlour
nursery garage laundry study greenhouse orchard boathouse bakery courtyard corridor cupboard wardrobe vault larder loft
gatehouse cottage henhouse dairy brewery forge
""".split()
TOWNS: Final = """
Lisbon Porto Madrid Seville Toledo Granada Bilbao Lyon Nantes Dijon Rouen Bruges Ghent Antwerp Utrecht Leiden Delft
Bremen Hamburg Dresden Leipzig Munich Vienna Graz Salzburg Prague Brno Krakow Gdansk Warsaw Riga Tallinn Vilnius
Helsinki Turku Stockholm Uppsala Oslo Bergen Copenhagen Aarhus Dublin Cork Galway Edinburgh Glasgow York Bath Bristol
Oxford Cardiff Rome Turin Venice Naples Genoa Athens Zagreb Belgrade Bucharest Budapest Cairo Kyoto
""".split()
JOBS: Final = """
baker carpenter teacher doctor nurse lawyer tailor weaver potter painter sailor fisher farmer gardener miller smith
brewer butcher cook clockmaker bookbinder librarian judge journalist poet novelist composer conductor singer dancer
pianist sculptor photographer printer plumber mason roofer glassblower jeweller chemist physicist botanist geologist
surveyor pilot driver porter translator
""".split()
GOODS: Final = """
cheese wool glass salt honey wine bread silk lace pottery tea chocolate pepper saffron herring oysters cider beer olives
figs cherries apples roses tulips music theatres markets gardens fountains cathedrals museums ships
""".split()
NUMBERS: Final = """
two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen
twenty thirty
""".split()
YEARS: Final = [str(year) for year in range(1900, 2000)]

KINDS: Final = {
    "name": [*WOMEN, *MEN],
    "object": OBJECTS,
    "colour": COLOURS,
    "place": PLACES,
    "town": TOWNS,
    "job": JOBS,
    "year": YEARS,
    "goods": GOODS,
    "number": NUMBERS,
}
"""The words of facts, by kind. No word is of two kinds."""

MARKERS: Final = {
    "place": "Where where Whose whose room",
    "colour": "colour",
    "live": "live",
    "job": "do job",
    "year": "When when",
    "who": "Who who",
    "known": "known",
    "many": "many",
}
"""Question type → the words that mark it."""

OPENERS: Final = "Where where Whose whose When when Who who What what Which which How how".split()
"""Words that begin a question. From an opener to the next full stop, no facts are stated. A marker that is not an
opener takes precedence over an opener."""

ANSWERS: Final = {
    "place": "NAME keeps|has a COLOUR OBJECT in the PLACE .",
    "colour": "NAME 's OBJECT is COLOUR .",
    "live": "NAME lives|resides in TOWN .",
    "job": "NAME works|serves as a JOB .",
    "year": "NAME was born in YEAR .",
    "who": "NAME is a JOB from TOWN .",
    "known": "TOWN is famous|renowned for its GOODS .",
    "many": "TOWN has NUMBER bridges .",
}
"""Question type → the answer. A word in capitals stands for a word of that kind. `|` separates synonyms, the likelier
one first."""

QUESTIONS: Final = {
    "place": ("Where is {}?", "In which room is {}?"),
    "colour": ("What colour is {}?", "What is the colour of {}?", "What colour does {} have?"),
    "live": ("Where does {} live?", "Which town does {} live in?"),
    "job": ("What does {} do?", "What is the job of {}?"),
    "year": ("When was {} born?",),
    "who": ("Who is {}?",),
    "known": ("What is {} known for?",),
    "many": ("How many bridges does {} have?",),
}
"""Question type → wordings of `document`. Any other wording with the same marker works as well."""

UNKNOWN: Final = "I do not know."
PRONOUNS: Final = "She He Her His she he her his".split()
PLAIN: Final = [
    *PRONOUNS,
    *". , ? 's I not know keeps has a in the lives resides works serves as was born is from".split(),
    *"famous renowned for its bridges and also of The In does keep owner town home have".split(),
]
"""The words that are neither of a kind nor markers."""

WORD: Final = re.compile(r"'s\b|\w+|[^\w\s]")
"""A token of this language. The tokenizer splits text by the same pattern."""


def num_tokens_of(text: str) -> int:
    """Count the tokens of `text`, without <s>."""
    return len(WORD.findall(text))


@dataclass(frozen=True)
class Question:
    """A question and its only right answer. asks: a key of `ANSWERS`, or "unknown" if no record has the answer."""

    text: str
    answer: str
    asks: str


@dataclass(frozen=True)
class Document:
    """A text of records, and questions about all of them, in random order."""

    text: str
    questions: tuple[Question, ...]

    def prompt(self, question: Question) -> str:
        """Return the records, then the question."""
        return f"{self.text} {question.text}"


@dataclass
class _Person:
    """The facts about one person in the document so far. things: object → (colour, place)."""

    name: str
    pronoun: str
    job: str = ""
    town: str = ""
    year: str = ""
    things: dict[str, tuple[str, str]] = field(default_factory=dict)


@dataclass
class _Town:
    """The facts about one town in the document so far."""

    name: str
    goods: str
    number: str = ""


class _World:
    """Facts drawn at random, stated sentence by sentence.

    No colour and object occur together twice, so "the owner of" a thing is one person.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.people: list[_Person] = []
        self.towns: dict[str, _Town] = {}
        self.names = rng.sample(KINDS["name"], len(KINDS["name"]))
        self.town_names = rng.sample(TOWNS, len(TOWNS))
        self.pairs = rng.sample([(c, o) for c in COLOURS for o in OBJECTS], len(COLOURS) * len(OBJECTS))

    def next_sentences(self) -> str:
        """Return the next sentences: a new person, another thing of a person named before, or a town."""
        choice = self.rng.random()
        if choice < 0.2 and self.town_names:
            return self._town()
        if self.names and (choice < 0.7 or not self.people):
            return self._person()
        person = self.rng.choice(self.people)
        return f"{person.name} {self.rng.choice(('also keeps', 'keeps', 'has'))} {self._thing(person)}."

    def _thing(self, person: _Person) -> str:
        at = next(i for i in reversed(range(len(self.pairs))) if self.pairs[i][1] not in person.things)
        colour, thing = self.pairs.pop(at)
        place = self.rng.choice(PLACES)
        person.things[thing] = (colour, place)
        return f"a {colour} {thing} in the {place}"

    def _person(self) -> str:
        rng, name = self.rng, self.names.pop()
        person = _Person(name, "She" if name in WOMEN else "He")
        self.people.append(person)
        if rng.random() < 0.25:
            return f"{name} keeps {self._thing(person)}."
        person.job, person.town = rng.choice(JOBS), rng.choice(TOWNS)
        first = rng.choice(
            ("is a {job} from {town}", "works as a {job} and lives in {town}", "lives in {town} and works as a {job}")
        )
        text = f"{name} {first.format(job=person.job, town=person.town)}."
        choice = rng.random()
        if choice < 0.4:
            person.year = rng.choice(YEARS)
            return f"{text} {person.pronoun} was born in {person.year} and keeps {self._thing(person)}."
        if choice < 0.6:
            return f"{text} {person.pronoun} has {self._thing(person)} and {self._thing(person)}."
        if choice < 0.8:
            person.year = rng.choice(YEARS)
            return f"{text} {person.pronoun} was born in {person.year}."
        return f"{text} {person.pronoun} keeps {self._thing(person)}."

    def _town(self) -> str:
        town = _Town(self.town_names.pop(), self.rng.choice(GOODS))
        self.towns[town.name] = town
        if self.rng.random() < 0.5:
            return f"{town.name} is {self.rng.choice(('famous', 'renowned'))} for its {town.goods}."
        town.number = self.rng.choice(NUMBERS)
        return f"{town.name} has {town.number} bridges and is famous for its {town.goods}."


MAX_STEP_TOKENS: Final = 30
"""The most tokens that one call of `_World.next_sentences` returns."""
MAX_TOKENS: Final = 10_000
"""The most tokens of a document. The pairs of colours and things would run out in a longer one."""


def document(num_tokens: int, *, seed: int) -> Document:
    """Write records of `num_tokens` tokens (<s> counted; at most 30 fewer), and a question about each fact in them.

    About one question in twenty has no answer in the records. The same arguments give the same document.
    Raises: InvalidRequest if no record fits, or the language does not have enough facts
    """
    if not MAX_STEP_TOKENS < num_tokens <= MAX_TOKENS:
        raise InvalidRequest(
            f"a document of {num_tokens} tokens was asked for; "
            f"ask for more than {MAX_STEP_TOKENS} and at most {MAX_TOKENS:,}"
        )
    world, parts, used = _World(random.Random(seed)), list[str](), 1
    while used + MAX_STEP_TOKENS <= num_tokens:
        parts.append(world.next_sentences())
        used += num_tokens_of(parts[-1])
    questions = [q for person in world.people for q in _about_person(world, person)]
    questions += [q for name in world.towns for q in _about_town(world, name, name)]
    questions += _unanswerable(world, len(questions) // 20)
    world.rng.shuffle(questions)
    return Document(" ".join(parts), tuple(questions))


def _about_person(world: _World, person: _Person) -> list[Question]:
    """Return a question for each fact about `person` and about the town they live in."""
    name, found = person.name, list[Question]()
    if person.job:
        found.append(_question(world, "live", _called(world, person), f"{name} lives in {person.town}."))
        found.append(_question(world, "job", _called(world, person), f"{name} works as a {person.job}."))
        found.append(_question(world, "who", _called(world, person), f"{name} is a {person.job} from {person.town}."))
    if person.year:
        found.append(_question(world, "year", _called(world, person), f"{name} was born in {person.year}."))
    if person.town in world.towns:
        found += _about_town(world, person.town, f"the home town of {_called(world, person)}")
    for thing, (colour, place) in person.things.items():
        whose = world.rng.choice((f"the {thing} of {name}", f"{name}'s {thing}"))
        answer = f"{name} keeps a {colour} {thing} in the {place}."
        found.append(
            Question(f"Whose is the {colour} {thing}?", answer, "place")
            if world.rng.random() < 0.2
            else _question(world, "place", whose, answer)
        )
        found.append(_question(world, "colour", whose, f"{name}'s {thing} is {colour}."))
    return found


def _about_town(world: _World, name: str, called: str) -> list[Question]:
    """Return a question for each fact about the town `name`; the questions call the town `called`."""
    town = world.towns[name]
    found = [_question(world, "known", called, f"{name} is famous for its {town.goods}.")]
    if town.number:
        found.append(_question(world, "many", called, f"{name} has {town.number} bridges."))
    return found


def _unanswerable(world: _World, count: int) -> list[Question]:
    """Return `count` questions that no record answers.

    They ask about persons, towns and things that do not occur, and about missing facts of a person.
    """
    rng, found = world.rng, list[Question]()
    strangers, missing_towns = world.names, world.town_names
    for _ in range(count):
        person = rng.choice(world.people)
        thing = rng.choice([o for o in OBJECTS if o not in person.things])
        asked = [("place", f"the {thing} of {person.name}"), ("colour", f"{person.name}'s {thing}")]
        asked += [(asks, rng.choice(strangers)) for asks in ("live", "job", "year", "who") if strangers]
        asked += [(asks, rng.choice(missing_towns)) for asks in ("known", "many") if missing_towns]
        asked += [("year", person.name)] if not person.year else []
        asked += [("job", person.name), ("live", person.name)] if not person.job else []
        found.append(_question(world, *rng.choice(asked), UNKNOWN))
    return found


def _question(world: _World, asks: str, about: str, answer: str) -> Question:
    """Ask for a fact of the type `asks` about a person, thing or town, in one of the wordings."""
    text = world.rng.choice(QUESTIONS[asks]).format(about)
    return Question(text, answer, asks if answer != UNKNOWN else "unknown")


def _called(world: _World, person: _Person) -> str:
    """Return the person's name or, three times in ten, "the owner of" one of their things."""
    if person.things and world.rng.random() < 0.3:
        thing = world.rng.choice(list(person.things))
        return f"the owner of the {person.things[thing][0]} {thing}"
    return person.name


DEMO_ANSWER: Final = "Mira keeps a red lamp in the cellar."
