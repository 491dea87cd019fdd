"""Tests of denoise.poisson_sample: exact inclusion, independence, truncation, independent keys."""

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkit import denoise

KEY = jax.random.key(0)


def _sample(key, x):
    return denoise.poisson_sample(key, x, rate=0.3, max_size=8)


test_contract = contract.function(
    contract.Case("poisson_sample", lambda: (_sample, (KEY, contract.normal(16, 3))), draws=True)
)


def draws(num, n, **options):
    """Returns which of ``n`` examples each of ``num`` batches holds, ``[num, n]`` bool."""

    def one(key):
        rows, mask = denoise.poisson_sample(key, jnp.arange(n), **options)
        return jnp.zeros(n, jnp.bool).at[rows].max(mask)

    return np.asarray(jax.jit(jax.vmap(one))(jax.random.split(KEY, num)))


def test_each_example_is_included_independently_with_the_rate():
    """Marginals, pairs and the variance of the size within 4.5 standard errors of the binomial."""
    num, n, rate = 20_000, 12, 0.3
    hits = draws(num, n, rate=rate, max_size=n)
    error = np.sqrt(rate * (1 - rate) / num)
    np.testing.assert_allclose(hits.mean(0), rate, atol=4.5 * error)
    centered = (hits - rate) / np.sqrt(rate * (1 - rate))
    pairs = centered.T @ centered / num
    np.testing.assert_allclose(pairs[~np.eye(n, dtype=bool)], 0, atol=4.5 / np.sqrt(num))
    sizes = hits.sum(1)
    want = n * rate * (1 - rate)
    # The fourth moment of the binomial gives the error of its variance.
    kurtosis = (1 - 6 * rate * (1 - rate)) / want + 3
    np.testing.assert_allclose(sizes.var(), want, atol=4.5 * want * np.sqrt((kurtosis - 1) / num))


@pytest.mark.parametrize("rate", [2.0**-32, 1e-6, 1 / 3, 0.75, 1 - 2.0**-32, 1.0])
def test_the_probability_is_the_rate_to_a_word(rate, monkeypatch):
    """Of all words of 32 bits exactly floor(rate 2^32) draw an example, never more."""
    count = int(np.floor(rate * 2.0**32))
    words = sorted({0, count - 1, min(count, 2**32 - 1), 2**32 - 1})
    monkeypatch.setattr(jax.random, "bits", lambda *args: jnp.array(words, jnp.uint32))
    rows, mask = denoise.poisson_sample(KEY, jnp.arange(len(words)), rate=rate, max_size=len(words))
    drawn = sorted(words[i] for i in rows[mask])
    assert drawn == [w for w in words if w < count]


def test_beyond_the_size_a_random_choice_is_kept():
    """Every example keeps its share E[min(K, 3)] / n, whatever its place; all rows are taken."""
    num, n, rate, size = 20_000, 8, 0.6, 3
    stats = pytest.importorskip("scipy.stats")
    hits = draws(num, n, rate=rate, max_size=size)
    assert hits.sum(1).max() == size
    share = stats.binom(n, rate).expect(lambda k: np.minimum(k, size)) / n
    np.testing.assert_allclose(hits.mean(0), share, atol=4.5 * np.sqrt(share * (1 - share) / num))


def test_the_tail_of_the_binomial_is_how_often_examples_are_lost():
    """The share of full batches that lost one is the formula; scipy's isf inverts it."""
    binom = pytest.importorskip("scipy.stats").binom
    num, n, rate, size = 20_000, 16, 0.25, 6
    all_of_them = draws(num, n, rate=rate, max_size=n).sum(1)
    tail = binom.sf(size, n, rate)
    got = np.mean(all_of_them > size)
    np.testing.assert_allclose(got, tail, atol=4.5 * np.sqrt(tail / num))
    np.testing.assert_array_equal(draws(num, n, rate=rate, max_size=size).sum(1),
                                  np.minimum(all_of_them, size))  # fmt: skip
    smallest = int(binom.isf(1e-9, 1437, 128 / 1437))
    assert binom.sf(smallest, 1437, 128 / 1437) <= 1e-9 < binom.sf(smallest - 1, 1437, 128 / 1437)


def test_drawn_rows_come_first_and_hold_their_examples():
    """The mask is a prefix, rows are distinct, and every leaf is taken at the same rows."""
    examples = {"x": contract.normal(10, 2), "y": jnp.arange(10), "key": jax.random.split(KEY, 10)}
    batch = denoise.poisson_sample(KEY, examples, rate=0.5, max_size=7)
    assert isinstance(batch, denoise.Padded)
    mask, rows = np.asarray(batch.mask), np.asarray(batch.examples["y"])
    assert mask.shape == (7,) and (np.diff(mask.astype(int)) <= 0).all() and 0 < mask.sum() < 7
    assert len(set(rows)) == 7
    np.testing.assert_array_equal(batch.examples["x"], examples["x"][rows])
    assert (batch.examples["key"] == examples["key"][rows]).all()


def test_its_key_is_none_of_the_first_children_of_the_given_one(monkeypatch):
    """A step may give the same key to the estimator, which splits it and folds small numbers in."""
    used, bits = [], jax.random.bits
    monkeypatch.setattr(jax.random, "bits", lambda *args: used.append(args[0]) or bits(*args))
    denoise.poisson_sample(KEY, jnp.arange(4), rate=0.5, max_size=4)
    (own,) = (jax.random.key_data(key) for key in used)
    children = jax.random.key_data(jax.random.split(KEY, 4096))
    folded = jax.vmap(lambda i: jax.random.key_data(jax.random.fold_in(KEY, i)))(jnp.arange(4096))
    for others in (children, folded, jax.random.key_data(KEY)[None]):
        assert not (np.asarray(others) == np.asarray(own)).all(1).any()


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"rate": 0.0}, ValueError, r"rate must be in \[2\*\*-32, 1\], got 0.0"),
        ({"rate": 1.5}, ValueError, r"rate must be in .* got 1.5"),
        ({"rate": float("nan")}, ValueError, r"rate must be in .* got nan"),
        ({"rate": jnp.float32(0.5)}, TypeError, "rate must be a static number"),
        ({"rate": True}, TypeError, "rate must be a static number, got True"),
        ({"max_size": 9}, ValueError, "max_size must be at most the 8 examples, got 9"),
        ({"max_size": 0}, ValueError, "max_size must be at least 1, got 0"),
        ({"max_size": 2.0}, TypeError, "max_size must be a static whole number, got 2.0"),
        ({"examples": {"x": jnp.ones(8), "y": jnp.ones(7)}}, ValueError, "examples must have the"),
        ({"examples": {}}, ValueError, "examples must hold at least one array"),
    ],
)
def test_bad_options_are_named(options, error, match):
    """The message has the argument and its value."""
    options = {"examples": jnp.ones((8, 2)), "rate": 0.5, "max_size": 4, **options}
    with pytest.raises(error, match=match):
        denoise.poisson_sample(KEY, options.pop("examples"), **options)
