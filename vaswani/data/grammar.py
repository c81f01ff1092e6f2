"""The grammar: a parallel corpus of English and German sentences that the package makes itself.

The task is real German: nouns have genders, articles and adjectives agree with them in case, compounds are one word
whose last part gives the gender, the verb comes second in main clauses and last in subordinate ones, and a participle
comes last too, so that words move over ten positions and more.
"""

import random
from dataclasses import dataclass

# English, German, gender. A compound's first part comes in the form that it takes there.
PEOPLE = """
    teacher Lehrer m, baker Bäcker m, painter Maler m, man Mann m, father Vater m, brother Bruder m, son Sohn m,
    uncle Onkel m, doctor Arzt m, king König m, gardener Gärtner m, fisherman Fischer m, cook Koch m, guest Gast m,
    woman Frau f, mother Mutter f, sister Schwester f, daughter Tochter f, aunt Tante f, queen Königin f,
    singer Sängerin f, waitress Kellnerin f, grandmother Großmutter f, child Kind n, girl Mädchen n
"""
FIRST_PARTS = """
    apple Apfel, cherry Kirsch, plum Pflaumen, strawberry Erdbeer, raspberry Himbeer, blueberry Blaubeer,
    lemon Zitronen, orange Orangen, pear Birnen, peach Pfirsich, apricot Aprikosen, pineapple Ananas, banana Bananen,
    coconut Kokos, almond Mandel, hazelnut Haselnuss, walnut Walnuss, pumpkin Kürbis, carrot Karotten,
    potato Kartoffel, tomato Tomaten, onion Zwiebel, mushroom Pilz, cabbage Kohl, cheese Käse, butter Butter,
    cream Sahne, milk Milch, honey Honig, chocolate Schokoladen, vanilla Vanille, cinnamon Zimt, ginger Ingwer,
    coffee Kaffee, fish Fisch, rice Reis, corn Mais, nut Nuss, egg Eier, garlic Knoblauch, pepper Pfeffer,
    herb Kräuter, fruit Obst, vegetable Gemüse, spinach Spinat, bean Bohnen, pea Erbsen, lentil Linsen
"""
LAST_PARTS = """
    cake Kuchen m, juice Saft m, tree Baum m, garden Garten m, market Markt m, salad Salat m, pudding Pudding m,
    basket Korb m, plate Teller m, shop Laden m, smell Geruch m, spoon Löffel m, wagon Wagen m, sack Sack m,
    core Kern m, syrup Sirup m, soup Suppe f, sauce Soße f, tart Torte f, jam Marmelade f, box Kiste f, bag Tüte f,
    bowl Schüssel f, blossom Blüte f, harvest Ernte f, soap Seife f, candle Kerze f, machine Maschine f, fork Gabel f,
    peel Schale f, glass Glas n, bread Brot n, oil Öl n, field Feld n, leaf Blatt n, recipe Rezept n, dish Gericht n,
    picture Bild n, book Buch n, festival Fest n, knife Messer n, house Haus n, powder Pulver n
"""
PEOPLE_ARE = """
    old alt, young jung, small klein, big groß, famous berühmt, friendly freundlich, strange seltsam, rich reich,
    poor arm, clever klug, loud laut, hungry hungrig, happy glücklich, sad traurig, beautiful schön
"""
THINGS_ARE = """
    old alt, small klein, big groß, new neu, red rot, green grün, blue blau, yellow gelb, black schwarz, white weiß,
    cheap billig, good gut, bad schlecht, fresh frisch, sweet süß, warm warm, cold kalt, beautiful schön, heavy schwer,
    light leicht, round rund, strange seltsam
"""
# English past and participle, German past and participle.
VERBS = """
    gave given gab gegeben, showed shown zeigte gezeigt, sold sold verkaufte verkauft, sent sent schickte geschickt,
    brought brought brachte gebracht, promised promised versprach versprochen, described described beschrieb
    beschrieben, explained explained erklärte erklärt, lent lent lieh geliehen, recommended recommended empfahl
    empfohlen, handed handed reichte gereicht
"""
TIMES = {
    "yesterday": "gestern",
    "today": "heute",
    "on Monday": "am Montag",
    "in the morning": "am Morgen",
    "in the evening": "am Abend",
    "last week": "letzte Woche",
    "in summer": "im Sommer",
    "at midnight": "um Mitternacht",
}
FRAMES = {
    "I think that": "ich glaube, dass",
    "everyone knows that": "jeder weiß, dass",
    "we have heard that": "wir haben gehört, dass",
    "nobody was happy because": "niemand war glücklich, weil",
    "it was late when": "es war spät, als",
}
ARTICLES = {
    "nominative": {"m": "der", "f": "die", "n": "das"},
    "accusative": {"m": "den", "f": "die", "n": "das"},
    "dative": {"m": "dem", "f": "der", "n": "dem"},
}


