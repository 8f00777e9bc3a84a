"""The leak meter measures what the exchanges of a run leak. It provides ``vfl leaks`` and
``vfl.leaks``.

These rules apply to this package, as to any research package in this repository:

- It may import the other packages, but no other package imports it. import-linter checks this.
- The programs reach it only by entry points: ``vfl.commands`` and ``vfl.library``.
- A real party has no hook for it. A rehearsal inserts an observer into the parties that run in this
  process: ``vfl_leaks.recording``.
- ``vfl_leaks.recording`` has the facts about the built-in methods. The methods of
  plug-ins provide these facts themselves.
- Its tests are in ``tests/unit/leaks`` and in ``tests/integration/test_leak*``.
- It can be removed: delete this folder, its entry points, its tests and its benchmarks. The rest
  works as before. A test removes the folder and the entry points.

Its packages: ``attacks`` has one file for each attack. ``scene`` records a run and defines the data
of an attacker. ``learn`` has the models that attackers train. ``wiretap`` uses only sizes and times
of messages. ``report`` makes tables and pictures.
"""
