"""``vfl prepare``: makes parties' tables and a recipe from the official files of a data set.

It provides ``vfl prepare``, ``vfl.prepare``, and the names for data sets in ``vfl.api``. These
rules apply to this package:

- It may import the other packages, but no other package imports it. import-linter checks this.
- The programs reach it only by entry points: ``vfl.commands``, ``vfl.library`` and ``vfl.api``.
- Its tests are in ``tests/unit/papers`` and in ``tests/integration/test_prepare*``.
- It can be removed: delete this folder, its entry points and its tests. The rest works as before.

To add a data set, add it to the table ``DATASETS`` in ``images`` or ``tables``. A data set has
forms, which are sets of official files with a function that reads them, and divisions among
parties. ``formats`` and ``columns`` read files. ``plan`` checks the arguments, ``prepare`` finds
the files and draws the rows, ``writing`` writes the parties' files, and ``making`` writes the
recipe and the summary.
"""
