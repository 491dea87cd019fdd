import signal
import threading

import jax
import pytest

from jaxkit.train import _host


def test_signals_are_collected_and_handlers_restored():
    """Inside, SIGTERM is only noted, as often as it comes; after, the old handler is back."""
    old = signal.getsignal(signal.SIGTERM)
    with _host.signals() as caught:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
    assert caught == [signal.SIGTERM] * 2
    assert signal.getsignal(signal.SIGTERM) is old


def test_handlers_are_restored_after_an_error():
    """An exception inside leaves the old handlers too."""
    old = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyError), _host.signals():
        raise KeyError
    assert signal.getsignal(signal.SIGINT) is old


def test_an_ignored_signal_stays_ignored():
    """Where Ctrl-C is ignored, as under nohup, it does not stop the run."""
    old = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with _host.signals() as caught:
            signal.raise_signal(signal.SIGINT)
        assert caught == []
    finally:
        signal.signal(signal.SIGINT, old)


def test_other_threads_set_no_handler():
    """Outside the main thread nothing is set and nothing raised."""
    seen = []

    def body():
        with _host.signals() as caught:
            seen.append((caught, signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [([], signal.getsignal(signal.SIGINT))]


def test_sigterm_goes_before_ctrl_c():
    """Of both, SIGTERM is what the run stops for; of none, nothing."""
    assert _host.agreed([signal.SIGTERM, signal.SIGINT], False) == signal.SIGTERM
    assert _host.agreed([signal.SIGINT], False) == signal.SIGINT
    assert _host.agreed([], True) == 0


def test_the_largest_of_one_process_is_its_own():
    """Alone, the number comes back as a Python int."""
    assert _host.largest(True) == 1 and type(_host.largest(True)) is int


@pytest.mark.parametrize(
    ("count", "message", "kind"),
    [
        (2, "UNKNOWN: Connection closed by peer\nmore", ConnectionError),
        (2, "RESOURCE_EXHAUSTED: Out of memory", jax.errors.JaxRuntimeError),
        (1, "UNKNOWN: Connection closed by peer", jax.errors.JaxRuntimeError),
    ],
)
def test_a_failure_among_several_processes_is_a_lost_one(monkeypatch, count, message, kind):
    """Among several it says so and gives the first line; lack of memory stays what it is."""
    monkeypatch.setattr(jax, "process_count", lambda: count)
    with pytest.raises(kind) as error, _host.company():
        raise jax.errors.JaxRuntimeError(message)
    assert message.splitlines()[0] in str(error.value)
    assert (f"Process 0 of {count} has lost another" in str(error.value)) == (
        kind is ConnectionError
    )


@pytest.mark.parametrize(("terminal", "progress"), [("1", True), ("0", True), ("1", False)])
def test_the_bar_is_drawn_in_a_terminal_only(monkeypatch, capsys, terminal, progress):
    """On a terminal stderr shows steps, loss and speed; else, or switched off, nothing."""
    monkeypatch.setenv("TTY_COMPATIBLE", terminal)  # rich's own switch
    monkeypatch.setenv("TERM", "xterm")
    with _host.progress_bar(2, 5, progress) as show:
        show(3, None)
        show(4, 0.12345)
        show(5, None)
    out, err = capsys.readouterr()
    assert out == ""
    drawn = terminal == "1" and progress
    assert [text in err for text in ("5/5", "loss 0.1235", "steps/s")] == [drawn] * 3
    assert bool(err) == drawn
