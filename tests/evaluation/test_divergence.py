"""KL, agreement and perplexity against a direct computation in f64."""

import math

import gemma3.naive as naive
import jax
import numpy as np
import pytest
from gemma3.tiny import TINY, placed
from scipy.special import log_softmax

from equarx_serve.evaluation.divergence import Divergence, compare, compare_all, summarize
from equarx_serve.inference.batching import make_batch
from equarx_serve.inference.mesh import make_mesh

TABLE = naive.tiny_parameters(TINY)["embedder/input_embedding"]
RNG = np.random.default_rng(0)


def direct(a, b, table_b, batch):
    """All figures from full logits, f64."""
    p = log_softmax(a.astype(np.float64) @ TABLE.T.astype(np.float64), axis=-1)
    q = log_softmax(b.astype(np.float64) @ table_b.T.astype(np.float64), axis=-1)
    kl = (np.exp(p) * (p - q)).sum(-1)[batch.valid]
    agrees = (p.argmax(-1) == q.argmax(-1))[batch.valid]
    nll = {"p": [], "q": []}
    for row in range(len(batch.tokens)):
        real = batch.tokens[row][batch.valid[row]]
        for name, logs in (("p", p), ("q", q)):
            picked = logs[row][batch.valid[row]]
            nll[name] += [-picked[t, real[t + 1]] for t in range(len(real) - 1)]
    return kl, agrees, np.array(nll["p"]), np.array(nll["q"])


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("own_table", [False, True])
def test_equals_the_direct_computation(tp, side, own_table):
    mesh = make_mesh(tp)
    prompts = [RNG.integers(3, 64, n).tolist() for n in (9, 40, 1, 33)]
    batch = make_batch(prompts, 64, side=side)
    a = RNG.standard_normal((*batch.tokens.shape, 32)).astype(np.float32)
    b = a + 0.1 * RNG.standard_normal(a.shape).astype(np.float32)
    table_b = TABLE * np.float32(1.05) if own_table else TABLE
    name = "embedder/input_embedding"
    on_mesh = placed(TINY, naive.tiny_parameters(TINY), mesh)[name]
    other = jax.device_put(table_b, on_mesh.sharding) if own_table else None
    both = [jax.numpy.asarray(a), jax.numpy.asarray(b)]
    same, found = compare_all(both[0], both, on_mesh, batch, mesh, other, chunk=16 if side == "left" else 40)
    assert own_table or np.abs(same.kl).max() == 0
    kl, agrees, nll_p, nll_q = direct(a, b, table_b, batch)
    assert found.kl.size == sum(map(len, prompts))
    assert found.nll.size == sum(map(len, prompts)) - len(prompts)
    np.testing.assert_allclose(found.kl, kl, rtol=2e-5, atol=2e-6)
    np.testing.assert_array_equal(found.agrees, agrees)
    np.testing.assert_allclose(found.nll_reference, nll_p, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found.nll, nll_q, rtol=1e-5, atol=1e-5)
    summary = summarize([found, found])
    assert summary.tokens == 2 * found.kl.size
    assert summary.kl == pytest.approx(kl.mean(), rel=1e-3)
    assert summary.perplexity_change == pytest.approx(math.exp(nll_q.mean() - nll_p.mean()) - 1, abs=1e-5)


def test_a_run_compared_with_itself_is_exactly_equal():
    mesh = make_mesh(4)
    batch = make_batch([list(range(3, 20))], 64)
    hidden = jax.numpy.asarray(RNG.standard_normal((1, 32, 32)).astype(np.float32))
    table = placed(TINY, naive.tiny_parameters(TINY), mesh)["embedder/input_embedding"]
    summary = summarize([compare(hidden, hidden, table, batch, mesh)])
    assert (summary.kl, summary.top1, summary.perplexity_change) == (0.0, 1.0, 0.0)


def test_one_token_has_no_perplexity_and_json_says_so():
    summary = Divergence(1, 0.5, 1.0, 0, math.nan, math.nan)
    assert summary.as_dict()["perplexity"] is None
    assert summary.as_dict()["kl"] == 0.5
