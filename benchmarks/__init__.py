"""Every claim of jaxkit against a named rival: ``python -m benchmarks`` runs, tabulates, plots.

A benchmark is one file ``benchmarks/<topic>/bench_<method>.py``; nothing lists it. It holds

- ``run(context)``, a generator of ``harness.Row`` and ``harness.Curve``;
- if it has settings to tune, ``tune(context)``, which returns its entry in ``settings.json``;
- if it can read data sets of the user, ``READS_DATA = True``, and takes them from ``context.data``;
- if it trains, ``steps(context)``, which yields the ``costs.Step`` of each method, ours and a rival
  first; its models compute in ``context.dtype``, and their parameters are float32;
- if the short form of all topics leaves it out, to end in six minutes on two cores,
  ``ON_REQUEST = True``: whoever names it or its topic runs it, and so do the other forms.

The first line of its docstring is what ``--list`` shows.
"""
