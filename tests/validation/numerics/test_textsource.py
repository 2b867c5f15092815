"""The long text: exact lengths, seeded, and each context ends with a question whose answer stands in it."""

from __future__ import annotations

import re

import pytest

from validation.numerics.textsource import tokens_ending_at

CONTEXTS = [1024, 4096, 8192]


def text_of(tokens):
    return "".join(map(chr, tokens[1:]))


def test_lengths_and_alphabet():
    tokens = tokens_ending_at(CONTEXTS, 3, bos=1, vocab_size=128)
    assert len(tokens) == CONTEXTS[-1]
    assert tokens[0] == 1
    assert {t for t in tokens[1:] if not 32 <= t < 127} == {10}


def test_shorter_contexts_are_prefixes():
    assert tokens_ending_at(CONTEXTS[:1], 3, bos=1, vocab_size=128) == tokens_ending_at(CONTEXTS, 3, bos=1, vocab_size=128)[: CONTEXTS[0]]


def test_seeds_differ_and_repeat():
    first = tokens_ending_at(CONTEXTS, 0, bos=1, vocab_size=128)
    assert first == tokens_ending_at(CONTEXTS, 0, bos=1, vocab_size=128)
    assert first != tokens_ending_at(CONTEXTS, 1, bos=1, vocab_size=128)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("context", CONTEXTS)
def test_each_context_ends_with_a_true_answer(seed, context):
    text = text_of(tokens_ending_at(CONTEXTS, seed, bos=1, vocab_size=128))[: context - 1]
    question = re.search(r"User: Prepend (\w{6}) to the (\d)\w\w (\w+) about (\w+)\.\nBot: (\w{6}) ([a-z ]+)\n$", text)
    assert question is not None
    sign, which, form, topic, again, answer = question.groups()
    replies = re.findall(rf"User: Write a {form} about {topic}\.\nBot: ([a-z ]+)\n", text)
    assert sign == again
    assert replies[int(which) - 1] == answer


@pytest.mark.parametrize(("contexts", "vocabulary"), [([], 128), ([4096, 1024], 128), ([10], 128), ([1024], 64)])
def test_bad_requests_are_refused(contexts, vocabulary):
    with pytest.raises(ValueError, match="rising"):
        tokens_ending_at(contexts, 0, bos=1, vocab_size=vocabulary)
