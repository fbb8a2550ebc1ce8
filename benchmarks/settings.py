"""The settings at which rules are compared, in the product, in its peers and in the exact merge."""

SCALE = 0.3
DENSITY = 0.2
