"""Gemma 3 written once more, in NumPy f64, one token and one head at a time: the oracle for tiny models.

Shares no code with the package: masks are spelled out as "token j of the same row, real, not later, fewer than
`window` back", on unpadded rows only.
"""

import numpy as np


def tiny_parameters(config, seed=0):
    """Random official leaves (f32) whose activations are neither dead nor saturated."""
    from equarx_serve.gemma3 import leaf_shardings

    rng = np.random.default_rng(seed)
    out = {}
    for name, leaf in leaf_shardings(config, 1).items():
        if name.endswith("scale"):
            values = 0.3 * rng.standard_normal(leaf.shape)
        elif "embedding" in name:
            values = rng.standard_normal(leaf.shape)
        else:
            values = rng.standard_normal(leaf.shape) / np.sqrt(config.embed_dim)
        out[name] = values.astype(np.float32)
    return out


def norm(x, scale, eps):
    return x / np.sqrt(np.mean(x * x) + eps) * (1 + scale)


def rope(x, position, base, scale):
    half = x.size // 2
    out = np.empty_like(x)
    for i in range(half):
        angle = position / scale / base ** (2 * i / x.size)
        out[i] = x[i] * np.cos(angle) - x[half + i] * np.sin(angle)
        out[half + i] = x[half + i] * np.cos(angle) + x[i] * np.sin(angle)
    return out


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def forward(config, params, tokens):
    """Logits [T, V] and per layer (keys [T, K, H], values [T, K, H]) of one unpadded row."""
    c = config
    p = {name: value.astype(np.float64) for name, value in params.items()}
    x = p["embedder/input_embedding"][tokens] * np.sqrt(c.embed_dim)
    group = c.num_heads // c.num_kv_heads
    cache = []
    for layer in range(c.num_layers):
        w = {k.removeprefix(f"layer_{layer}/"): v for k, v in p.items() if k.startswith(f"layer_{layer}/")}
        everywhere = (layer + 1) % 6 == 0
        base, scale = (c.global_rope_base, c.global_rope_scale) if everywhere else (c.local_rope_base, 1.0)
        steps = range(len(tokens))
        y = [norm(x[t], w["pre_attention_norm/scale"], c.norm_eps) for t in steps]
        keys = np.array(
            [
                [
                    rope(
                        norm(y[t] @ w["attn/kv_einsum/w"][0, k], w["attn/_key_norm/scale"], c.norm_eps), t, base, scale
                    )
                    for k in range(c.num_kv_heads)
                ]
                for t in steps
            ]
        )
        values = np.array([[y[t] @ w["attn/kv_einsum/w"][1, k] for k in range(c.num_kv_heads)] for t in steps])
        cache.append((keys, values))
        for t in steps:
            mixed = np.zeros(c.embed_dim)
            for n in range(c.num_heads):
                q = norm(y[t] @ w["attn/q_einsum/w"][n], w["attn/_query_norm/scale"], c.norm_eps)
                q = rope(q, t, base, scale) * c.attention_scale
                seen = [j for j in steps if j <= t and (everywhere or t - j < c.window)]
                scores = np.array([q @ keys[j, n // group] for j in seen])
                weights = np.exp(scores - scores.max())
                weights /= weights.sum()
                mixed += (
                    sum(a * values[j, n // group] for a, j in zip(weights, seen, strict=True))
                    @ w["attn/attn_vec_einsum/w"][n]
                )
            x[t] = x[t] + norm(mixed, w["post_attention_norm/scale"], c.norm_eps)
        for t in steps:
            h = norm(x[t], w["pre_ffw_norm/scale"], c.norm_eps)
            gate, up = w["mlp/gating_einsum"][0] @ h, w["mlp/gating_einsum"][1] @ h
            x[t] = x[t] + norm((gelu(gate) * up) @ w["mlp/linear"], w["post_ffw_norm/scale"], c.norm_eps)
    hidden = np.array([norm(row, p["final_norm/scale"], c.norm_eps) for row in x])
    return hidden @ p["embedder/input_embedding"].T, cache
