"""Guides of answers: grammars through llguidance, and the length of thinking."""
