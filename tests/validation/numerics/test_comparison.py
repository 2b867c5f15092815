"""The lane on random weights: identical paths are equal, honest rounding passes, planted faults do not."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch

from kimi_k3_decode.cache import Caches
from kimi_k3_decode.config import NANO
from kimi_k3_decode.weights import KdaWeights, MoeWeights, random_weights
from validation.core.types import Case
from validation.numerics import checks, contexts, measure, probes
from validation.numerics.contexts import FAR, FarCase, FarContexts, NearContexts
from validation.numerics.decode import FORCED, FREE, Compared, compare_paths, decode_window, fork_shared, non_finite_in
from validation.numerics.errors import ratio, root_mean_square, token_errors
from validation.targets.engine import build_oracle, build_stock, find_candidate

LAYERS = 4


@pytest.fixture(scope="module")
def weights():
    """Four layers of nano: dense and MoE, KDA and MLA, one block write in the middle."""
    config = dataclasses.replace(NANO, n_layers=LAYERS, kda_layers=(0, 1, 2), mla_layers=(3,), draft=None)
    return random_weights(config, 0)


def targets_of(weights, build):
    def target(role, make, dtype):
        return SimpleNamespace(
            path=make(weights),
            build=make,
            dtype=dtype,
            weights=weights,
            prefiller=build_stock(weights),
            fingerprint=lambda: f"{role}-{make}",
            settings=SimpleNamespace(seed=0),
        )

    return {
        "candidate": target("candidate", build, torch.bfloat16),
        "oracle": target("oracle", build_oracle, torch.float64),
        "stock": target("stock", build_stock, torch.bfloat16),
    }


def change(weights, kind, **fields):
    """The weights with fields of every sublayer of a kind replaced by a function of the old ones."""

    def replaced(part):
        if not isinstance(part, kind):
            return part
        return dataclasses.replace(part, **{name: make(getattr(part, name)) for name, make in fields.items()})

    layers = tuple(dataclasses.replace(layer, attn=replaced(layer.attn), mlp=replaced(layer.mlp)) for layer in weights.layers)
    return dataclasses.replace(weights, layers=layers)


def taps_shifted(weights):
    shift = {name: lambda taps: taps.roll(1, dims=1) for name in ("q_conv_CW", "k_conv_CW", "v_conv_CW")}
    return build_stock(change(weights, KdaWeights, **shift))


def expert_dropped(weights):
    def zero(packed):
        scales = packed.scales_EOG.clone()
        scales[0] = 0
        return dataclasses.replace(packed, scales_EOG=scales)

    return build_stock(change(weights, MoeWeights, w2=zero))


def values(result):
    return {m.name: m.value for m in result[0]}


def verdict_of(check, case, result):
    """Limits of a case that the measurements break."""
    found = values(result)
    return [limit.measurement for limit in check.limits(case) if not limit.holds(found[limit.measurement])]


CASES = [Case(subject="attention", params={"layer": 1, "shape": "narrow"}), Case(subject="mlp", params={"layer": 2, "shape": "wide"})]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("name", ["stock", "specialized"])
def test_honest_paths_pass_a_sublayer(weights, case, name):
    result = measure.measure_sublayer(case, targets_of(weights, find_candidate(name)))
    assert verdict_of(checks.SublayerCheck(), case, result) == []
    if name == "stock":
        assert values(result)["error_ratio"] == 1.0


@pytest.mark.parametrize(("case", "fault"), list(zip(CASES, [taps_shifted, expert_dropped], strict=True)), ids=["taps", "expert"])
def test_planted_faults_fail_a_sublayer(weights, case, fault):
    result = measure.measure_sublayer(case, targets_of(weights, fault))
    assert "error_ratio" in verdict_of(checks.SublayerCheck(), case, result)


def test_the_scale_of_q_is_seen_before_the_norm(weights):
    """Ten percent more q disappears in the output norm unless v is small; the probe with small v sees it."""

    class LoudQuery:
        def __init__(self, weights):
            self.stock = build_stock(weights)

        def step(self, batch, caches, **options):
            return self.stock.step(batch, caches, observer=self._louder, **options)

        def _louder(self, point, layer, tensor):
            return tensor * 1.1 if point == "kda_o" else None  # o = q S, so the scale of q is the scale of o

    def ratio_of(part):
        case = Case(subject=part, params={"layer": 1, "shape": "narrow"})
        return values(measure.measure_sublayer(case, targets_of(weights, LoudQuery)))["error_ratio"]

    assert ratio_of("attention") < 3
    assert ratio_of("kda_before_norm") > 6


def test_every_kind_of_probe_compares_something(weights):
    """Stock's own error is that of BF16, in each probe: not hidden by the embedding, not blown up."""
    targets = targets_of(weights, build_stock)
    for layer in (0, 2, 3):  # KDA with a dense MLP, KDA with experts, MLA
        for part in probes.parts_of(weights.config, layer):
            case = Case(subject=part, params={"layer": layer, "shape": "wide"})
            found = values(measure.measure_sublayer(case, targets))
            assert 1e-3 < found["stock_error"] < 2e-2, case.id


