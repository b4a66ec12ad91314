"""The recipe of each family: grouped heads and learned positions take longer until recall forms."""

from kvexp.training.recipe import Recipe

RECIPES = {
    "testbed_rope": Recipe(steps=2400, one_attribute=0.6),
    "testbed_learned": Recipe(steps=2800),
    "testbed_alibi": Recipe(steps=2000),
    "testbed_gqa": Recipe(steps=2400, one_attribute=0.6),
}
