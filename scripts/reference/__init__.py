"""Writes the generated parts of the documentation: keys, commands, errors, exchanges, and the
figures of benchmarks.

A page is written by hand. Where it has ``<!-- keys vfl_party.privacy.plan:DpSettings -->``, the lines up to
``<!-- /keys -->`` are made here. They are committed, so that a page can be read, searched and linked without building
the site, and a change of the code shows as a change of the page.
"""
