"""Gradients → new weights: Muon, AdamW and custom optimizers, their state, and its growth.

Optimizers take named parameters; this package does not import `steepen.model`. `optim.config`
imports without torch.
"""
