"""What a tap finds: sites, and the moments of their inputs."""

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from spectral.models import by_path, quick_jit
from zo.tapped import PROBLEMS, normal, plan_of

from jaxkit import zo
from jaxkit.zo import _tap_layout, _tap_run


def contract_case():
    def loss_fn(params, x):
        return jnp.mean(jnp.tanh(x @ params["w"] + params["b"][None]) ** 2)

    return zo.tap(loss_fn), ({"w": normal(6, 3), "b": normal(3)}, normal(8, 6))


test_contract = contract.function(
    contract.Case("tap", contract_case, dtypes=("float32", "float64")),
)


def tapped(name, **options):
    loss_fn, params, *args = PROBLEMS[name]()
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return quick_jit(zo.tap(loss_fn, **options))(params, *args)


def test_moments_are_those_of_the_inputs():
    """The second layer of an MLP sees the hidden units: mean and covariance by NumPy."""
    loss_fn, params, x, y = PROBLEMS["mlp"]()
    found = tapped("mlp")
    np.testing.assert_allclose(found.output, loss_fn(params, x, y), 1e-6)
    p = jax.tree.map(np.asarray, params)
    hidden = np.maximum(np.asarray(x) @ p["first"]["w"] + p["first"]["b"], 0)
    for path, rows in {"first/w": np.asarray(x), "second/w": hidden}.items():
        moments = found.moments[path]
        assert moments.num_rows == 3
        np.testing.assert_allclose(moments.mean, rows.mean(0), 1e-5, 1e-6)
        np.testing.assert_allclose(moments.covariance, np.cov(rows.T, bias=True), 1e-4, 1e-6)
    assert found.sites.uncovered == ("first/b", "second/b")


@pytest.mark.parametrize("name", ["conv_net", "grouped_conv", "nnx_transformer", "tied"])
def test_outputs_have_the_moments_of_the_inputs_times_the_leaf(name):
    """The squared norm of what a site puts out is that of its leaf in the metric of its inputs."""
    plan, params, args = plan_of(name)
    first, squares = plan.kernels(), {}

    def at_site(step, read, y, index):
        del read, index
        kernel = step.site.kernel
        if kernel and kernel.layout == first[kernel.leaf].layout:
            squares[kernel.leaf] = squares.get(kernel.leaf, 0.0) + jnp.sum(y**2)
        return y, {}

    def sums(params):
        squares.clear()
        _tap_run.run(plan, params, args, _tap_run.Visitor(at_site))
        return dict(squares)

    squares_out = quick_jit(sums)(params)
    moments = tapped(name).moments
    for leaf, layout in plan.layouts().items():
        found = moments[plan.paths[leaf]]
        w = _tap_layout.to_matrices(jax.tree.leaves(params)[leaf], layout)
        n = w.shape[1]
        mean, covariance = found.mean.reshape(-1, n), found.covariance.reshape(-1, n, n)
        second = covariance + mean[:, :, None] * mean[:, None, :]
        got = jnp.einsum("sim,sij,sjm->s", w, second, w) * found.num_rows.reshape(-1)
        np.testing.assert_allclose(jnp.sum(got), squares_out[leaf], 1e-4, err_msg=str(leaf))


@pytest.mark.parametrize("axis", [0, 1])
def test_scanned_layers_have_moments_of_their_own(axis):
    """A scan over stacked weights gives the moments that the same layers give one by one."""
    x, weights = normal(5, 4), normal(3, 4, 4)

    def one_by_one(layers, x):
        for w in layers:
            x = jnp.tanh(x @ w)
        return jnp.sum(x)

    def scanned(weights, x):
        step = lambda x, w: (jnp.tanh(x @ w), None)  # noqa: E731
        return jnp.sum(jax.lax.scan(step, x, jnp.moveaxis(weights, axis, 0))[0])

    want = zo.tap(one_by_one)(list(weights), x).moments
    got = zo.tap(scanned)(jnp.moveaxis(weights, 0, axis), x).moments["<root>"]
    assert got.covariance.shape == (3, 4, 4)
    for i in range(3):
        for a, b in zip(got, want[str(i)], strict=True):
            np.testing.assert_allclose(a[i], b, 1e-5, 1e-6)


