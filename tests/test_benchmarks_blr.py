"""The tasks of the blr benchmarks, and what they judge predictions by."""

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.blr import tasks


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


def _digits():
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return zip((x / 16).astype(np.float32), y, strict=True)
