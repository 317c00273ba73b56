"""The stand-in's text: children's stories, and retellings of them that rules make.

    python checkpoints/make.py corpus --stories stories.jsonl --sampled stories_sampled.jsonl \\
        --math gsm8k_train.jsonl                               # work/corpus, work/corpus-first

The idea.  A drafter of one layer cannot look up what followed a token earlier; the target's
induction heads can.  Stories alone ask for no looking up, so rules build documents that do, as one
asks an assistant: a story, a wish, and the story told again as wished, most of it copied and some
of it changed.

    form      what is wished
    names     the same story with another child, the pronouns too where a boy becomes a girl
    things    with another thing or animal in place of one
    both      a child and a thing
    colours   another colour
    said      only what somebody said
    shorter   the first sentence and the last ones

A story that a rule cannot change safely is left out for that form: better none than a wrong one.
"""
import functools
import random
import re

from data.words import (
    ADJECTIVES, AFTER_HIM, AGAIN, ANIMALS, ANIMAL_SOUNDS, COLOURED, COLOURS, COMPOUND, DETERMINERS,
    FAMILY, GENDER, GROUP, IRREGULAR, MAYBE_HIM, NAMES, OTHER, PEOPLE, SAID, TO_BOY, TO_GIRL,
    WISH_SAID, WISH_SHORTER,
)

EOS = "<|endoftext|>"
SOURCES = ("stories", "sampled", "retell", "math")

# Quotation marks and dashes, those first that were decoded wrongly
ASCII = {
    "\u00e2\u20ac\u0153": '"', "\u00e2\u20ac\u2122": "'",
    "\u00e2\u20ac\u201c": "-", "\u00e2\u20ac\u201d": "-",
    "\u00e2\u20ac": '"', "\u201c": '"', "\u201d": '"', "\u2018": "'", "\u2019": "'", "\u2013": "-",
    "\u2014": "-", "\u2026": "...", "\u00a0": " ",
}
ODD = re.compile(r"[^A-Za-z0-9 \n.,!?'\":;$-]")
STORY = (200, 1600)                                # characters of a story that is kept
EXCERPT = (250, 620)                               # and of one that is told again with exchanges
LISTENED = (250, 950)                              # and of one that is made shorter, or searched
RETOLD = 1400                                  # and of all three parts: they must fit in 480 tokens
PROBLEM, BRIEF = 900, 500                   # of a word problem; the brief ones count twice at first
RETELL = 0.35 / 0.40                               # characters of retellings for one of stories
FORMS = {                                          # shares of the retellings
    "names": 0.24, "things": 0.22, "both": 0.14, "colours": 0.05, "said": 0.15, "shorter": 0.20,
}


# ---------------------------------------------------------------- stories and sentences
def story_text(text):
    """A story in ASCII, a paragraph a line; None where it is cut off, short, long, or odd."""
    for odd, plain in ASCII.items():
        text = text.replace(odd, plain)
    text = re.sub(r"[ \t\r]+", " ", text)
    text = re.sub(r"\s*\n\s*", "\n", text).strip()
    text = re.sub(r'([.!?])"\.', r'\1"', text)
    text = re.sub(r'(\w),?"\.', r'\1."', text)
    least, most = STORY
    ends = re.search(r'[.!?]"?$', text)
    if not ends or not least <= len(text) <= most or ODD.search(text):
        return None
    return text


def balanced(text):
    """Whether all quotes are closed in the paragraph that opens them."""
    return all(paragraph.count('"') % 2 == 0 for paragraph in text.split("\n"))


@functools.lru_cache(maxsize=256)
def sentence_ends(text):
    """Where the sentences of a balanced text end; a quote belongs to its speaker's sentence."""
    ends = []
    for match in re.finditer(r'[.!?]+"?(?=\s|$)', text):
        end = match.end()
        paragraph = text[:end].rsplit("\n", 1)[-1]
        if paragraph.count('"') % 2 or re.search(r"\b(Mr|Mrs|Ms|Dr)\.$", paragraph):
            continue
        speaker = rf" (\w+ ){{1,3}}({SAID})\b" if match.group().endswith('"') else " [a-z]"
        if not re.match(speaker, text[end:]) and not re.match(" [a-z]", text[end:]):
            ends.append(end)
    return ends


