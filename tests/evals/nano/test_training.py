"""The trained network: it equals the stock path, its recurrence equals the token-by-token form, its quantiser packs exactly."""

import json
import random
from pathlib import Path

import pytest
import torch

from evals.nano import export, gsm8k, kda_train, network, quantise, train_draft
from evals.nano.difficulty import WORD_TRAIN
from evals.nano.examine import _padded
from evals.nano.items import draw
from evals.nano.optimiser import Optimiser, orthogonalise
from evals.nano.tokenizer import build_tokenizer, encode
from kimi_k3_decode import draft_model, mxfp4
from kimi_k3_decode.cache import Caches
from kimi_k3_decode.config import NANO
from kimi_k3_decode.stock.model import StockPath
from kimi_k3_decode.weights import load_checkpoint

FOLDER = Path(__file__).parents[3] / "kimi_k3_decode" / "checkpoints" / "nano"


def trained() -> tuple[network.Parameters, torch.Tensor, network.Parameters]:
    from safetensors.torch import load_file

    return export.trained_parameters(load_file(str(FOLDER / "model.safetensors")), NANO)


def stock_prefill(text_ids: list[int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    weights = load_checkpoint(FOLDER)
    path = StockPath(weights if dtype == torch.bfloat16 else weights.to(dtype), dtype)
    caches = Caches.allocate(NANO, 1, len(text_ids) + 8, 1, dtype)
    out = path.prefill([text_ids], caches, [0], all_logits=True, taps=True)
    assert out.all_logits is not None
    assert out.taps is not None
    return out.all_logits[0], out.taps[0]


def test_trained_forward_equals_stock_prefill_in_float64() -> None:
    params, biases, _ = trained()
    item = draw(gsm8k.make, random.Random(8), WORD_TRAIN[-1], test=True)
    ids = build_tokenizer().encode(item.prompt + item.answer).ids
    weights = network.prepare(params, torch.float64)
    with torch.no_grad():
        hidden, taps, _ = network.forward(weights, biases.double(), torch.tensor([ids]), NANO, taps=NANO.draft.target_layer_ids)
        ours = network.logits_of(hidden, weights)
    theirs, their_taps = stock_prefill(ids, torch.float64)
    assert ours.shape == theirs.shape
    assert float((ours - theirs).abs().max() / theirs.abs().max()) < 1e-9
    for tap, their_tap in zip(taps, their_taps, strict=True):
        assert float((tap[0] - their_tap).abs().max() / their_tap.abs().max()) < 1e-9


def test_export_is_the_inverse_of_import() -> None:
    from safetensors.torch import load_file

    stored = load_file(str(FOLDER / "model.safetensors"))
    params, biases, draft = export.trained_parameters(stored, NANO)
    again = export.checkpoint_tensors(params, biases, draft, NANO)
    assert again.keys() == stored.keys()
    different = [name for name in stored if not torch.equal(stored[name], again[name])]
    assert not different


def test_export_refuses_values_outside_mxfp4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantise, "straight_through", lambda x: x)
    params = network.initial_parameters(NANO, 0)
    with pytest.raises(ValueError, match="outside MXFP4"):
        export.checkpoint_tensors(params, torch.zeros(7, 24), {}, NANO)


def test_chunked_recurrence_equals_token_by_token() -> None:
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    batch, tokens, heads, width = 2, 41, 2, 16
    q, k = kda_train.l2_normalise(normal(batch, tokens, heads, width)), kda_train.l2_normalise(normal(batch, tokens, heads, width))
    v, beta = normal(batch, tokens, heads, width), torch.sigmoid(normal(batch, tokens, heads))
    g = -5 * torch.sigmoid(3 * normal(batch, tokens, heads, width))
    state, outputs = torch.zeros(batch, heads, width, width, dtype=torch.float64), []
    for t in range(tokens):
        state = g[:, t].exp().unsqueeze(-1) * state
        update = beta[:, t].unsqueeze(-1) * (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state))
        state = state + k[:, t].unsqueeze(-1) * update.unsqueeze(-2)
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    expected = torch.stack(outputs, dim=1)
    assert float((kda_train.chunked(q, k, v, g, beta) - expected).abs().max()) < 1e-12
    assert float((kda_train.chunked(q, k, v, g * 0.9, beta) - expected).abs().max()) > 1e-3


def test_quantiser_agrees_with_the_shipped_format() -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(64, 96, generator=generator) * torch.exp2(torch.randint(-6, 6, (64, 1), generator=generator).float())
    y = quantise.quantise(x)
    assert torch.equal(quantise.quantise(y), y)
    codes, scales = mxfp4.pack(y)
    assert torch.equal(mxfp4.unpack(codes, scales, torch.float32), y)
    grouped, rounded = x.unflatten(-1, (-1, 32)), y.unflatten(-1, (-1, 32))
    share = (grouped - rounded).abs().amax(-1) / grouped.abs().amax(-1)
    assert float(share.max()) <= 1 / 5 + 1e-6  # the widest step is 2, between 4 and 6: an error of 1 needs a magnitude of 5
    x.requires_grad_()
    quantise.straight_through(x).pow(2).sum().backward()
    assert torch.equal(x.grad, 2 * y)


