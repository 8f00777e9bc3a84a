"""The plug-in by which a launcher loads ``crash``: only programs may import it, never the tests'
own process.
"""

from tests.harness.crash import wrap_all

# The entry point's object; only the import counts.
METHOD = None
wrap_all()