def excerpt(text, rng, least, most):
    """The whole text if it is short, or whole sentences of it from a paragraph's start, or None."""
    if len(text) <= most:
        return text
    found, ends = [], sentence_ends(text)
    opening = r"^(?!(He|She|They|It|But|So|Then|And|His|Her|Their)\b)[A-Z]"
    for match in re.finditer(opening, text, re.M):
        start = match.start()
        fit = [end for end in ends if least <= end - start <= most]
        if fit:
            found.append(text[start:rng.choice(fit[-3:])])
    return rng.choice(found) if found else None


def words_of(text):
    """The words of a text, in small letters."""
    return set(re.findall(r"[a-z]+", text.lower()))


def like(old, new):
    """`new` with the capital that `old` has."""
    return new[0].upper() + new[1:] if old[0].isupper() else new


# ---------------------------------------------------------------- retellings
def to_girl(text):
    """Pronouns of a boy -> a girl's."""
    text = re.sub(r"\b([Hh])is\b(?=\s*[.,!?])", lambda m: like(m[1], "hers"), text)
    text = re.sub(r"\b([Hh])is\b", lambda m: like(m[1], "her"), text)
    words = r"\b(he|him|himself|boy)\b"
    return re.sub(words, lambda m: like(m[0], TO_GIRL[m[0].lower()]), text, flags=re.I)


def to_boy(text):
    """Pronouns of a girl -> a boy's, or None where "her" could be either."""
    unsure = []

    def his(match):
        before, her, after = match.groups()
        if not after or after.lower() in AFTER_HIM:
            return before + like(her, "him") + match[0][len(before + her):]
        if before.strip().lower() in MAYBE_HIM:
            unsure.append(match[0])
        return before + like(her, "his") + match[0][len(before + her):]
    text = re.sub(r"((?:\w+ )?)\b([Hh]er)\b(?=(?: (\w+))?)", his, text)
    words = r"\b(she|hers|herself|girl)\b"
    text = re.sub(words, lambda m: like(m[0], TO_BOY[m[0].lower()]), text, flags=re.I)
    return None if unsure else text


def other_gender(text, name):
    """The story's pronouns exchanged, where all of them are surely the named child's; or None."""
    kind, words = GENDER[name], words_of(text)
    someone = PEOPLE[kind] | PEOPLE["both"] | ANIMALS | {plural(word) for word in ANIMALS}
    others = set(re.findall(r"(?<=[a-z,] )[A-Z][a-z]+", text))
    others |= set(re.findall("[A-Z][a-z]+", text)) & set(GENDER)
    if words & someone or any(GENDER.get(other) != OTHER[kind] for other in others - {name}):
        return None
    pronouns = {"boy": {"she", "her"}, "girl": {"he", "him", "his"}}[kind]
    if words & pronouns or not words & {"he", "she"}:
        return None
    return to_girl(text) if kind == "boy" else to_boy(text)


def exchange_name(text, rng):
    """-> (wish's words, the story with another name), or None."""
    capitals = re.findall("[A-Z][a-z]+", text)
    known = [name for name in GENDER if capitals.count(name) > 1
             and not any(other != name and other.startswith(name) for other in capitals)]
    if not known:
        return None
    old = rng.choice(sorted(known))
    kind, told = GENDER[old], text
    who = ""
    changed = other_gender(text, old) if kind in OTHER and rng.random() < 0.9 else None
    if changed:
        kind, told = OTHER[kind], changed
        who = rng.choice(["", f"a {kind} named ", f"a {kind} called "])
    new = rng.choice([name for name in NAMES[kind] if name not in capitals])
    told = re.sub(rf"\b{old}\b", new, told)
    return f"{who}{new} instead of {old}", told


