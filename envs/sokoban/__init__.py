"""Sokoban as text: rooms, rules, solver, demonstrations."""