def _written(*parts: str) -> str:
    text = " ".join(parts)
    return f"{text[0].upper()}{text[1:]}."


def _table(text: str) -> list[list[str]]:
    return [entry.split() for entry in text.split(",")]


@dataclass(frozen=True)
class NounPhrase:
    """Hold a noun phrase in both languages.

    Parameters
    ----------
    english : str
        The English phrase, with its article.
    adjective : str
        The German adjective, without its ending.
    noun : str
        The German noun.
    gender : str
        Its gender: "m", "f" or "n".
    """

    english: str
    adjective: str
    noun: str
    gender: str

    def german(self, case: str) -> str:
        """Decline the phrase.

        Parameters
        ----------
        case : str
            "nominative", "accusative" or "dative".

        Returns
        -------
        str
            The German phrase, with its article.
        """
        article = ARTICLES[case][self.gender]
        weak = case == "dative" or article == "den"
        return f"{article} {self.adjective}{'en' if weak else 'e'} {self.noun}"


class Grammar:
    """Make pairs of sentences.

    Parameters
    ----------
    seed : int, default=0
        Decides which sentences are made.
    """

    def __init__(self, seed: int = 0) -> None:
        self.chance = random.Random(seed)
        self.people, self.people_are, self.things_are = _table(PEOPLE), _table(PEOPLE_ARE), _table(THINGS_ARE)
        self.first_parts, self.last_parts, self.verbs = _table(FIRST_PARTS), _table(LAST_PARTS), _table(VERBS)

    def pair(self) -> tuple[str, str]:
        """Make one pair.

        Returns
        -------
        tuple[str, str]
            A sentence in English and in German.
        """
        choose = self.chance.choice
        subject, receiver, thing = self._person(), self._person(), self._thing()
        past, participle, german_past, german_participle = choose(self.verbs)
        time, german_time = choose(list(TIMES.items()))
        earlier = self.chance.random() < 0.3
        english_verb = f"had {participle}" if earlier else past
        finite, final = ("hatte", [german_participle]) if earlier else (german_past, [])
        rest = [receiver.german("dative"), german_time, thing.german("accusative"), *final]
        english = f"{subject.english} {english_verb} {thing.english} to {receiver.english}"
        nominative = subject.german("nominative")
        kind = self.chance.random()
        if kind < 0.2:  # the subject comes first
            return _written(english, time), _written(nominative, finite, *rest)
        if kind < 0.5:  # the time comes first, and the verb stays second
            rest.remove(german_time)
            return _written(time, english), _written(german_time, finite, nominative, *rest)
        frame, german_frame = choose(list(FRAMES.items()))  # a subordinate clause: the verb comes last
        return _written(frame, english, time), _written(german_frame, nominative, *rest, finite)

    def corpus(self, size: int) -> list[dict[str, str]]:
        """Make a corpus without two equal sources.

        Parameters
        ----------
        size : int
            How many pairs.

        Returns
        -------
        list[dict[str, str]]
            Pairs with the keys "en" and "de".
        """
        pairs: dict[str, str] = {}
        while len(pairs) < size:
            english, german = self.pair()
            pairs[english] = german
        return [{"en": english, "de": german} for english, german in pairs.items()]

    def _person(self) -> NounPhrase:
        english, german, gender = self.chance.choice(self.people)
        return self._phrase(self.people_are, english, german, gender)

    def _thing(self) -> NounPhrase:
        (first, german_first), (last, german_last, gender) = map(
            self.chance.choice, (self.first_parts, self.last_parts)
        )
        return self._phrase(self.things_are, f"{first} {last}", german_first + german_last.lower(), gender)

    def _phrase(self, adjectives: list[list[str]], english: str, german: str, gender: str) -> NounPhrase:
        adjective, german_adjective = self.chance.choice(adjectives)
        return NounPhrase(f"the {adjective} {english}", german_adjective, german, gender)


__all__ = ["Grammar"]
