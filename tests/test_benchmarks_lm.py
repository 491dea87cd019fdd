"""The trainer of language models: what its flags do, alone and together."""

import functools
import math
import pathlib
import shutil

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from benchmarks import lm, text
from benchmarks.lm import train as trainer
from jaxkit import blr, denoise, train, zo

SMALL = "--batch 16 --context 8 --width 16 --layers 1 --heads 2 --steps 10 --log 5".split()
UNIFORM = math.log(256)  # the loss at the start, where the head is zero
EIGHT = "data=2,fsdp=2,model=2"
ADAMW = "--optimizer adamw --lr 0.02 --seed 3"


@pytest.fixture(autouse=True, scope="module")
def promotion():
    """Models and optimizers of others need JAX's own promotion."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@functools.cache
def run(flags):
    """Returns the last state and the history of a small run."""
    return trainer.main([*SMALL, *flags.split()])


@pytest.fixture(scope="module")
def on_eight(promotion, tmp_path_factory):
    """Returns the flags of a run on eight devices with checkpoints, its last state and history."""
    folder = tmp_path_factory.mktemp("checkpoints")
    flags = f"{ADAMW} --mesh {EIGHT} --every 5 --checkpoint {folder}"
    return flags, *run(flags)


def losses(history):
    return [record[name] for record in history for name in ("loss", "held_out_loss")]


def error_of(flags, capsys):
    """Returns what is printed when the flags end the program."""
    with pytest.raises(SystemExit) as stop:
        trainer.main([*SMALL, *flags.split()])
    assert stop.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_losses_on_eight_devices_are_those_of_a_plain_loop(on_eight):
    """Without a mesh, an estimator or a loop of ours, optax finds the same losses."""
    tokens, held_out = text.split(text.help_topics()[0], 8)
    held_out = held_out[:: len(held_out) // 128][:128]
    model = lm.Decoder(256, 16, 64, 1, 2)

    @jax.jit
    def loss_fn(params, windows):
        log_probs = nn.log_softmax(model.apply(params, windows[:, :-1]))
        return -jnp.mean(jnp.take_along_axis(log_probs, windows[:, 1:, None], axis=-1))

    rates = [0.02] * 7 + [0.015, 0.01, 0.005]  # the last 40 percent of the steps fall to zero
    tx = optax.inject_hyperparams(optax.adamw)(0.02)

    @jax.jit
    def step(params, state, windows, rate):
        value, grads = jax.value_and_grad(loss_fn)(params, windows)
        state = state._replace(hyperparams={**state.hyperparams, "learning_rate": rate})
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    params = jax.jit(model.init)(jax.random.key(3), held_out[:1, :-1])
    state, found = tx.init(params), []
    for index, rate in enumerate(rates):
        starts = np.random.default_rng((3, index)).integers(len(tokens) - 8, size=(16, 1))
        params, state, value = step(params, state, tokens[starts + np.arange(9)], rate)
        if index in (4, 9):
            found += [value, loss_fn(params, held_out)]
    _, _, history = on_eight
    assert [record["step"] for record in history] == [5, 10]
    np.testing.assert_allclose(losses(history), found, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [f"--mesh {EIGHT}", "--mesh data=4 --accumulate 2", ""])
@pytest.mark.parametrize("optimizer", ["--optimizer symmetry_compatible", ADAMW])
def test_losses_are_those_on_one_device(flags, optimizer):
    """However the batch and the matrices are split, and on all devices if no flag says how."""
    state, history = run(f"{optimizer} {flags}")
    assert len(state.step.sharding.device_set) == (4 if "data=4" in flags else 8)
    _, wanted = run(f"{optimizer} --mesh data=1")
    np.testing.assert_allclose(losses(history), losses(wanted), rtol=1e-5)


def test_parameters_and_state_stay_where_the_mesh_puts_them(on_eight):
    """Columns lie on model and rows on fsdp, in what follows the reverse; vectors are whole."""
    _, state, _ = on_eight
    wanted = dict.fromkeys(("out", "down", "embed"), P("model", "fsdp"))
    for name in ("query", "key", "value", "gate", "up", "head", "position"):
        wanted[name] = P("fsdp", "model")
    moments = [value for _, value in optax.tree.get_all_with_path(state.opt_state, "mu")]
    for tree in (state.params, *moments):
        for path, x in jax.tree_util.tree_leaves_with_path(tree):
            spec = next((wanted[part.key] for part in path if part.key in wanted), P())
            assert x.sharding.spec == spec, jax.tree_util.keystr(path)
    assert len(moments) == 1


def test_side_that_an_axis_does_not_divide_stays_whole():
    """Three devices share none of 16 rows, but 24 columns."""
    mesh = jax.make_mesh((3,), ("model",), (AxisType.Auto,), devices=jax.devices()[:3])
    shapes = {"up": jnp.zeros((16, 24)), "down": jnp.zeros((16, 24))}
    found = trainer.shardings(shapes, mesh)
    assert (found["up"].spec, found["down"].spec) == (P(None, "model"), P(None, None))


@pytest.mark.parametrize(
    "flags",
    [
        "--estimator zo --samples 4",
        "--estimator blr --optimizer gblr --denoise 3 --accumulate 2",
        "--dtype bf16",
        *(
            pytest.param(flags, marks=pytest.mark.slow)
            for flags in (
                "--denoise 2 --gain 0.3 --accumulate 2",
                "--optimizer muon --denoise auto --accumulate 2",
                "--optimizer adamw --denoise 1",
                "--optimizer lion",
                "--optimizer normuon",
                "--optimizer hybrid",
                "--estimator blr --samples 2 --optimizer gblr",
                "--dtype bf16 --estimator zo --denoise 2 --gain 0.5",
                "--dtype bf16 --estimator blr --optimizer gblr",
            )
        ),
    ],
)
def test_every_combination_learns(flags):
    """The held-out loss falls, and all that is kept is float32, on data and model axes."""
    state, history = run(f"{flags} --mesh data=4,model=2")
    found = [record["held_out_loss"] for record in history]
    assert found[1] < found[0] < UNIFORM
    kept = [x.dtype for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.inexact)]
    assert set(kept) == {jnp.dtype("float32")}


def test_bf16_computes_in_bf16():
    """All products take it and so do the logits; the loss is float32, near that of float32."""
    model, exact = (lm.Decoder(256, 16, 64, 1, 2, dtype) for dtype in (jnp.bfloat16, None))
    windows = jnp.asarray(text.help_topics()[0][:144]).reshape(16, 9)
    shapes = jax.eval_shape(exact.init, jax.random.key(0), windows[:, :-1])
    draw = np.random.default_rng(0).standard_normal
    params = jax.tree.map(lambda x: 0.3 * draw(x.shape, np.float32), shapes)
    lowered = jax.jit(model.apply).lower(params, windows[:, :-1])
    assert lowered.out_info.dtype == jnp.bfloat16
    lines = lowered.as_text().splitlines()
    taken = [x.rsplit(" : ", 1)[1].split("->")[0] for x in lines if "stablehlo.dot_general" in x]
    assert len(taken) == 10 and all(x.count("xbf16>") == 2 for x in taken)
    rounded, value = (
        jax.jit(lm.loss, static_argnums=0)(x, params, windows) for x in (model, exact)
    )
    assert rounded.dtype == value.dtype == jnp.float32
    assert 0 < abs(rounded - value) < 0.02 * value


def test_resumed_run_ends_with_the_same_bits(on_eight):
    """A run that lost its last checkpoint goes on from the one before, each leaf at its place."""
    flags, whole, history = on_eight
    folder = pathlib.Path(flags.split()[-1])
    shutil.rmtree(folder / "10")
    resumed, again = trainer.main([*SMALL, *flags.split()])
    assert losses(history) == losses(again)
    for x, y in zip(jax.tree.leaves(whole.params), jax.tree.leaves(resumed.params), strict=True):
        assert np.array_equal(x, y) and x.sharding == y.sharding
    assert sorted(path.name for path in folder.iterdir()) == ["10", "5", "history.jsonl"]


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ("", "backprop()"),
        ("--accumulate 2", "accumulate(backprop(), 2)"),
        ("--estimator zo", "zo(num_samples=8, mu=0.001)"),
        ("--estimator zo --dtype bf16 --samples 2", "zo(num_samples=2, mu=0.01)"),
        (
            "--estimator blr --optimizer gblr --accumulate 2 --denoise 2 --samples 3",
            "denoise(blr(accumulate(backprop(), 2), num_samples=3))",
        ),
    ],
)
def test_estimators_nest_in_the_legal_order(flags, wanted, monkeypatch):
    """Denoising is outermost, then the posterior, then the slices; no number is ignored."""

    def written(name):
        def made(*args, **kwargs):
            inner = [str(x) for x in args if not callable(x)]
            return f"{name}({', '.join([*inner, *(f'{k}={v}' for k, v in kwargs.items())])})"

        return made

    for module, name in ((train, "backprop"), (train, "accumulate")):
        monkeypatch.setattr(module, name, written(name))
    for name, module in (("zo", zo), ("blr", blr), ("denoise", denoise)):
        monkeypatch.setattr(module, "gradient_estimator", written(name))
    args, _ = trainer.parse(flags.split())
    assert trainer.make_estimator(args, lambda params, batch, key: 0.0) == wanted


@pytest.mark.parametrize(
    ("flags", "gain", "order"),
    [("1", 0.1, 1), ("2", 0.1, 2), ("2 --gain 0.3", 0.3, 2), ("3 --gain 0.2", 0.2, 3)],
)
def test_denoiser_has_the_order_and_gain_of_the_flags(flags, gain, order):
    """After the first step, whose gain is 1."""
    args, _ = trainer.parse(["--optimizer", "adamw", "--denoise", *flags.split()])
    params = jnp.ones(3)
    tx = trainer.make_optimizer(args, params, 100)
    _, (state, _) = tx.update(params, tx.init(params), params, queried=1.0)
    np.testing.assert_allclose(state.gain, gain, rtol=1e-6)
    assert state.order == order


def test_model_is_that_of_the_flags(monkeypatch):
    """Vocabulary, width, width of the MLP, layers, heads and dtype."""

    def decoder(*args):
        raise LookupError(args)

    monkeypatch.setattr(lm, "Decoder", decoder)
    with pytest.raises(LookupError) as made:
        trainer.main("--width 12 --layers 3 --heads 2 --dtype bf16 --batch 8".split())
    assert made.value.args[0] == (256, 12, 48, 3, 2, jnp.bfloat16)


def test_text_comes_from_a_file(tmp_path, capsys):
    """Its first nine tenths train, windows spread over the last are held out."""
    path = tmp_path / "corpus.txt"
    path.write_bytes(bytes(range(200)) * 10)
    args, parser = trainer.parse(["--text", str(path), "--context", "4", "--batch", "3"])
    tokens, held_out = trainer.read(args, parser)
    assert bytes(tokens.astype(np.uint8)) == bytes(range(200)) * 9
    assert held_out.shape == (8, 3, 5)  # every other of 40
    assert np.array_equal(held_out[0, :, 0], [0, 5, 10])
    assert "--text" in error_of(f"--text {path} --batch 24", capsys)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--estimator blr", ["--estimator blr", "--optimizer gblr"]),
        ("--optimizer gblr", ["--estimator blr", "--optimizer gblr"]),
        ("--samples 4", ["--samples", "--estimator"]),
        ("--gain 0.1", ["--gain", "--denoise"]),
        ("--denoise auto --gain 0.1", ["--gain", "auto"]),
        ("--every 2", ["--every", "--checkpoint"]),
        ("--heads 3", ["--heads", "--width 16"]),
        ("--batch 12", ["--batch", "--mesh", "12"]),
        ("--batch 24 --mesh data=8 --accumulate 2", ["--batch", "--accumulate"]),
        ("--mesh data=4,model=4", ["--mesh", "8 devices", "16"]),
        ("--mesh data=2,data=2", ["--mesh", "at most once"]),
        ("--mesh rows=2", ["--mesh", "data, fsdp, model"]),
        ("--mesh data", ["--mesh", "at least 1"]),
        ("--steps 0", ["--steps", "'0'"]),
        ("--text no_such_file", ["--text", "'no_such_file'"]),
        ("--optimizer no_such", ["--optimizer", "symmetry_compatible"]),
    ],
)
def test_wrong_flags_are_named(flags, named, capsys):
    """The program ends before it computes anything, and says which flags do not fit."""
    error = error_of(flags, capsys)
    assert all(word in error for word in named), error


def test_library_names_what_is_out_of_range():
    """A gain above 1 is the library's own error."""
    with pytest.raises(ValueError, match="gain must be"):
        trainer.main([*SMALL, "--denoise", "2", "--gain", "1.5"])


