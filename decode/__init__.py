"""Draft-then-verify decoding: sampling transforms, verification rules, trees, caches, the loop, drafters without training."""