def test_end_to_end_passes_and_sees_faults(weights):
    check = checks.EndToEndCheck()
    case = Case(subject="model", params={"requests": 8, "q": 8})
    assert verdict_of(check, case, measure.measure_end_to_end(case, targets_of(weights, build_stock))) == []
    assert {"forced_error_ratio", "forced_kl_ratio_low"} <= set(
        verdict_of(check, case, measure.measure_end_to_end(case, targets_of(weights, taps_shifted)))
    )


def test_a_nan_in_one_row_is_a_violation(weights):
    class Poisoned:
        def __init__(self, weights):
            self.stock = build_stock(weights)

        def step(self, batch, caches, **options):
            out = self.stock.step(batch, caches, **options)
            logits = out.logits_BQV.clone()
            logits[0, 0, 5] = math.nan
            return dataclasses.replace(out, logits_BQV=logits)

    check, case = checks.EndToEndCheck(), Case(subject="model", params={"requests": 1, "q": 8})
    broken = verdict_of(check, case, measure.measure_end_to_end(case, targets_of(weights, Poisoned)))
    assert {"non_finite", "forced_error_ratio", "free_error_ratio"} <= set(broken)


def test_every_case_has_the_measurements_its_limits_ask_for(weights, monkeypatch):
    monkeypatch.setattr(checks, "NEAR_TOKENS", (512, 768))
    monkeypatch.setattr(contexts, "WINDOW", (1, 8))
    monkeypatch.setattr(contexts, "SOURCE_TOKENS", 512)
    monkeypatch.setattr(measure, "DECODED_TOKENS", 16)
    monkeypatch.setattr(checks, "FAR_TOKENS", (2048,))
    monkeypatch.setattr(measure, "FAR", {2048: FarCase(length_tokens=2045, pattern=(1, 1, 1, 4), n_requests=2)})
    targets = targets_of(weights, build_stock)
    for check in checks.checks():
        for case in list(check.cases())[:2]:
            if case.subject in ("attention", "mlp") and case.params["layer"] >= LAYERS:
                continue
            result = check.measure(case, targets)
            assert verdict_of(check, case, result) == [], (check.id, case.id)
            assert len({m.name for m in result[0]}) == len(result[0])


# ---- windows ----
def test_a_near_window_does_not_depend_on_what_was_asked_before(weights):
    contexts = (512, 1024, 1536)
    rising = NearContexts(build_stock(weights), 0, contexts)
    first = [_state(rising.window(n)) for n in contexts]
    alone = NearContexts(build_stock(weights), 0, contexts)
    assert torch.equal(_state(alone.window(1536)), first[2])
    assert torch.equal(_state(alone.window(512)), first[0])  # back again
    assert rising.window(1536).positions[-1] == 1535


def _state(window):
    return window.caches["stock"].kda(0).state_SHVK[window.caches["stock"].slots_RQ[0][0]].clone()


def test_windows_start_from_the_same_values_for_every_path(weights):
    window = NearContexts(build_stock(weights), 0, (512,)).window(512)
    request = window.requests[0]
    pages = window.caches["stock"].pages_R[request]
    for layer in range(LAYERS):
        if weights.config.is_kda(layer):
            assert torch.equal(window.caches["oracle"].kda(layer).state_SHVK, window.caches["stock"].kda(layer).state_SHVK.double())
        else:
            assert torch.equal(
                window.caches["oracle"].mla(layer).pages_PTC[pages], window.caches["stock"].mla(layer).pages_PTC[pages].double()
            )


def test_far_caches_have_the_statistics_of_real_ones(weights):
    far = FarContexts(build_stock(weights), 0, pool_pages=256)
    window = far.window(FarCase(length_tokens=40_000, pattern=(1, 4), n_requests=2), 0)
    caches = window.caches["stock"]
    real = far._source.mla(3).pages_PTC[far._source.pages_R[0]].flatten(0, 1).double()
    drawn = caches.mla(3).pages_PTC[65:257].flatten(0, 1).double()
    assert torch.allclose(drawn.mean(0), real.mean(0), atol=0.05 * float(real.std()))
    assert float((torch.cov(drawn.T) - torch.cov(real.T)).norm() / torch.cov(real.T).norm()) < 0.1
    assert caches.lengths_R == [40_000, 40_000]
    assert len(caches.pages_R[0]) == 40_000 // 64 + 2
    assert not set(caches.pages_R[0][-2:]) & set(caches.pages_R[1])
    found = compare_paths(targets_of(weights, build_stock), window.caches, window.requests, window.steps_BQ, (FORCED,))
    assert found[FORCED].stock.rms.shape == (10,)
    assert root_mean_square(found[FORCED].candidate.rms) == root_mean_square(found[FORCED].stock.rms) > 0


