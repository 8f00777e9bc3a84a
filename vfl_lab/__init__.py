"""The laboratory studies runs: it reports, compares, searches, exports and manages them.

- It may import the other packages, but no other package imports it. import-linter checks this.
- The programs reach it only by entry points: ``vfl.commands``, ``vfl.library`` and ``vfl.reports``.
- It can be removed: delete this folder, its entry points and its tests. The rest works as before. A
  test removes the folder and the entry points.

Its packages: ``report`` makes tables, charts and pages of runs. ``studies`` runs methods over seeds
and label counts, and ``study`` does so for the library. ``searching`` searches settings.
``production`` has stages and comparison of models, drift and the removal of old runs. ``card``
writes model cards. ``export`` writes files for other programs. ``watch`` serves a live page.
"""
