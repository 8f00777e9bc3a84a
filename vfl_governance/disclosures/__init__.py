"""The command `vfl-party disclosures`, which shows, checks and signs what a party has sent."""
