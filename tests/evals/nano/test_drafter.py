"""The shipped drafter earns its place: mean accepted length of real speculation on word problems of the shipped test set."""

import json
from pathlib import Path

import torch

from evals.nano.build import DATA
from evals.nano.tokenizer import build_tokenizer
from kimi_k3_decode.cache import Caches
from kimi_k3_decode.config import NANO
from kimi_k3_decode.dspark import DsparkProposer, SpeculativeDecoder, lowest_argmax
from kimi_k3_decode.stock.model import StockPath
from kimi_k3_decode.weights import load_checkpoint

FOLDER = Path(__file__).parents[3] / "kimi_k3_decode" / "checkpoints" / "nano"
ITEMS, MAX_TOKENS, LEAST_LENGTH = 16, 768, 2.5


def prompts() -> list[list[int]]:
    rows = [json.loads(line) for line in (DATA / "gsm8k_nano.jsonl").read_text().splitlines()]
    return [build_tokenizer().encode(row["prompt"]).ids for row in rows[:: len(rows) // ITEMS][:ITEMS]]


def test_mean_accepted_length_on_word_problems() -> None:
    weights, tokens = load_checkpoint(FOLDER), prompts()
    stock, everyone = StockPath(weights), list(range(len(tokens)))
    caches = Caches.allocate(NANO, len(tokens), MAX_TOKENS, q_max=8, dtype=torch.bfloat16)
    proposer = DsparkProposer(weights, len(tokens), MAX_TOKENS)
    with torch.inference_mode():
        out = stock.prefill(tokens, caches, everyone, taps=True)
        for request, taps in zip(everyone, out.taps, strict=True):
            proposer.observe([request], taps.unsqueeze(1), torch.tensor([taps.shape[1]]))
        decoder = SpeculativeDecoder(stock, proposer, caches)
        replies = [[anchor] for anchor in lowest_argmax(out.logits_RV).tolist()]
        while active := [r for r in everyone if NANO.eos_token_id not in replies[r] and len(replies[r]) < 160]:
            advance = decoder.step(active, [replies[r][-1] for r in active])
            for request, gained in zip(active, advance.tokens, strict=True):
                replies[request] += gained
    print(f"mean accepted length {decoder.count.mean_length:.3f} over {decoder.count.verify_steps} verify steps")
    assert decoder.count.verify_steps > 10 * ITEMS
    assert decoder.count.mean_length >= LEAST_LENGTH
