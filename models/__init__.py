"""Loading targets and draft models, comparing vocabularies, cutting a draft model out of a target."""