@pytest.mark.parametrize(
    ("env", "flags", "wanted"),
    [
        ({}, [], None),
        ({"SLURM_STEP_NUM_TASKS": "1", "TPU_WORKER_HOSTNAMES": "localhost"}, [], None),
        ({"SLURM_STEP_NUM_TASKS": "2"}, [], {}),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, [], {}),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, [], {}),
        ({}, ["--distributed"], {}),
        (
            {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"},
            [],
            {"num_processes": 2, "process_id": 1},
        ),
    ],
)
def test_joins_other_processes_where_the_environment_has_some(env, flags, wanted, monkeypatch):
    """And the help says so."""
    names = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "TPU_WORKER_HOSTNAMES")
    for name in (*names, "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda **given: calls.append(given))
    args, parser = trainer.parse(flags)
    trainer.join(args)
    assert calls == ([] if wanted is None else [wanted])
    assert "JAX_COORDINATOR_ADDRESS" in parser.format_help()


def test_races_work_beside_the_file_of_that_name():
    """The module train of this package is not taken for the library's."""
    size = lm.Size("help_topics", 16, 32, 1, 2, 8, 4, 20, 5, 8)
    rates = {"learning_rate": 0.01, "other_learning_rate": 0.02}
    state = lm.Task(size).start(_sgd, rates, (1, 2), 20)
    assert isinstance(state, train.TrainState) and lm.train is trainer


def _sgd(learning_rate, other_learning_rate):
    return optax.sgd(learning_rate + other_learning_rate)
