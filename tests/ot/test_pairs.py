"""Training sets: the forms they come in, and the values that are refused."""

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkit import ot
from jaxkit.ot import _pairs

X, Y, F = contract.normal(2, 4, 2), contract.normal(2, 3, 2), contract.normal(2, 4)
A = jnp.full((2, 4), 0.25)
MASK = jnp.ones((2, 4), bool).at[1, 2].set(False)
STACK = ot.Pair(X, Y, A, f=F)


def test_one_pair_a_stack_and_a_list():
    """All become a list of stacks; a list keeps the size of each of its entries."""
    one = ot.Pair(X[0], Y[0, :2])
    shapes = [[s.x.shape for s in _pairs.stacks(p)] for p in (one, STACK, [one, STACK, one])]
    assert shapes == [[(1, 4, 2)], [(2, 4, 2)], [(1, 4, 2), (2, 4, 2), (1, 4, 2)]]


def test_masked_entries_and_labels_without_weight_may_be_anything():
    """NaN points and labels and any weights pass there; labels without weight only if it counts."""
    bad = STACK._replace(
        x=X.at[1, 2].set(jnp.nan),
        a=jnp.full((2, 4), 0.25).at[1].set(jnp.array([0.5, 0.5, -7.0, 0.0])),
        f=F.at[1, 2].set(jnp.nan).at[1, 3].set(-jnp.inf),
        mask_x=MASK,
    )
    assert len(_pairs.stacks(bad, labels="measure")) == 1
    with pytest.raises(ValueError, match=r"f must be finite where it counts, got -inf in pairs, p"):
        _pairs.stacks(bad, labels="atoms")


@pytest.mark.parametrize(
    ("pairs", "error", "match"),
    [
        ([], ValueError, "pairs must hold at least one Pair, got an empty list"),
        ([STACK, (X, Y)], TypeError, r"pairs\[1\] must be a Pair, got tuple"),
        (STACK._replace(f=None), ValueError, "pairs must hold known potentials f, got None"),
        (jax.tree.map(lambda z: z[:0], STACK), ValueError, "number of pairs in pairs must be at"),
        (STACK._replace(f=F[:1]), ValueError, "pairs must have the same leading axis .*1 at f"),
        (STACK._replace(y=Y[..., :1]), ValueError, r"y must have shape \[m, d\] with d=2"),
        (STACK._replace(a=1.1 * A), ValueError, "a must sum to 1, got 1.1 in pairs, pair 0"),
        ([STACK._replace(b=A[:, :3] / 3)], ValueError, r"b must sum to 1, got 0.25 in pairs\[0\]"),
        (
            STACK._replace(a=A.at[1, 0].set(-0.25).at[1, 1].set(0.75)),
            ValueError,
            "a must not be negative, got -0.25 in pairs, pair 1",
        ),
        (STACK._replace(a=A.at[1, 0].set(jnp.nan)), ValueError, "a must not be negative, got nan"),
        (STACK._replace(y=Y.at[1, 0].set(jnp.inf)), ValueError, "y must be finite, got inf in"),
        (STACK._replace(f=F.at[1, 0].set(jnp.nan)), ValueError, "f must be finite where it counts"),
    ],
)
def test_bad_input_is_named(pairs, error, match):
    """Each message names the field, the value, and where it is."""
    with pytest.raises(error, match=match):
        _pairs.stacks(pairs, labels="measure")


def test_values_are_not_checked_where_they_are_traced():
    """Under jit the shapes are all there is."""

    @jax.jit
    def run(pair, theta):
        _pairs.check_directions(theta)
        _pairs.check_solution([theta[0]], 0.0)
        return _pairs.stacks(pair, labels="measure")[0].x

    run(STACK._replace(a=2 * A), 2 * jnp.eye(2))
    with pytest.raises(ValueError, match="y must have shape"):
        run(STACK._replace(y=Y[..., :1]), jnp.eye(2))


def test_directions_are_unit_vectors():
    """Within 1e-4, or the rounding of sixteen bits."""
    theta = np.array([[1.0, 0.0], [0.6, 0.8]])
    _pairs.check_directions(theta * 1.00005)
    _pairs.check_directions(jnp.asarray(theta, jnp.bfloat16))
    for wrong, norm in ((1.01, "1.01"), (np.nan, "nan")):
        with pytest.raises(ValueError, match=f"theta must have rows of norm 1, .*norm {norm}"):
            _pairs.check_directions(theta * wrong)
    with pytest.raises(ValueError, match="ridge must be larger .* got 0.0"):
        _pairs.check_solution([jnp.array([1.0, jnp.nan])], 0.0)
