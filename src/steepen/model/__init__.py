"""Tokens → logits: one prelude-core-coda network for every arm.

`shape`, `arm`, `arms` and `config` describe a network and import without torch.
"""