def test_muon_pushes_singular_values_together() -> None:
    x = torch.randn(3, 48, 32, generator=torch.Generator().manual_seed(3))
    values = torch.linalg.svdvals(orthogonalise(x).float())
    assert float(values.max()) < 1.3
    assert float(values.min()) > 0.5
    assert float(torch.linalg.svdvals(x).max() / torch.linalg.svdvals(x).min()) > 5


def test_optimiser_lowers_a_loss_and_clears_gradients() -> None:
    generator = torch.Generator().manual_seed(4)
    params = {"a_proj.weight": torch.randn(16, 16, generator=generator).requires_grad_(), "norm": torch.ones(16, requires_grad=True)}
    x, y = torch.randn(64, 16, generator=generator), torch.randn(64, 16, generator=generator)
    optimiser, losses = Optimiser(params, 0.02, 0.05), []
    for _ in range(30):
        loss = ((x * params["norm"]) @ params["a_proj.weight"].T - y).pow(2).mean()
        loss.backward()
        optimiser.step(1.0)
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.6 * losses[0]
    assert all(p.grad is None for p in params.values())


def test_training_blocks_equal_the_serving_draft_step() -> None:
    params, biases, draft_params = trained()
    draft = draft_model.draft_from_tensors({name: value.double() for name, value in draft_params.items()}, NANO)
    weights = network.prepare(params, torch.float64)
    item = draw(gsm8k.make, random.Random(9), WORD_TRAIN[0], test=True)
    ids = torch.from_numpy(_padded([item], 1)[0])
    anchors = torch.tensor([[len(item.prompt) + 2, len(item.prompt) + 5, len(item.prompt) + 9]])
    with torch.no_grad():
        _, taps, _ = network.forward(weights, biases.double(), ids, NANO, taps=NANO.draft.target_layer_ids)
        embed, head = weights["embed_tokens.weight"], weights["lm_head.weight"]
        together = train_draft.block_logits(draft, NANO, embed, head, torch.stack(taps), ids, anchors)[0]
        positions = torch.arange(ids.shape[1]).unsqueeze(0)
        context = draft_model.context_latents(draft, NANO, torch.stack(taps), positions)
        for index, anchor in enumerate(anchors[0].tolist()):
            alone = draft_model.draft_step(draft, NANO, embed, head, context, torch.tensor([anchor]), ids[0, anchor].view(1))
            assert float((alone[0].float() - together[index]).abs().max()) < 1e-4
        shifted = draft_model.draft_step(draft, NANO, embed, head, context, anchors[0, :1] - 1, ids[0, anchors[0, 0]].view(1))
    assert float((shifted[0].float() - together[0]).abs().max()) > 1e-2


def test_draft_cache_appends_what_one_pass_would_give() -> None:
    params, biases, draft_params = trained()
    draft = draft_model.draft_from_tensors(draft_params, NANO)
    weights = network.prepare(params, torch.float32)
    ids = torch.from_numpy(encode("Question: Tom has 5 apples.").astype("int64")).unsqueeze(0)
    with torch.no_grad():
        _, taps, _ = network.forward(weights, biases, ids, NANO, taps=NANO.draft.target_layer_ids)
        whole = torch.stack(taps)
        tokens = ids.shape[1]
        expected = draft_model.context_latents(draft, NANO, whole, torch.arange(tokens).unsqueeze(0))
        cache = draft_model.DraftCache.allocate(NANO, 2, tokens, torch.float32)
        row = torch.tensor([1])
        cache.append(draft, NANO, whole[:, :, :10], torch.tensor([10]), row)
        cache.append(draft, NANO, whole[:, :, 10:], torch.tensor([tokens - 10]), row)
        assert torch.allclose(cache.context_LBTC[:, 1], expected[:, 0], atol=1e-5)
        assert not cache.context_LBTC[:, 0].any()
        with pytest.raises(ValueError, match="allocate more"):
            cache.append(draft, NANO, whole[:, :, :1], torch.tensor([1]), row)


def test_draft_weights_survive_the_checkpoint_names_and_missing_ones_are_named() -> None:
    _, _, tensors = trained()
    weights = draft_model.draft_from_tensors(tensors, NANO)
    assert draft_model.draft_to_tensors(weights).keys() == tensors.keys() == draft_model.draft_shapes(NANO).keys()
    broken = {**tensors, "draft.norm.weight": torch.ones(3)}
    del broken["draft.fc.weight"]
    with pytest.raises(ValueError, match=r"draft\.fc\.weight") as caught:
        draft_model.draft_from_tensors(broken, NANO)
    assert "draft.norm.weight" in str(caught.value)


def test_tokenizer_equals_the_fast_encoder_and_the_shipped_file() -> None:
    from tokenizers import Tokenizer

    tokenizer, shipped = build_tokenizer(), Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    text = "User: Tom's 3 pens (B) \\boxed{7} a>b, 5*2=10?\nBot: xK3é~"
    ids = tokenizer.encode(text).ids
    assert shipped.encode(text).ids == ids == [NANO.bos_token_id, *encode(text).tolist()]
    assert tokenizer.decode(ids) == text.replace("é", "")
    assert tokenizer.get_vocab_size() == shipped.get_vocab_size() == NANO.vocab_size


def test_shipped_files_are_small_and_the_recorded_ones() -> None:
    import hashlib

    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 12_000_000
    record = json.loads((Path(__file__).parents[3] / "evals" / "nano" / "record" / "result.json").read_text())
    assert record["sha256"] == hashlib.sha256((FOLDER / "model.safetensors").read_bytes()).hexdigest()
