"""The text that every Python carries, as tokens; nothing is downloaded.

It differs a little between Python versions, and so do losses on it.
"""

import collections
import pathlib
import pydoc_data.topics
import re
import sysconfig

import numpy as np

_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}


def help_topics():
    """Returns the bytes of Python's help texts, 0.5 MB of English: ``(tokens, vocabulary)``."""
    return _bytes(_help().encode())


def help_words(vocabulary=2048):
    """Returns the words and signs of the help texts, lower case: ``(tokens, vocabulary)``.

    Token 0 stands for all that are rarer than the ``vocabulary - 1`` most frequent ones.
    """
    words = re.findall(r"\w+|[^\w\s]", _help().lower())
    frequent = collections.Counter(words).most_common(vocabulary - 1)
    number = {word: index for index, (word, _) in enumerate(frequent, 1)}
    return np.array([number.get(word, 0) for word in words], np.int32), vocabulary


def frequent_help_words():
    """Returns the same with half the vocabulary, which is quicker to train on."""
    return help_words(1024)


def library_sources():
    """Returns the bytes of the standard library, about 10 MB: ``(tokens, vocabulary)``."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    names = sorted(path.relative_to(root) for path in root.rglob("*.py"))
    kept = [root / name for name in names if not _LEFT_OUT.intersection(name.parts)]
    return _bytes(b"\n".join(path.read_bytes() for path in kept))


def split(tokens, context):
    """Returns the first 90 percent, and the rest as windows of ``context + 1``: held-out data."""
    cut = len(tokens) * 9 // 10
    held_out = tokens[cut:]
    whole = len(held_out) // (context + 1) * (context + 1)
    return tokens[:cut], held_out[:whole].reshape(-1, context + 1)


def _help():
    topics = pydoc_data.topics.topics
    return "\n".join(topics[name] for name in sorted(topics))


def _bytes(text):
    return np.frombuffer(text, np.uint8).astype(np.int32), 256
