"""An independent FP64 reading of the published equations: NumPy, token by token, from published tensor names. No code of the package.

Different on purpose: the state is S[K, V] updated by literal outer products, MLA expands every key and value (nothing absorbed), experts
are decoded and run one at a time, the convolution is a sum over an explicit history.
"""

from __future__ import annotations

import numpy as np

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
PREFIX = "language_model.model."


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def rms(x, weight, eps):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def situ(g, u, beta, linear_beta):
    return beta * np.tanh(g / beta) * sigmoid(g) * linear_beta * np.tanh(u / linear_beta)


def decode_mxfp4(packed, scale):
    out, half = packed.shape
    values = np.empty((out, 2 * half))
    values[:, 0::2] = E2M1[packed & 15]
    values[:, 1::2] = E2M1[packed >> 4]
    return values * np.repeat(2.0 ** (scale.astype(np.int64) - 127), 32, axis=1)


class NaiveModel:
    """`text` is the config.json text_config; `tensors` maps published names to arrays (float64, packed experts uint8)."""

    def __init__(self, text, tensors):
        self.c, self.lin, self.t = text, text["linear_attn_config"], tensors
        self.history = [{} for _ in range(text["num_hidden_layers"])]
        self.taps = {}

    def w(self, name):
        return self.t[PREFIX + name]

    # ---- sublayers, one token ----
    def kda(self, layer, x):
        p, memory = f"layers.{layer}.self_attn.", self.history[layer]
        heads, dim, width = self.lin["num_heads"], self.lin["head_dim"], self.lin["short_conv_kernel_size"]
        convolved = {}
        for name in "qkv":
            past = memory.setdefault(name, [np.zeros(heads * dim)] * (width - 1))
            past.append(self.w(f"{p}{name}_proj.weight") @ x)
            taps = self.w(f"{p}{name}_conv1d.weight").reshape(heads * dim, width)
            convolved[name] = silu(sum(taps[:, width - 1 - back] * past[-1 - back] for back in range(width)))
        f = self.w(f"{p}f_b_proj.weight") @ (self.w(f"{p}f_a_proj.weight") @ x) + self.w(f"{p}dt_bias")
        beta = sigmoid(self.w(f"{p}b_proj.weight") @ x)
        gate = self.w(f"{p}g_proj.weight") @ x
        a_log = self.w(f"{p}A_log").reshape(-1)
        out = []
        for h in range(heads):
            rows = slice(h * dim, (h + 1) * dim)
            q, k, v = (convolved[name][rows] for name in "qkv")
            q, k = q / np.sqrt(q @ q + 1e-6) / np.sqrt(dim), k / np.sqrt(k @ k + 1e-6)
            state = memory.setdefault(("S", h), np.zeros((dim, dim)))
            state = np.exp(self.lin["gate_lower_bound"] * sigmoid(np.exp(a_log[h]) * f[rows]))[:, None] * state
            state = state + np.outer(beta[h] * k, v - k @ state)
            memory[("S", h)] = state
            out.append(rms(q @ state, self.w(f"{p}o_norm.weight"), 1e-5))
        return self.w(f"{p}o_proj.weight") @ (np.concatenate(out) * sigmoid(gate))

    def mla(self, layer, x):
        p, memory, c, eps = f"layers.{layer}.self_attn.", self.history[layer], self.c, self.c["rms_norm_eps"]
        heads, nope, rope, dv = c["num_attention_heads"], c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
        q = self.w(f"{p}q_b_proj.weight") @ rms(self.w(f"{p}q_a_proj.weight") @ x, self.w(f"{p}q_a_layernorm.weight"), eps)
        compressed = self.w(f"{p}kv_a_proj_with_mqa.weight") @ x
        latent = rms(compressed[: c["kv_lora_rank"]], self.w(f"{p}kv_a_layernorm.weight"), eps)
        expanded = (self.w(f"{p}kv_b_proj.weight") @ latent).reshape(heads, nope + dv)
        keys = np.concatenate([expanded[:, :nope], np.tile(compressed[c["kv_lora_rank"] :], (heads, 1))], axis=1)
        memory.setdefault("K", []).append(keys)
        memory.setdefault("V", []).append(expanded[:, nope:])
        q = q.reshape(heads, nope + rope)
        out = []
        for h in range(heads):
            scores = np.array([q[h] @ key[h] for key in memory["K"]]) / np.sqrt(nope + rope)
            shares = np.exp(scores - scores.max())
            out.append(sum(share * value[h] for share, value in zip(shares / shares.sum(), memory["V"], strict=True)))
        return self.w(f"{p}o_proj.weight") @ (np.concatenate(out) * sigmoid(self.w(f"{p}g_proj.weight") @ x))

    def gated(self, prefix, x):
        g, u = self.w(f"{prefix}gate_proj.weight") @ x, self.w(f"{prefix}up_proj.weight") @ x
        act = situ(g, u, self.c["activation_situ_beta"], self.c["activation_situ_linear_beta"])
        return self.w(f"{prefix}down_proj.weight") @ act

    def moe(self, layer, x):
        p, c = f"layers.{layer}.block_sparse_moe.", self.c
        scores = sigmoid(self.w(f"{p}gate.weight") @ x)
        biased = scores + self.w(f"{p}gate.e_score_correction_bias")
        chosen = sorted(range(len(scores)), key=lambda e: (-biased[e], e))[: c["num_experts_per_token"]]
        z = self.w(f"{p}routed_expert_down_proj.weight") @ x
        total = 0.0
        for expert in chosen:
            w1, w2, w3 = (
                decode_mxfp4(self.w(f"{p}experts.{expert}.{n}.weight_packed"), self.w(f"{p}experts.{expert}.{n}.weight_scale"))
                for n in ("w1", "w2", "w3")
            )
            act = situ(w1 @ z, w3 @ z, c["activation_situ_beta"], c["activation_situ_linear_beta"])
            total = total + c["routed_scaling_factor"] * scores[expert] / scores[chosen].sum() * (w2 @ act)
        normed = rms(total, self.w(f"{p}routed_expert_norm.weight"), c["rms_norm_eps"])
        return self.w(f"{p}routed_expert_up_proj.weight") @ normed + self.gated(f"{p}shared_experts.", x)

    def mixture(self, sources, name):
        weight = self.w(f"{name}_norm.weight") * self.w(f"{name}_proj.weight").reshape(-1)
        logits = np.array([weight @ s / np.sqrt(np.mean(s * s) + self.c["rms_norm_eps"]) for s in sources])
        shares = np.exp(logits - logits.max())
        return sum(share * s for share, s in zip(shares / shares.sum(), sources, strict=True))

    # ---- one token through the model ----
    def token(self, token):
        c, eps = self.c, self.c["rms_norm_eps"]
        prefix, blocks, delta = self.w("embed_tokens.weight")[token], [], None
        for layer in range(c["num_hidden_layers"]):
            name = f"layers.{layer}."
            if delta is not None:
                prefix = prefix + delta
            x = rms(self.mixture([*blocks, prefix], f"{name}self_attention_res"), self.w(f"{name}input_layernorm.weight"), eps)
            attend = self.kda if layer + 1 in self.lin["kda_layers"] else self.mla
            attention = attend(layer, x)
            if layer % c["attn_res_block_size"] == 0:
                blocks.append(prefix)
                prefix = attention
            else:
                prefix = prefix + attention
            x = rms(self.mixture([*blocks, prefix], f"{name}mlp_res"), self.w(f"{name}post_attention_layernorm.weight"), eps)
            delta = self.gated(f"{name}mlp.", x) if layer < c["first_k_dense_replace"] else self.moe(layer, x)
            self.taps[layer] = prefix + delta
        final = rms(self.mixture([*blocks, prefix + delta], "output_attn_res"), self.w("norm.weight"), eps)
        return self.t["language_model.lm_head.weight"] @ final

    def logits(self, tokens):
        """[n, V] after each token."""
        return np.stack([self.token(token) for token in tokens])
