"""Tokens to logits: one prelude-core-coda network for every arm.

The nouns (`shape`, `arm`, `arms`, `options`) never import torch; the network does.
"""
