"""The exchange of bundles: one hub over two pipes, and the links to it."""
