"""The common code of self-supervised methods at a party: settings, views, towers, the local step,
the report.
"""