def test_shared_weights_join_the_rows_of_all_uses():
    """A weight that a scan over time shares has the moments of the rows of all times together."""
    loss_fn, params, x = PROBLEMS["recurrent"]()
    found = tapped("recurrent").moments
    assert set(found) == {"u"}  # w is scaled on its way, so that no input meets it as a whole
    p = jax.tree.map(np.asarray, params)
    h, rows = np.broadcast_to(p["start"], (3, 4)), []
    for t in range(4):
        rows.append(h)
        h = np.tanh(h @ p["u"] + np.asarray(x)[:, t] @ (p["w"] * np.exp(p["scale"])))
    rows = np.concatenate(rows)
    assert found["u"].num_rows == 12
    np.testing.assert_allclose(found["u"].mean, rows.mean(0), 1e-4, 1e-6)
    np.testing.assert_allclose(found["u"].covariance, np.cov(rows.T, bias=True), 1e-4, 1e-6)


def test_covariance_survives_a_large_mean():
    """Inputs around 1000 with spread one: the covariance is right to a percent over two uses."""
    x = normal(400, 3) + 1000

    def loss_fn(w, x):
        return jax.lax.scan(lambda c, x: (c + jnp.sum(x @ w), None), 0.0, x.reshape(2, 200, 3))[0]

    got = zo.tap(loss_fn)(jnp.ones((3, 2)), x).moments["<root>"].covariance
    want = np.cov(np.asarray(x, np.float64).T, bias=True)
    np.testing.assert_allclose(got, want, atol=0.01 * want.max())


def test_sites_print_as_a_table_without_computing():
    """Under ``eval_shape`` a tap still names leaf, primitive, shape, loop and line of each site."""
    loss_fn, params, *args = PROBLEMS["linen_scanned"]()
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        found = jax.eval_shape(zo.tap(loss_fn), params, *args)
    table = str(found.sites).splitlines()
    assert table[0].split() == "leaves primitive output inputs loops source".split()
    (up,) = [line for line in table if line.startswith("block/mlp/up/kernel")]
    assert " ".join(up.split()).startswith(
        "block/mlp/up/kernel dot_general [3, 4, 12] 8 scan(2) models.py:"
    )
    assert table[-1].startswith("uncovered: ")
    assert "pos_embed" in table[-1]
    (site,) = [s for s in found.sites.sites if s.leaves == ("block/mlp/up/kernel",)]
    assert (site.shape, site.num_inputs, site.loops) == ((3, 4, 12), 8, ("scan(2)",))
    # Every projection of the two transformers is covered, and nothing but biases and scales is not.
    names = {path.split("/")[-1] for path in found.sites.uncovered}
    assert names == {"bias", "scale", "embedding", "pos_embed"}
    assert set(by_path(params)) == set(found.moments) | set(found.sites.uncovered)


def test_batch_that_is_closed_over_is_data():
    """Without an array argument what the loss closes over is the batch."""
    x = normal(5, 3)
    found = zo.tap(lambda w: jnp.sum(x @ w))(normal(3, 2))
    np.testing.assert_allclose(found.moments["<root>"].mean, x.mean(0), 1e-5, 1e-6)


def test_strict_names_what_is_not_covered():
    """With ``strict=True`` leaves without a dense or convolution site raise, by their paths."""
    with pytest.raises(ValueError, match="got none of first/b, second/b"):
        tapped("mlp", strict=True)
    found = zo.tap(lambda w, x: x @ w, strict=True)(normal(3, 2), normal(4, 3))
    assert found.sites.uncovered == ()


def test_inputs_inside_cond_and_while_are_refused():
    """The message has the loop, the primitive, the path and the line."""
    with pytest.raises(ValueError, match=r"in cond, got dot_general with u at tapped.py:\d+"):
        tapped("branches")
    loss_fn = lambda w, x: jax.lax.while_loop(lambda x: jnp.sum(x) < 0, lambda x: x @ w, x)  # noqa: E731
    with pytest.raises(ValueError, match=r"in while, got dot_general with <root> at test_tap.py"):
        zo.tap(loss_fn)(normal(3, 3), normal(4, 3))


def test_params_in_a_primitive_of_several_outputs_are_refused():
    """A sort of data and weights together has no single output to put noise on."""
    loss_fn = lambda w, x: jax.lax.sort((x, w))[1]  # noqa: E731
    with pytest.raises(ValueError, match=r"got sort with 2 for <root> at test_tap.py:\d+"):
        zo.tap(loss_fn)(normal(3), normal(3))


def test_wrong_kinds_are_refused():
    """A loss that is no function, and leaves that are no arrays."""
    with pytest.raises(TypeError, match="loss_fn must be a function, got float"):
        zo.tap(1.0)
    with pytest.raises(TypeError, match="args must hold arrays only, got str at 0/name"):
        zo.tap(lambda w, x: w)(1.0, {"name": "x"})
