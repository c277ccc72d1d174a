"""Support for every part: facts about models, trees of tensors, the arithmetic of losses, logging, units."""
