"""Data sets of advertisements that were shown: was there a click?"""