def test_far_cases_cover_the_boundary_positions():
    seen = {p: set() for p in FAR}
    for position, far in FAR.items():
        begin = far.length_tokens
        for q in far.pattern:
            seen[position] |= {(begin + t, q) for t in range(q)}
            begin += q
        assert begin <= NANO.max_position_embeddings
    assert {(65535, 1), (65536, 1)} <= seen[65536]
    assert {(131071, 1), (131072, 1)} <= seen[131072]
    assert (262144, 1) in seen[262144]
    assert (1048575, 1) in seen[1048575]


def test_forked_caches_with_shared_pages_are_independent(weights):
    path = build_stock(weights)
    caches = Caches.allocate(weights.config, 1, 64, q_max=1)
    request = caches.acquire()
    path.prefill([list(range(4, 30))], caches, [request])
    caches.pages_R[request] = caches.pages_R[request] * 3
    forked = fork_shared(caches, torch.float64)
    assert forked.pages_R == caches.pages_R
    forked.mla(3).pages_PTC[:] = 0
    assert float(caches.mla(3).pages_PTC[caches.pages_R[request]].abs().sum()) > 0


def test_forced_routing_reaches_every_path(weights, monkeypatch):
    monkeypatch.setattr(contexts, "WINDOW", (1, 8))
    window = NearContexts(build_stock(weights), 0, (512,)).window(512)
    targets = targets_of(weights, find_candidate("specialized"))
    oracle = decode_window(targets["oracle"].path, fork_shared(window.caches["oracle"]), window.requests, window.steps_BQ)
    for role in ("stock", "candidate"):
        trace = decode_window(targets[role].path, fork_shared(window.caches[role]), window.requests, window.steps_BQ, oracle.routings)
        for wanted, got in zip(oracle.routings, trace.routings, strict=True):
            assert all(torch.equal(got[layer], wanted[layer]) for layer in wanted)


def test_non_finite_values_in_caches_are_counted(weights):
    caches = Caches.allocate(weights.config, 1, 64, q_max=1)
    request = caches.acquire()
    build_stock(weights).prefill([[5, 6, 7]], caches, [request])
    assert non_finite_in(caches, [request]) == 0
    caches.kda(1).state_SHVK[caches.slots_RQ[request][0], 0, 0, :3] = math.inf
    caches.mla(3).pages_PTC[caches.pages_R[request][0], 1, 0] = math.nan
    assert non_finite_in(caches, [request]) == 4


def test_free_and_forced_are_both_reported(weights, monkeypatch):
    monkeypatch.setattr(contexts, "WINDOW", (1, 8))
    window = NearContexts(build_stock(weights), 0, (512,)).window(512)
    found = compare_paths(targets_of(weights, build_stock), window.caches, window.requests, window.steps_BQ)
    assert set(found) == {FORCED, FREE}
    assert ratio(root_mean_square(found[FREE].candidate.rms), root_mean_square(found[FREE].stock.rms)) == 1.0


def test_a_few_tokens_far_worse_are_seen_as_outliers():
    """One token in ten a hundred times worse: the typical token does not move, and the share of outliers tells."""
    generator = torch.Generator().manual_seed(3)
    oracle = torch.randn(200, 100, generator=generator, dtype=torch.float64) * 3
    noise = [0.01 * torch.randn(200, 100, generator=generator, dtype=torch.float64) for _ in range(2)]
    factor = torch.ones(200, 1, dtype=torch.float64)
    stock = token_errors(oracle, oracle + noise[0])

    def measured(candidate):
        found = Compared(candidate=token_errors(oracle, candidate), stock=stock, candidate_non_finite_cache=0)
        return {m.name: m.value for m in measure._measurements({FORCED: found})}

    assert measured(oracle + noise[1])["forced_outlier_share"] == 0.0
    factor[::10] = 100.0
    broken = measured(oracle + factor * noise[1])
    assert broken["forced_error_ratio"] < checks.ERROR_RATIO * 1.2
    assert broken["forced_outlier_share"] == pytest.approx(0.1)
    assert checks.OUTLIER_SHARE < 0.1
    assert measured(oracle * math.nan)["forced_outlier_share"] == 1.0
