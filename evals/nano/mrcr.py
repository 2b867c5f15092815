"""mrcr_nano: a chat transcript asks the same thing several times; repeat the n-th reply after a required random prefix.

Replies are random words, so nothing but the transcript can tell them. The task's idea is that of MRCR (Vodrahalli et al. 2024,
arXiv 2409.12640) as published by OpenAI: a reply without the prefix scores 0, otherwise the SequenceMatcher ratio.
"""

from __future__ import annotations

import random
import string

from evals.nano.difficulty import RecallLevel
from evals.nano.items import Item

FORMS = ("poem", "song", "tale", "note", "joke", "riddle", "letter", "essay")
TOPICS = (
    "owls", "rain", "tea", "ships", "moss", "clocks", "bees", "snow", "trains", "salt", "kites", "foxes",
    "lamps", "rivers", "bread", "stars", "gloves", "chess", "drums", "whales", "maps", "roses", "sand", "wolves",
)  # fmt: skip
ORDINALS = ("1st", "2nd", "3rd", "4th", "5th", "6th", "7th", "8th")
CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"
PREFIX_CHARS, PREFIX_LENGTH, WORDS = string.ascii_letters + string.digits, 6, 4


def _reply(rng: random.Random) -> str:
    return " ".join("".join(rng.choice(CONSONANTS) + rng.choice(VOWELS) for _ in range(rng.randint(2, 3))) for _ in range(WORDS))


def make(rng: random.Random, level: RecallLevel) -> Item:
    """One transcript of at most `level.tokens` characters, close to it; `fields` follow the published set's column names."""
    form, topic = rng.choice(FORMS), rng.choice(TOPICS)
    wanted = rng.randrange(level.needles)
    prefix = "".join(rng.choice(PREFIX_CHARS) for _ in range(PREFIX_LENGTH))
    final = f"User: Prepend {prefix} to the {ORDINALS[wanted]} {form} about {topic}.\nBot:"
    needles = [_reply(rng) for _ in range(level.needles)]
    turns = [f"User: Write a {form} about {topic}.\nBot: {needle}\n" for needle in needles]
    room = level.tokens - len(final) - sum(map(len, turns))
    others = []
    while True:
        # near misses: half of the other requests share the form or the topic with the needles
        other_form = form if rng.random() < 0.25 else rng.choice(FORMS)
        other_topic = topic if rng.random() < 0.1 else rng.choice(TOPICS)
        if (other_form, other_topic) == (form, topic):
            continue
        turn = f"User: Write a {other_form} about {other_topic}.\nBot: {_reply(rng)}\n"
        room -= len(turn)
        if room < 0:
            break
        others.append(turn)
    places = sorted(rng.sample(range(len(others) + level.needles), level.needles))
    transcript, filler, needle = [], iter(others), iter(turns)
    for index in range(len(others) + level.needles):
        transcript.append(next(needle) if index in places else next(filler))
    reply = f"{prefix} {needles[wanted]}"
    return Item(
        suite="mrcr_nano",
        level=level.name,
        prompt="".join(transcript) + final,
        answer=f" {reply}",
        key="|".join(needles),
        fields={"target": reply, "random_string_to_prepend": prefix, "n_needles": level.needles, "desired_msg_index": wanted},
    )
