"""The parts of the server that need no model: text in pieces, choosing, reading fields."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evals.serving.server.errors import RequestError
from evals.serving.server.model import ServedModel, ServeOptions
from evals.serving.server.protocol import Fields
from evals.serving.server.sampling import Chooser, Sampling
from evals.serving.server.text import TextStream
from validation.core.types import HarnessError

EOS = 2


class Bytes:
    """A token is a byte: characters can be cut in the middle."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    encode_continuation = encode

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")


def pieces(text: str, stop: Sequence[str] = (), *, include: bool = False) -> tuple[list[str], str | None]:
    stream, made = TextStream(Bytes(), stop, include_stop=include), []
    for token in Bytes().encode(text):
        shown, found = stream.push(token)
        made.append(shown)
        if found is not None:
            return made, found
    return [*made, stream.flush()], None


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="abéß€😀\n", max_size=30), st.lists(st.text(alphabet="abé€\n", min_size=1, max_size=4), max_size=3))
def test_pieces_joined_are_the_text_before_the_first_stop_string(text: str, stop: list[str]) -> None:
    made, found = pieces(text, stop)
    # Decided character by character: the first place where a stop string is complete ends the reply.
    cut = next(((end, word) for end in range(len(text) + 1) for word in sorted(stop) if text[:end].endswith(word)), None)
    if cut is None:
        assert (found, "".join(made)) == (None, text)
    else:
        assert found is not None
        assert text[: cut[0]].endswith(found)
        assert "".join(made) == text[: cut[0] - len(found)]
        assert "".join(pieces(text, stop, include=True)[0]) == "".join(made) + found


def test_nothing_that_may_begin_a_stop_string_is_shown() -> None:
    made, found = pieces("say ENDING", ["ENDED"])
    assert found is None
    assert made == ["s", "a", "y", " ", "", "", "", "ENDI", "N", "G", ""]


def test_half_a_character_is_shown_only_at_the_end() -> None:
    stream = TextStream(Bytes())
    assert [stream.push(token)[0] for token in "é".encode()] == ["", "é"]
    assert stream.push(0xC3) == ("", None)
    assert stream.flush() == "�"


def choose(logits: list[float], n_before: int = 0, **asked: object) -> int:
    sampling = Sampling(max_new_tokens=8, **{"temperature": 0.0, **asked})  # type: ignore[arg-type]
    return Chooser(sampling=sampling, eos_token_id=EOS).next(torch.tensor(logits), n_before)


def test_choosing() -> None:
    logits = [0.0, 3.0, 5.0, 4.0]
    assert choose(logits) == 2
    assert choose(logits, allowed=(0, 3)) == 3
    assert choose(logits, min_tokens=1) == 3  # the end of sequence is not allowed yet
    assert choose(logits, n_before=1, min_tokens=1) == 2
    assert choose(logits, min_tokens=1, ignore_eos=True) == 2
    with pytest.raises(ValueError, match="allowed"):
        choose(logits, min_tokens=1, allowed=(EOS,))
    assert choose(logits, force=(0, 1)) == 0
    assert choose(logits, n_before=1, force=(0, 1), allowed=(3,)) == 1
    assert choose(logits, n_before=2, force=(0, 1)) == 2
    assert {choose(logits, temperature=5.0, seed=seed, top_k=2) for seed in range(40)} == {2, 3}
    assert {choose(logits, temperature=5.0, seed=seed) for seed in range(80)} == {0, 1, 2, 3}
    with pytest.raises(ValueError, match="NaN"):
        choose([float("nan"), 0.0, 0.0, 0.0])


def test_every_problem_of_a_body_is_named_at_once() -> None:
    fields = Fields({"n": 0, "stream": "yes", "user": "me", "min_p": 0.1, "presence_penalty": 0, "typo": 1, "tools": None})
    assert fields.number("n", 1, 1, 8, whole=True) == 1
    assert fields.flag("stream") is False
    with pytest.raises(RequestError) as caught:
        fields.finish()
    words = caught.value.message
    assert all(name in words for name in ("n: got 0", "stream: got 'yes'", "min_p: got 0.1", "typo: got an unknown field"))
    assert not any(name in words for name in ("user", "presence_penalty", "tools"))
    assert caught.value.body()["error"]["param"] == "n"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"drafts": -1, "speculation": "dspark"}, "drafts: got -1, needs 1..7"),
        ({"drafts": 2}, "--spec dspark"),
        ({"max_model_len": 0}, "max-model-len"),
        ({"max_num_seqs": 0}, "max-num-seqs"),
        ({"max_num_seqs": 100_000}, "max-num-seqs"),
        ({"max_logprobs": -5}, "max-logprobs"),
        ({"served_model_name": " "}, "served-model-name"),
    ],
)
def test_options_that_cannot_be_served_are_refused_before_anything_is_loaded(
    tmp_path: Path, options: dict[str, object], words: str
) -> None:
    with pytest.raises(HarnessError, match=re.escape(words)):
        ServedModel(ServeOptions(checkpoint=tmp_path, **options))  # type: ignore[arg-type]
