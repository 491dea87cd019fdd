"""The text that every Python carries, as byte tokens; nothing is downloaded.

It differs a little between Python versions, and so do losses on it.
"""

import pathlib
import pydoc_data.topics
import sysconfig

import numpy as np

_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}


def help_topics():
    """Returns Python's help texts, about 0.5 MB of English: ``(tokens, vocabulary size)``."""
    topics = pydoc_data.topics.topics
    return _encode("\n".join(topics[name] for name in sorted(topics)).encode())


def library_sources():
    """Returns the standard library's sources, about 10 MB: ``(tokens, vocabulary size)``."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    names = sorted(path.relative_to(root) for path in root.rglob("*.py"))
    kept = [root / name for name in names if not _LEFT_OUT.intersection(name.parts)]
    return _encode(b"\n".join(path.read_bytes() for path in kept))


def split(tokens, context):
    """Returns the first 90 percent, and the rest as windows of ``context + 1``: held-out data."""
    cut = len(tokens) * 9 // 10
    held_out = tokens[cut:]
    whole = len(held_out) // (context + 1) * (context + 1)
    return tokens[:cut], held_out[:whole].reshape(-1, context + 1)


def _encode(text):
    """Numbers the bytes that occur; the vocabulary is no larger than it must be."""
    known, tokens = np.unique(np.frombuffer(text, np.uint8), return_inverse=True)
    return tokens.astype(np.int32), len(known)
