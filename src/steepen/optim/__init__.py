"""Gradients → new weights: Muon, AdamW and custom optimizers, their state, and its growth.

Optimizers know named parameters, not networks. `optim.config` imports without torch.
"""
