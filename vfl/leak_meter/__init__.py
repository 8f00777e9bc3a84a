"""The leak meter measures what the exchanges of a run leak. It provides ``vfl leaks`` and
``vfl.leaks``.

The contract of this package, as for any other research in this repository:

- It imports the rest, and nothing else imports it. A contract of import-linter checks this.
- The programs reach it only by entry points: ``vfl.commands`` and ``vfl.library``.
- A real party has no hook for it. A rehearsal puts an observer into the chains of the parties that
  it runs in this process: ``vfl.leak_meter.scene.observer``.
- Its knowledge of our methods is in ``vfl.leak_meter.scene.readable``. Methods of plug-ins provide
  it themselves.
- Its tests are in ``tests/unit/leak_meter`` and in ``tests/integration/test_leak*``.
- It may be removed: delete this folder, its entry points, its tests and its benchmarks, and all
  else works as before. A test does the first two.

Its packages: ``attacks`` has one file for each attack; ``scene`` records a run and defines what an
attacker has; ``learn`` has the models that attackers train; ``wiretap`` reads only sizes and times;
``report`` makes tables and pictures.
"""
