"""The leak meter: research on what a run's exchanges give away. It brings ``vfl leaks`` and
``vfl.leaks``.

The contract of this package, which any other research in this repository would have too:

- It imports the rest, and nothing else imports it. A contract of import-linter checks this.
- It reaches the programs by entry points alone: ``vfl.commands`` and ``vfl.library``.
- A real party has no hook for it. A rehearsal puts an observer into the chains of the parties that
  it runs in this process: ``vfl.leak_meter.scene.observer``.
- What it must know of our methods stands here: ``vfl.leak_meter.scene.readable``. Methods of
  plug-ins say it themselves.
- Its tests are in ``tests/unit/leak_meter`` and in ``tests/integration/test_leak*``.
- It may be removed: delete this folder, its entry points, its tests and its benchmarks, and all
  else works as before. A test does the first two.

The rooms: ``attacks`` has one file for each attack; ``scene`` records a run and says what an
attacker has; ``learn`` has what attackers train; ``wiretap`` reads sizes and times alone;
``report`` makes tables and pictures.
"""
