"""Governs what a party releases: signed grants, limits over all runs, and reports of what was sent.

These rules apply to this package:

- It may import ``vfl_party`` and ``vfl_common``, but no other package imports it. import-linter
  checks this.
- The programs reach it only by entry points: ``vfl_party.commands`` adds its commands to
  ``vfl-party``, and ``vfl.guards`` adds its guards to runs and to served models. The protocols of
  guards are in ``vfl_party.policy.guards``.
- Without it, a party whose policy sets ``approval`` or ``account`` refuses to run.
"""
