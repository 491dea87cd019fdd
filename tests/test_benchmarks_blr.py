"""The tasks of the blr benchmarks, and what they judge predictions by."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import lm
from benchmarks.blr import bench_text, tasks


@pytest.mark.parametrize("make", [tasks.breast_cancer, tasks.noisy_digits])
def test_splits_share_no_row_and_differ_by_seed(make):
    """Training, validation and test are disjoint, of equal sizes for every seed."""
    one, other = make(1), make(2)
    inputs = [part[0] for part in (one.train, one.validation, one.test)]
    assert sum(map(len, inputs)) == len(np.unique(np.concatenate(inputs), axis=0))
    assert [x.shape for x in inputs] == [
        part[0].shape for part in (other.train, other.validation, other.test)
    ]
    assert not np.array_equal(one.train[0], other.train[0])


def test_labels_are_wrong_in_training_and_validation_only():
    """40 percent of them, to four standard errors; the test has the classes 0 to 7."""
    right = {}
    for seed in range(4):
        data = tasks.noisy_digits(seed)
        clean = {row.tobytes(): label for row, label in _digits()}
        for name in ("train", "validation", "test"):
            x, y = getattr(data, name)
            same = [clean[row.tobytes()] == label for row, label in zip(x, y, strict=True)]
            right.setdefault(name, []).extend(same)
            assert y.min() == 0 and y.max() == 7
    assert all(right["test"])
    for name in ("train", "validation"):
        rate = np.mean(right[name])
        assert abs(rate - 0.6) < 4 * np.sqrt(0.24 / len(right[name]))


def test_no_class_outside_is_trained_on():
    """The rows outside are the 8 and 9, and no other."""
    outside = tasks.noisy_digits(0).outside
    labels = {row.tobytes(): label for row, label in _digits()}
    assert {labels[row.tobytes()] for row in outside} == {8, 9} and len(outside) == 354


def test_area_under_the_curve_is_that_of_scikit_learn():
    """Ties included."""
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(0)
    inside, outside = rng.integers(0, 9, 40) / 8, rng.integers(0, 7, 30) / 8
    want = metrics.roc_auc_score(np.repeat([1, 0], [40, 30]), np.concatenate([inside, outside]))
    got = tasks.auroc(jnp.asarray(inside, "float32"), jnp.asarray(outside, "float32"))
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_calibration_error_of_known_predictions():
    """Confidence 0.9 that is right half of the time is off by 0.4, right ones at 1 by nothing."""
    confidence = jnp.array([0.9, 0.9, 1.0, 1.0])
    right = jnp.array([True, False, True, True])
    error = tasks.calibration_error(confidence, right)
    # 0.9 and 1 lie in bins of their own: half of the rows are off by 0.4.
    np.testing.assert_allclose(error, 0.2, rtol=1e-6)


def test_judge_reads_likelihood_and_accuracy():
    """Two rows by hand."""
    probs = jnp.array([[0.75, 0.25], [0.5, 0.5]])
    found = tasks.judge(jnp.log(probs), jnp.array([0, 1]), jnp.zeros((0, 2)))
    np.testing.assert_allclose(found["nll"], -(np.log(0.75) + np.log(0.5)) / 2, rtol=1e-6)
    assert found["accuracy"] == 0.5 and "AUROC of unseen classes" not in found


# The small language model.

TEXT = bench_text.SIZES["smoke"]
STILL = {"learning_rate": 0.0, "weight_decay": 0.0}


def test_text_for_settings_and_for_the_report_share_no_window():
    """Both halves are of one size and spread over all windows, which lie outside of training."""
    task, known = bench_text._task(TEXT, jnp.float32), lm.Task(TEXT.model)
    windows = known.held_out.reshape(-1, TEXT.model.context + 1)
    for name, first in (("validation", 0), ("test", 1)):
        half = np.concatenate(task.held_out[bench_text.HALVES[name]])
        want = sorted(map(tuple, windows[first::2]))
        assert sorted(map(tuple, half)) == want and len(want) == TEXT.model.held_out // 2
    np.testing.assert_array_equal(task.tokens, known.tokens)


@pytest.mark.slow
@pytest.mark.parametrize("method", [*bench_text.OURS, bench_text.VI])
def test_a_model_that_never_moved_predicts_all_bytes_alike(method, standard_promotion):
    """Its head is zero: the loss is log 256, also of a narrow posterior, but not of a wide one.

    The mean probability of a byte is 1/256 there, and -log is convex.
    """
    settings = [{**STILL, "ess": ess} for ess in (1e12, 1e-8)]
    found = bench_text._race(TEXT, jnp.float32, method, [1, 2], settings)
    for half in ("validation", "test"):
        np.testing.assert_allclose(found[f"{half} at the mean"], [np.log(256)] * 2, rtol=1e-5)
        np.testing.assert_allclose(found[half][0], np.log(256), rtol=1e-4)
        assert found[half][1] > 2 * np.log(256)


def test_the_rival_of_the_text_model_starts_from_the_same_prediction(standard_promotion):
    """AdamW at rate 0 has the loss log 256, and no posterior to predict by."""
    settings = [{**STILL, "b2": 0.9}] * 2
    found = bench_text._race(TEXT, jnp.float32, bench_text.ADAMW, [1, 2], settings)
    assert set(found) == {"validation", "test"}
    np.testing.assert_allclose(found["test"], [np.log(256)] * 2, rtol=1e-5)


@pytest.mark.slow
def test_runs_of_the_text_model_differ_by_their_settings_and_seeds_only(standard_promotion):
    """Runs beside each other are those alone; alpha is one of the settings of one program."""
    settings = {"learning_rate": 0.3, "weight_decay": 1e-3, "ess": 1e-4}
    ask = bench_text._race
    both = ask(TEXT, jnp.float32, "alpha 2", [1, 2], [settings] * 2)
    alone = ask(TEXT, jnp.float32, "alpha 2", [2, 2], [settings] * 2)
    ivon = ask(TEXT, jnp.float32, "alpha 1 (IVON)", [1, 2], [settings] * 2)
    for metric, values in both.items():
        np.testing.assert_allclose(values[1], alone[metric], rtol=1e-4)
        assert len({*values, *ivon[metric]}) == 4
    assert bench_text._program(TEXT, jnp.float32, bench_text.POSTERIOR)._cache_size() == 1


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_the_text_model_computes_in_the_given_dtype(dtype, standard_promotion):
    """With bfloat16 its products are of that type, while parameters and loss are float32."""
    task, key = bench_text._task(TEXT, dtype), jax.random.key(0)
    params, windows = jax.eval_shape(lambda k: (bench_text._start(task, k), task.held_out[0]), key)
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(jnp.float32)}
    program = jax.make_jaxpr(task.loss_fn)(params, windows, key)
    products = [x for x in program.eqns if x.primitive.name == "dot_general"]
    assert {y.aval.dtype for x in products for y in x.invars} == {jnp.dtype(dtype)}
    assert program.out_avals[0].dtype == jnp.float32


def _digits():
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return zip((x / 16).astype(np.float32), y, strict=True)
