"""A Gemma 3 GGUF of 300 kB, made with the library's own writer, and its official tree by other means."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

LAYERS, D, FF, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 2, 64, 96, 4, 2, 32, 300
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>"]
WORDS = ["▁", "a", "b", "▁a", "ab", "▁ab", "\n", "  ", "   "]

Tree = dict[str, np.ndarray]
MakeGguf = Callable[..., Path]


def official_tree(seed: int = 0) -> Tree:
    """Random leaves with official names and shapes (float32, every value exact in float16)."""
    rng = np.random.default_rng(seed)

    def leaf(*shape: int) -> np.ndarray:
        return rng.integers(-100, 100, shape).astype(np.float32) / np.float32(64)

    tree = {"embedder/input_embedding": leaf(VOCAB, D), "final_norm/scale": leaf(D)}
    for layer in range(LAYERS):
        at = f"layer_{layer}/"
        tree |= {
            at + "attn/q_einsum/w": leaf(HEADS, D, HEAD_DIM),
            at + "attn/kv_einsum/w": leaf(2, KV_HEADS, D, HEAD_DIM),
            at + "attn/attn_vec_einsum/w": leaf(HEADS, HEAD_DIM, D),
            at + "attn/_query_norm/scale": leaf(HEAD_DIM),
            at + "attn/_key_norm/scale": leaf(HEAD_DIM),
            at + "mlp/gating_einsum": leaf(2, FF, D),
            at + "mlp/linear": leaf(FF, D),
        }
        for norm in ("pre_attention", "post_attention", "pre_ffw", "post_ffw"):
            tree[at + f"{norm}_norm/scale"] = leaf(D)
    return tree


def gguf_tensors(tree: Tree) -> Tree:
    """The same values as llama.cpp's converter lays them out: every matrix [out, in], norms one more."""
    one = np.float32(1)

    def makes_heads(w: np.ndarray) -> np.ndarray:  # [N, D, H]: row n*H + h holds w[n, :, h]
        return np.stack([w[n, :, h] for n in range(w.shape[0]) for h in range(w.shape[2])])

    def takes_heads(w: np.ndarray) -> np.ndarray:  # [N, H, D]: column n*H + h holds w[n, h, :]
        return np.stack([w[n, h] for n in range(w.shape[0]) for h in range(w.shape[1])], axis=1)

    out = {"token_embd.weight": tree["embedder/input_embedding"], "output_norm.weight": tree["final_norm/scale"] + one}
    for layer in range(LAYERS):
        at, to = f"layer_{layer}/", f"blk.{layer}."
        kv, gating = tree[at + "attn/kv_einsum/w"], tree[at + "mlp/gating_einsum"]
        out |= {
            to + "attn_q.weight": makes_heads(tree[at + "attn/q_einsum/w"]),
            to + "attn_k.weight": makes_heads(kv[0]),
            to + "attn_v.weight": makes_heads(kv[1]),
            to + "attn_output.weight": takes_heads(tree[at + "attn/attn_vec_einsum/w"]),
            to + "attn_q_norm.weight": tree[at + "attn/_query_norm/scale"] + one,
            to + "attn_k_norm.weight": tree[at + "attn/_key_norm/scale"] + one,
            to + "ffn_gate.weight": gating[0],
            to + "ffn_up.weight": gating[1],
            to + "ffn_down.weight": np.stack([tree[at + "mlp/linear"][:, d] for d in range(D)]),
            to + "attn_norm.weight": tree[at + "pre_attention_norm/scale"] + one,
            to + "post_attention_norm.weight": tree[at + "post_attention_norm/scale"] + one,
            to + "ffn_norm.weight": tree[at + "pre_ffw_norm/scale"] + one,
            to + "post_ffw_norm.weight": tree[at + "post_ffw_norm/scale"] + one,
        }
    return out


def metadata() -> dict[str, Any]:
    """Key -> value; the writer's method follows from the Python type (int: uint32, float: float32)."""
    pieces = SPECIAL + WORDS + [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += [f"<unused{n}>" for n in range(VOCAB - len(pieces))]
    kinds = [3] * 4 + [1] * 7 + [4] * 2 + [6] * 256
    return {
        "gemma3.block_count": LAYERS,
        "gemma3.context_length": 128,
        "gemma3.embedding_length": D,
        "gemma3.feed_forward_length": FF,
        "gemma3.attention.head_count": HEADS,
        "gemma3.attention.head_count_kv": KV_HEADS,
        "gemma3.attention.key_length": HEAD_DIM,
        "gemma3.attention.value_length": HEAD_DIM,
        "gemma3.attention.sliding_window": 8,
        "gemma3.attention.layer_norm_rms_epsilon": 1e-6,
        "gemma3.rope.freq_base": 1e6,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": [-float(n) for n in range(VOCAB)],
        "tokenizer.ggml.token_type": kinds + [3] * (VOCAB - len(kinds)),
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.padding_token_id": 0,
    }


def write_gguf(path: Path, fields: dict[str, Any], tensors: Tree, arch: str = "gemma3") -> Path:
    """Write with `gguf.GGUFWriter`: 2-D tensors as float16, 1-D ones as float32."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in fields.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_array(key, value)
    for name, values in tensors.items():
        writer.add_tensor(name, values.astype(np.float16) if values.ndim > 1 else values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
