"""A federation's certificate authority. ``vfl certs`` reads these numbers without it."""

CA_DAYS = 3650
PARTY_DAYS = 365
# The validity of a signed list of revoked certificates.
LIST_DAYS = PARTY_DAYS
MAX_DAYS = 36500
