"""The command ``python -m benchmarks``: runs, tunes, lists or compares."""

import argparse
import concurrent.futures
import contextlib
import importlib.metadata
import json
import os
import pathlib
import platform
import shlex
import subprocess
import sys

import rich.console
import rich.progress

from benchmarks import catalog

ROOT = pathlib.Path(__file__).resolve().parent.parent
OUT = ROOT / "benchmarks" / "out"
IGNORED = {  # what each mode has no use for
    "compare": ("topics", "full", "smoke", "json", "trace", "data", "dtype"),
    "list": ("full", "smoke", "json", "trace", "data", "dtype"),
    "tune": ("smoke", "json", "dtype"),
}


def main(argv=None):
    """Runs the command and returns its exit code."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = _parser()
    args = parser.parse_args(argv)
    _refuse(parser, args)
    available = catalog.discover()
    if args.compare:
        return _compare(parser, args)
    names = _select(parser, args.topics, available)
    if args.list:
        for name in names:
            print(f"{name}: {catalog.summary(name)}")
        return 0
    return _run(parser, args, names, shlex.join(["python", "-m", "benchmarks", *argv]))


def _parser():
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Runs jaxkit side by side with its rivals; ends with one table and one figure, "
        "both written to benchmarks/out/.",
    )
    parser.add_argument("topics", nargs="*", help="topics, or topic.method; default: all")
    forms = parser.add_mutually_exclusive_group()
    forms.add_argument("--full", action="store_true", help="more seeds, larger; for accelerators")
    forms.add_argument("--smoke", action="store_true", help="toy sizes; only shows that all runs")
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--tune", action="store_true", help="search settings, write settings.json")
    modes.add_argument("--list", action="store_true", help="list the benchmarks")
    modes.add_argument(
        "--compare",
        nargs=2,
        metavar=("OLD", "NEW"),
        type=pathlib.Path,
        help="print what changed beyond noise between two files of --json",
    )
    parser.add_argument("--json", metavar="FILE", type=pathlib.Path, help="write JSON lines")
    parser.add_argument("--trace", metavar="DIR", type=pathlib.Path, help="write a profiler trace")
    parser.add_argument("--data", metavar="DIR", type=pathlib.Path, help="folder of real data sets")
    parser.add_argument(
        "--dtype",
        choices=["bf16"],
        help="of what models compute, with float32 parameters and the same settings",
    )
    return parser


def _select(parser, topics, available):
    """Returns the benchmarks that ``topics`` name; an unknown name ends the program."""
    known = dict.fromkeys(name.split(".")[0] for name in available)
    for topic in topics:
        if topic not in known and topic not in available:
            choices = ", ".join([*known, *available])
            parser.error(f"unknown topic {topic!r}; the topics are {choices}")
    return [name for name in available if not topics or {name, name.split(".")[0]} & set(topics)]


def _refuse(parser, args):
    """Ends the program if a flag is given that the mode would ignore."""
    for mode, flags in IGNORED.items():
        for flag in flags if getattr(args, mode) else ():
            if getattr(args, flag):
                parser.error(f"--{mode} does not use {flag if flag == 'topics' else '--' + flag}")


def _compare(parser, args):
    from benchmarks import report

    try:
        old, new = map(report.read, args.compare)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    _console().print(report.compare(old, new))
    return 0


def _run(parser, args, names, command):
    import jax
    import jax.numpy as jnp

    from benchmarks import harness, report, tuning

    modules = {name: catalog.load(name) for name in names}
    if args.tune:
        modules = {name: module for name, module in modules.items() if hasattr(module, "tune")}
        if not modules:
            parser.error("--tune finds no settings in the selected benchmarks")
    if args.data and not any(getattr(module, "READS_DATA", False) for module in modules.values()):
        parser.error("--data: no selected benchmark reads data sets")
    if args.data and not args.data.is_dir():
        parser.error(f"--data must be a folder, got {args.data}")

    if args.dtype:
        modules = {x: module for x, module in modules.items() if hasattr(module, "steps")}
        if not modules:
            parser.error(f"--dtype {args.dtype}: no selected benchmark trains a model")

    form = "full" if args.full else "smoke" if args.smoke else "short"
    left_out = []
    if form == "short" and not args.topics and not args.tune:
        left_out = [name for name in modules if getattr(modules[name], "ON_REQUEST", False)]
        modules = {name: module for name, module in modules.items() if name not in left_out}
    about = {"device": _device(), "versions": _versions(), "commit": _commit(), "command": command}
    rows, curves, failed = [], [], []
    errors = rich.console.Console(stderr=True)
    with contextlib.ExitStack() as stack:
        lines = stack.enter_context(args.json.open("w")) if args.json else None
        if args.trace:
            stack.enter_context(jax.profiler.trace(args.trace))
        progress = stack.enter_context(_progress(errors))
        contexts, tasks = {}, {}
        for name in modules:
            topic, method = name.split(".")
            tasks[name] = progress.add_task(name, total=0)
            contexts[name] = harness.Context(
                form=form,
                settings=catalog.settings(topic).get(method, {}),
                data=args.data,
                track=_tracker(progress, tasks[name], name),
                note=progress.console.print,
                dtype=jnp.bfloat16 if args.dtype else jnp.float32,
            )
        # Toy sizes measure nothing: two run at once, since compiling takes one core.
        ahead = {}
        if form == "smoke":
            pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(2))
            for name, module in modules.items():
                ahead[name] = pool.submit(lambda *x: list(x[0].run(x[1])), module, contexts[name])
        for name, module in modules.items():
            topic, method = name.split(".")
            try:
                if args.tune:
                    found = module.tune(contexts[name])
                    catalog.write_settings(topic, method, found)
                    for fault in tuning.faults(found):
                        progress.console.print(f"{name}: {fault}")
                    continue
                items = ahead[name].result() if ahead else module.run(contexts[name])
                for item in items:
                    if isinstance(item, harness.Curve):
                        curves.append(item)
                        continue
                    row = {"topic": topic, **item._asdict(), **about}
                    row["size"] += f", {args.dtype}" if args.dtype else ""
                    rows.append(row)
                    if lines:
                        print(json.dumps(row), file=lines, flush=True)
            except Exception:
                failed.append(name)
                progress.console.print_exception()
            finally:
                ended = "failed" if name in failed else "done"
                progress.update(tasks[name], description=f"{name}: {ended}")
    if rows:
        OUT.mkdir(exist_ok=True)
        prefix = "" if form == "short" else f"{form}_"
        table, figure = OUT / f"{prefix}table.md", OUT / f"{prefix}figure.png"
        table.write_text(report.markdown(rows))
        report.figure(rows, curves, figure)
        _console().print(report.table(rows))
        print(f"Table: {table}\nFigure: {figure}")
    if left_out:
        print(f"Run when they or their topics are named: {', '.join(left_out)}")
    if failed:
        errors.print(f"Failed: {', '.join(failed)}")
    return 1 if failed else 0


def _console():
    # A file or a pipe has no width of its own; cells must not break there.
    return rich.console.Console(width=None if sys.stdout.isatty() else 160)


def _progress(console):
    return rich.progress.Progress(
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeElapsedColumn(),
        console=console,
    )


def _tracker(progress, task, name):
    def track(stages):
        progress.update(task, total=progress.tasks[task].total + len(stages))
        for stage in stages:
            progress.update(task, description=f"{name}: {stage}")
            yield stage
            progress.advance(task)

    return track


def _device():
    import jax

    device = jax.devices()[0]
    cores = f", {os.cpu_count()} cores" if device.platform == "cpu" else ""
    return f"{jax.device_count()} x {device.device_kind}{cores}"


def _versions():
    import jaxkit

    packages = ("jax", "jaxlib", "numpy", "optax", "flax")
    return {
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
        "jaxkit": jaxkit.__version__,
    }


def _commit():
    """Returns the commit of the checkout, with ``-dirty`` if files differ from it."""
    if not (ROOT / ".git").exists():
        return "unknown"
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return "unknown"
    return done.stdout.strip() if done.returncode == 0 else "unknown"


if __name__ == "__main__":
    # Compile times are measured, so nothing may come from a cache of earlier runs.
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    if "--smoke" in sys.argv:  # measures nothing, so that quick to compile is best
        os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    sys.exit(main())