@functools.cache
def plural(word):
    if word in IRREGULAR:
        return IRREGULAR[word]
    if re.search("(ch|sh|s|x)$", word):
        return word + "es"
    return re.sub("[^aeiou]y$", lambda m: m[0][0] + "ie", word) + "s"


def an(word):
    return "an" if word[0] in "aeiou" else "a"


def exchange_word(text, old, new):
    """The text with one word for another, capitals and articles right."""
    def put(match):
        article, word = match[1], match[2]
        return (like(article, an(new)) + " " if article else "") + like(word, new)
    return re.sub(rf"(?:\b(an?) )?(?<![-\w])({old})(?![-\w])", put, text, flags=re.I)


def is_thing(text, word):
    """Whether a word stands for a thing by itself wherever it occurs: "a ball", "the big ball"."""
    many = plural(word)
    for match in re.finditer(rf"(?:([\w'-]+) )?\b({word}|{many})\b-?(?: (\w+))?", text, re.I):
        before, found, after = (part.lower() if part else "" for part in match.groups())
        if after in GROUP or after in COMPOUND:
            return False
        alone = found == many and before not in ("to", "teddy", "she", "he", "it", "they")
        if "-" in match[0] or not (alone or before in DETERMINERS or before in ADJECTIVES):
            return False
    return True


def exchange_thing(text, rng):
    """-> (wish's words, the story with another thing), or None."""
    words = words_of(text)
    known = [w for w in GROUP if (w in words or plural(w) in words) and is_thing(text, w)]
    if ANIMAL_SOUNDS.search(text.lower()):
        known = [w for w in known if w not in ANIMALS]
    if not known:
        return None
    old = rng.choice(known)
    free = [w for w in GROUP[old] if w not in words and plural(w) not in words]
    if not free:
        return None
    new = rng.choice(free)
    told = exchange_word(exchange_word(text, old, new), plural(old), plural(new))
    if old in words:
        return f"{an(new)} {new} instead of the {old}", told
    return f"{plural(new)} instead of the {plural(old)}", told


def exchange_colour(text, rng):
    """-> (wish's words, the story with another colour), or None."""
    words = words_of(text)
    found = re.findall(rf"\b({'|'.join(COLOURS)}) (\w+)", text)
    free = [colour for colour in COLOURS if colour not in words]
    if not found or any(thing in COLOURED for _, thing in found):
        return None
    old, thing = rng.choice(found)
    if thing not in GROUP:
        return None
    new = rng.choice(free)
    return f"{an(new)} {new} {thing} instead of {an(old)} {old} one", exchange_word(text, old, new)


def exchange_both(text, rng):
    """-> (wish's words, the story with another name and another thing), or None."""
    one = exchange_name(text, rng)
    two = exchange_thing(one[1], rng) if one else None
    return (f"{one[0]} and {two[0]}", two[1]) if two else None


def speaker(match, names):
    """The name that was found, "he" or "she", "other" for one who has no name, or None."""
    word = match[1] if match else ""
    if word in names and len(word) > 2 or word in ("he", "she"):
        return word
    if word in ("He", "She"):
        return word.lower()
    somebody = word.lower() in ("the", "his", "her", "their", "my", "its") or word.endswith("'s")
    return "other" if somebody else None


