"""The engine: batch independence, both sides from one prefill, stops, sampling laws, log-probabilities, plans, forcing, errors."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_k3_decode.engine import CANDIDATE, STOCK, Engine
from kimi_k3_decode.sampling import SamplingParams, choose, greedy, probabilities

sys.path.insert(0, str(Path(__file__).parent))
from models import TINY, decode_all, fp64_caches, oracle, prompt, relative


class Letters:
    """Token id <-> one character; 1 is the beginning of sequence, special ids have no text."""

    def encode(self, text):
        return [1, *self.encode_continuation(text)]

    def encode_continuation(self, text):
        return [ord(c) - 60 for c in text]

    def decode(self, ids):
        return "".join(chr(i + 60) for i in ids if i > 3)


@dataclass(frozen=True)
class Decision:
    path: str
    reason: str


class OddRows:
    """A plan that sends odd steps to the candidate."""

    def decide(self, batch):
        return Decision("specialized", "odd rows") if batch.rows % 2 else Decision("stock", "even rows")


class Negated:
    """A candidate that is plainly wrong: negated logits."""

    def __init__(self, path):
        self._path, self.dtype, self.steps = path, path.dtype, 0

    def step(self, batch, caches, *, routing=None, taps=False):
        self.steps += 1
        out = self._path.step(batch, caches, routing=routing, taps=taps)
        out.logits_BQV = -out.logits_BQV
        return out


class Always:
    def decide(self, batch):
        return Decision("specialized", "always")


@pytest.fixture(scope="module")
def path():
    return oracle()


PROMPTS = [prompt(n, n) for n in (1, 40, 7, 64, 3, 65, 20, 2)]


def reference(path, tokens, n):
    """Greedy continuation by plain single-request decoding."""
    caches = fp64_caches()
    logits = path.prefill([tokens], caches, [0]).logits_RV[0]
    out = []
    for _ in range(n):
        out.append(int(logits.argmax()))
        logits = decode_all(path, caches, 0, out[-1:])[0]
    return out


@settings(max_examples=4, deadline=None)
@given(order=st.permutations(range(len(PROMPTS))), max_rows=st.integers(1, 8), chunk=st.sampled_from([16, 2048]))
def test_tokens_do_not_depend_on_batch_mates(order, max_rows, chunk):
    path = oracle()
    for temperature in (0.0, 1.0):
        seeds = tuple(100 + i for i in order)
        params = SamplingParams(max_new_tokens=6, temperature=temperature, top_p=0.95, seeds=seeds, ignore_eos=True)
        engine = Engine(path, max_rows=max_rows, chunk_tokens=chunk)
        found = engine.generate([PROMPTS[i] for i in order], params)
        for i, completion in zip(order, found, strict=True):
            alone = SamplingParams(max_new_tokens=6, temperature=temperature, top_p=0.95, seeds=(100 + i,), ignore_eos=True)
            assert completion.token_ids == Engine(path).generate([PROMPTS[i]], alone)[0].token_ids


def test_greedy_generation_equals_plain_decoding(path):
    found = Engine(path, max_rows=3).generate(PROMPTS[:4], SamplingParams(max_new_tokens=5, ignore_eos=True))
    assert [list(c.token_ids) for c in found] == [reference(path, p, 5) for p in PROMPTS[:4]]
    assert {c.finish_reason for c in found} == {"length"}


def test_a_pair_shares_one_prefill_and_each_side_runs_where_the_plan_says(path):
    prefilled = []

    class Counting(type(path)):
        def prefill(self, tokens, *args, **kwargs):
            prefilled.extend(map(tuple, tokens))
            return super().prefill(tokens, *args, **kwargs)

    stock = Counting(path.weights, path.dtype)
    engine = Engine(stock, path, OddRows(), max_rows=3)
    pair = engine.generate_pair(PROMPTS, SamplingParams(max_new_tokens=6, ignore_eos=True))
    assert sorted(prefilled) == sorted(map(tuple, PROMPTS))
    assert [c.token_ids for c in pair[STOCK]] == [c.token_ids for c in pair[CANDIDATE]]
    assert set(engine.step_counts[STOCK]) == {("stock", "stock side")}
    assert set(engine.step_counts[CANDIDATE]) == {("specialized", "odd rows"), ("stock", "even rows")}
    generated = sum(len(c.token_ids) - 1 for c in pair[CANDIDATE])
    assert sum(engine.row_counts[CANDIDATE].values()) == generated == sum(engine.row_counts[STOCK].values())


def test_a_wrong_candidate_shows_on_its_side_only(path):
    wrong = Negated(path)
    pair = Engine(path, wrong, Always()).generate_pair(PROMPTS[:3], SamplingParams(max_new_tokens=4, ignore_eos=True))
    assert wrong.steps == 3
    assert [list(c.token_ids) for c in pair[STOCK]] == [reference(path, p, 4) for p in PROMPTS[:3]]
    for mine, theirs in zip(pair[CANDIDATE], pair[STOCK], strict=True):
        assert mine.token_ids[0] == theirs.token_ids[0]  # the first token is the shared prefill's
        assert mine.token_ids[1] != theirs.token_ids[1]


def test_many_prompts_pass_through_few_rows_and_pages(path):
    """The pool and the sides stay within their budgets, the side that is ahead waits."""
    prompts = [prompt(1 + 9 * (i % 8), i) for i in range(30)]
    engine = Engine(path, path, OddRows(), max_rows=2, max_cached_tokens=128)
    found = engine.generate_pair(prompts, SamplingParams(max_new_tokens=3, ignore_eos=True))
    wide = Engine(path).generate(prompts, SamplingParams(max_new_tokens=3, ignore_eos=True))
    assert [c.token_ids for c in found[STOCK]] == [c.token_ids for c in wide] == [c.token_ids for c in found[CANDIDATE]]


def test_stop_strings_cut_the_text_at_the_first_of_them(path):
    engine = Engine(path, tokenizer=Letters())
    full = engine.generate(["ABC"], SamplingParams(max_new_tokens=20, ignore_eos=True))[0]
    assert full.finish_reason == "length"
    assert len(full.text) > 6
    stop = full.text[3:5]
    at = full.text.index(stop)
    cut = engine.generate(["ABC"], SamplingParams(max_new_tokens=20, stop=("~~", stop), ignore_eos=True))[0]
    assert (cut.text, cut.finish_reason, cut.extra["stop"]) == (full.text[:at], "stop", stop)
    assert len(cut.token_ids) < len(full.token_ids)
    assert cut.token_ids == full.token_ids[: len(cut.token_ids)]


def test_the_end_of_sequence_token_stops_and_leaves_no_text(path):
    tokens = PROMPTS[1]
    first = reference(path, tokens, 1)[0]
    from dataclasses import replace

    weights = replace(path.weights, config=replace(TINY, eos_token_id=first))
    done = Engine(type(path)(weights, path.dtype), tokenizer=Letters()).generate([tokens], SamplingParams(max_new_tokens=9))[0]
    assert (done.token_ids, done.text, done.finish_reason) == ((first,), "", "stop")


def test_logprobs_are_of_the_raw_distribution(path):
    params = SamplingParams(max_new_tokens=4, temperature=0.7, top_p=0.5, logprobs=3, ignore_eos=True)
    done = Engine(path).generate([PROMPTS[1]], params)[0]
    caches = fp64_caches()
    logits = [path.prefill([PROMPTS[1]], caches, [0]).logits_RV[0], *decode_all(path, caches, 0, list(done.token_ids[:-1]))]
    for token, item, row in zip(done.token_ids, done.logprobs, logits, strict=True):
        wanted = torch.log_softmax(row, -1)
        assert item.logprob == pytest.approx(wanted[token].item(), abs=1e-9)
        assert [i for i, _ in item.top] == wanted.topk(3).indices.tolist()


def test_loglikelihood_is_the_sum_over_the_continuation(path):
    engine = Engine(path, path, Always(), Letters())
    greedy_text = engine.generate(["ABCD"], SamplingParams(max_new_tokens=1, ignore_eos=True))[0].text
    scored = engine.loglikelihood([("ABCD", "EFG"), ("ABCD", greedy_text or "E")], CANDIDATE)
    ids = Letters().encode("ABCDEFG")
    rows = torch.log_softmax(path.prefill([ids], fp64_caches(), [0], all_logits=True).all_logits[0], -1)
    wanted = sum(rows[at - 1, ids[at]].item() for at in (5, 6, 7))
    assert scored[0][0] == pytest.approx(wanted, abs=1e-9)
    if greedy_text:
        assert scored[1][1] is True
    assert sum(engine.step_counts[CANDIDATE].values()) == 2


def test_teacher_forcing_gives_the_distributions_of_a_prefill(path):
    engine = Engine(path, path, OddRows())
    sequences = [prompt(50, 1), prompt(90, 2)]
    traces = engine.teacher_force(sequences, 8)
    for row, tokens in enumerate(sequences):
        wanted = path.prefill([tokens], fp64_caches(), [0], all_logits=True).all_logits[0][-8:]
        for name in (STOCK, CANDIDATE):
            assert relative(traces[name].logits_BWV[row], wanted) < 1e-9
    by_four = engine.teacher_force(sequences, 8, q=4)
    assert relative(by_four[STOCK].logits_BWV, traces[STOCK].logits_BWV) < 1e-9
    forced = engine.teacher_force(sequences, 8, {"a": path, "b": path}, routing_of="b")
    assert torch.equal(forced["a"].logits_BWV, forced["b"].logits_BWV)
    with pytest.raises(ValueError, match=r"sequences \[1\]"):
        engine.teacher_force([prompt(9), prompt(8)], 8)


# ---- choosing tokens ----
def test_greedy_ties_go_to_the_lowest_id():
    assert greedy(torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]])).tolist() == [1, 0]


@settings(max_examples=60)
@given(st.lists(st.floats(-8, 8), min_size=2, max_size=12), st.floats(0.05, 1.0), st.floats(0.2, 3.0))
def test_top_p_keeps_the_smallest_head_that_reaches_it(logits, top_p, temperature):
    row = torch.tensor([logits], dtype=torch.float64)
    law, ids = probabilities(row, temperature, top_p)
    full = torch.softmax(row / temperature, -1)[0, ids[0]]
    kept = int((law > 0).sum())
    assert law.sum().item() == pytest.approx(1.0)
    assert full[: kept - 1].sum() < top_p
    assert full[:kept].sum() >= top_p - 1e-12 or kept == len(logits)
    assert torch.allclose(law[0, :kept], full[:kept] / full[:kept].sum())


def test_sampling_follows_the_law():
    """20,000 seeded draws against the probabilities: chi-square with 3 degrees of freedom, bound at p = 0.001."""
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.15, 0.1]], dtype=torch.float64))
    n = 20_000
    params = SamplingParams(max_new_tokens=1, temperature=1.0)
    generator = params.generator(11)
    counts = Counter(choose(logits, params, [generator])[0] for _ in range(n))
    chi = sum((counts[i] - n * p) ** 2 / (n * p) for i, p in enumerate((0.5, 0.25, 0.15, 0.1)))
    assert chi < 16.27


def test_nan_logits_are_an_error_and_not_a_token():
    with pytest.raises(ValueError, match=r"NaN in rows \[1\]"):
        choose(torch.tensor([[0.0, 1.0], [torch.nan, 1.0]]), SamplingParams(max_new_tokens=1), [])


def test_everything_wrong_with_a_call_is_named_at_once(path):
    params = SamplingParams(max_new_tokens=0, temperature=-1.0, top_p=0.0, stop=("",), seeds=(1,), logprobs=-1)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is checked below
        Engine(path, max_cached_tokens=50).generate([[5] * 60, [], [999]], params, CANDIDATE)
    text = str(caught.value)
    for part in ("max_new_tokens", "temperature", "top_p", "seeds", "empty string", "logprobs", "prompt 0", "prompt 1", "prompt 2",
                 "path: got 'candidate'", "without a tokenizer"):  # fmt: skip
        assert part in text, part
    with pytest.raises(ValueError, match="both or neither"):
        Engine(path, path)
