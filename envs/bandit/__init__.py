"""A two-armed bandit as text: the environment and its demonstrations."""
