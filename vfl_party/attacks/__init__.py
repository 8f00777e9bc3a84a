"""Attacks that measure what an exchange gives away of a party's rows. They know no phases, no files, no network."""