def quotes(text):
    """Who says what: [(the speaker, None where it is not clear, the words)]."""
    found = []
    names = set(re.findall(r"(?<=[a-z] )[A-Z][a-z]+", text)) | FAMILY
    start = r"(?:(?:[A-Z]\w+(?: \w+){0,2}, |Then |So |But |And ))?"
    anybody = r"he|she|they|it|I|who|that|[A-Z]\w+"
    for paragraph in text.split("\n"):
        parts, last = paragraph.split('"'), None
        for i in range(1, len(parts), 2):
            before, words, after = parts[i - 1], parts[i], parts[i + 1]
            lead = re.split(r"[.!?]\s", before)[-1].strip()           # Mia said, "..."
            leads = re.search(rf"\b({SAID}|told)\b.*[,:]$", lead)
            subject = re.match(rf"{start}([\w']+)(?! and\b)", lead)
            changed = re.search(rf"\b({anybody}) (\w+ )?({SAID}|told)\b", lead)
            same_speaker = rf" (?:[\w']+ ){{0,2}}(?:{SAID})(?: [\w']+){{0,2}}\. "
            goes_on = last and re.fullmatch(same_speaker, before)
            tail = after if words[-1:] in (",", "!", "?") else ""     # "..." said Mia
            owner = r"\b(his|her|the|their|my|\w+'s)"
            owned = re.search(rf"{owner} (\w+ )?(?!and\b)\w+ ({SAID}|told)\b", lead, re.I)
            if leads and owned:
                who = "other"
            elif leads and changed and changed[1].lower() != speaker(subject, names):
                who = speaker(subject, names) if subject and subject[1] == changed[1] else None
            elif leads:
                who = speaker(subject, names)
            elif re.match(rf" [\w' ]+ ({SAID})[^.!?]*,$", tail.rstrip()) and words[-1] != ",":
                who = last if goes_on else None                       # that leads to the next words
            elif re.match(rf" ([\w']+ ){{1,3}}({SAID})\b", tail):
                who = speaker(re.match(r" ([\w']+)(?! and\b)", tail), names)
            elif re.match(rf" ({SAID}) ", tail):
                who = speaker(re.match(r" \w+ ([\w']+)\b(?! and)", tail), names)
            elif goes_on:
                who = last
            else:
                who = None
            last = who
            found.append((who, words))
    return found


def only_said(text, rng):
    """-> (who, what that one says, a line for each quote), or None."""
    said = quotes(text)
    who = [name for name, _ in said]
    if None in who or any(not words or words[0].islower() for _, words in said):
        return None
    # Where "he" speaks too, it could be any name that is not a girl's.
    either = {"boy": {"he"}, "girl": {"she"}, "pet": {"he", "she"}}
    known = [name for name in sorted(set(who) - {"other", "he", "she"})
             if len(said) > 1 and not either[GENDER.get(name, "pet")] & set(who)]
    if not known:
        return None
    name = rng.choice(known)
    lines = [re.sub(",$", ".", words) for speaker, words in said if speaker == name]
    return name, "\n".join(f'"{line}"' for line in lines)


def shorter(text, rng):
    """The first two sentences and the last two, or None."""
    ends = sentence_ends(text)
    if len(ends) < 6:
        return None
    return "", f"{text[:ends[1]]} {text[ends[-3]:].strip()}".replace("\n", " ")


# Each form: who makes it, the wishes, the characters of the story.
MAKERS = {
    "names": (exchange_name, AGAIN, EXCERPT),
    "things": (exchange_thing, AGAIN, EXCERPT),
    "both": (exchange_both, AGAIN, EXCERPT),
    "colours": (exchange_colour, AGAIN, EXCERPT),
    "said": (only_said, WISH_SAID, LISTENED),
    "shorter": (shorter, WISH_SHORTER, LISTENED),
}


def retellings(text, seed):
    """Yield (form, document) of a story, a few of each form, always the same for the same seed."""
    rng = random.Random(seed)
    for form, (make, wishes, (least, most)) in MAKERS.items():
        made = set()
        for _ in range(4):
            # Who says what is clear in a part of a story more often than in all of it.
            longest = rng.randint(400, most) if form == "said" else most
            story = excerpt(text, rng, least, longest)
            found = make(story, rng) if story and balanced(story) else None
            if found and found not in made:
                made.add(found)
                document = f"{story}\n\n{rng.choice(wishes).format(found[0])}\n\n{found[1]}"
                if len(document) <= RETOLD:
                    yield form, document
