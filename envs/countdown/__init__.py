"""Countdown as text: problems, expressions, the environment and its demonstrations."""
